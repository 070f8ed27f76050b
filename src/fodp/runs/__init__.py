"""Run folders, and what may be published of a run: `folder`, `export`, `exported`."""
