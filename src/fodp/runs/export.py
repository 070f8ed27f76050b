"""What may be published of a run: weights, a privacy card, how to predict. No key, no seed, no private quantity."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fodp.accounting.budget import RenyiBudget
from fodp.errors import ConfigurationError, LedgerError, PrivacyError
from fodp.ledger import Ledger
from fodp.plan import Plan
from fodp.runs.exported import prediction_notes
from fodp.runs.folder import RunFolder
from fodp.state import checkpoint
from fodp.state.published import privacy_card
from fodp.support import checks


def export(run_folder: Path, file: Path) -> dict[str, Any]:
    """Write the run's weights, its privacy card and what predicting takes; returns the card."""
    folder = RunFolder(run_folder)
    if not os.path.exists(folder.checkpoint):  # which takes names that no system does for absent
        found = folder.path / "model.safetensors"
        if os.path.exists(found):
            raise ConfigurationError(f"{folder.path} is the folder of a search, whose export is there already: {found}")
        raise ConfigurationError(
            f"{folder.path} is not the folder of a run (no {folder.checkpoint.name}): name the one that `fodp train` "
            "printed, or said with --out"
        )
    saved = checkpoint.load(folder.checkpoint)
    try:
        plan = Plan(**saved["plan"])
        checks.whole("step", saved["step"], minimum=0)
        planned = plan.steps if saved["planned"] is None else checks.whole("planned", saved["planned"])
        steps, budget = _charged(folder, plan, saved)
        card = privacy_card(plan, steps, planned, budget) | _prediction_notes(folder, file)
        write_weights(saved["model"], card, file)
    except (AttributeError, KeyError, TypeError) as error:
        raise LedgerError(f"{folder.path} does not hold a run ({error}); restore a copy of it") from None
    return card


def write_weights(state: dict[str, Tensor], card: dict[str, Any], file: Path) -> None:
    """Weights, with the privacy card (and what predicting takes) as metadata."""
    # Tied weights share memory, which the format refuses: each name gets its own copy.
    weights = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise PrivacyError(f"the run has diverged: {broken[0]} is not finite; train again with a lower learning rate")
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in card.items()}
    try:
        save_file(weights, file, metadata=metadata)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(f"{file} cannot be written ({error}); name a file in a writable folder") from None


def _prediction_notes(folder: RunFolder, file: Path) -> dict[str, str]:
    """The model, its data's public card and how to load them; only `fodp train` knows, who trains by hand does not."""
    config = folder.read_config() if folder.config.exists() else {}
    if "card" not in config:
        return {}
    return prediction_notes(config["model"], config["model_code"], config["card"], file.name)


def _charged(folder: RunFolder, plan: Plan, saved: dict[str, Any]) -> tuple[int, RenyiBudget | None]:
    """The steps that the run counts as having used, and the budget that guards it.

    A checkpoint does not know what was released after it was written; the ledger does.
    """
    if saved["ledger"] is None or saved["step"] >= plan.steps:
        return int(saved["step"]), None
    ledger = Ledger(folder.ledger_of(folder.read_config()), create=False)
    ledger.refuse_stranger(saved["run"], saved["digest"], saved["ledger"])
    charged, budget = ledger.steps(saved["run"]) or 0, ledger.budget_of(saved["run"])
    ledger.close()
    return max(int(saved["step"]), charged), budget
