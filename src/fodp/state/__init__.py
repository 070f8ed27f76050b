"""What a run needs to go on: checkpoints, and where it stands in its plan and its ledger."""
