"""What `fodp train` says to the ledger and to the folder of a run that is taken up again."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from fodp._checks import PrivacyError
from fodp.cli.ledger import parse_budget
from fodp.ledger import Ledger
from fodp.training.folder import RunFolder
from fodp.training.trainer import Trainer


def open_ledger(path: Path | str, config: dict[str, Any], options: argparse.Namespace) -> Ledger:
    """The ledger that a run is kept in."""
    ledger = Ledger(
        path,
        dataset=config.get("dataset_name"),
        budget=parse_budget(config["budget"]) if "budget" in config else None,
        allow_changed_data=bool(options.allow_changed_data),
        allow_other_name=bool(options.allow_other_name),
        create=not options.resume,
        wait=math.inf if options.wait else 0.0,
    )
    ledger.tell_waiting(lambda text: print(text, file=sys.stderr))
    return ledger


def share_left(ledger: Ledger | None) -> float | None:
    """The share of the data's budget that is left; None without a budget."""
    if ledger is None or ledger.dataset is None or ledger.budget(ledger.dataset) is None:
        return None
    return ledger.left(ledger.dataset)


def resume(trainer: Trainer, folder: RunFolder, config: dict[str, Any]) -> None:
    """Go on from the checkpoint; a run that broke off before it released anything may begin anew."""
    if folder.checkpoint.exists():
        trainer.resume(folder.checkpoint)
        folder.tidy()
        return
    used = trainer.ledger.steps(str(config.get("run"))) if trainer.ledger is not None else None
    if used:
        raise PrivacyError(
            f"{folder.checkpoint} is gone, though {used} steps were used: restore it, or start a new run in another "
            "folder (--out); what was used stays charged"
        )
    folder.tidy()
    trainer.run_id = str(config["run"])
    print(f"{folder.path} broke off before its first step: it begins anew", file=sys.stderr)
