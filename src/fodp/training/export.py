"""What may be published of a run: weights and a privacy card. No key, no seed, no private quantity."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.budget import RenyiBudget
from fodp.ledger import Ledger
from fodp.plan import Plan
from fodp.training import checkpoint
from fodp.training.fitting import stated_epsilon
from fodp.training.folder import RunFolder


def export(run_folder: Path, file: Path) -> dict[str, Any]:
    """Write the run's weights and its privacy card; returns the card."""
    folder = RunFolder(run_folder)
    saved = checkpoint.load(folder.checkpoint)
    try:
        plan = Plan(**saved["plan"])
        _checks.whole("step", saved["step"], minimum=0)
        planned = plan.steps if saved["planned"] is None else _checks.whole("planned", saved["planned"])
        steps, budget = _charged(folder, plan, saved)
        card = privacy_card(plan, steps, planned, budget)
        # Tied weights share memory, which the format refuses: each name gets its own copy.
        weights = {name: tensor.clone().contiguous() for name, tensor in saved["model"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise PrivacyError(f"{folder.checkpoint} is not a run's checkpoint ({error}); restore a copy of it") from None
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise PrivacyError(f"the run has diverged: {broken[0]} is not finite; train again with a lower learning rate")
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in card.items()}
    try:
        save_file(weights, file, metadata=metadata)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise PrivacyError(f"{file} cannot be written ({error}); name a file in a writable folder") from None
    return card


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


def privacy_card(plan: Plan, steps: int, planned: int, budget: RenyiBudget | None = None) -> dict[str, Any]:
    """What a reader of the model needs to know about its privacy, with one ε; the seed is not among it.

    The run used `steps` steps; `planned` were fixed before it began, and hold for a run that was stopped early.
    """
    epsilon = stated_epsilon(plan, steps, planned, budget)
    return {
        "epsilon": epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "method": plan.method,
        "params": dict(plan.params),
        "sampling_rate": plan.sampling_rate,
        "steps": steps,
        "clip_norm": plan.clip_norm,
        "noise_multiplier": plan.noise_multiplier,
        "unit": "one training example, added or removed",
        "randomness": "secure"
        if plan.seed is None
        else "seeded research run: no guarantee against holders of the seed",
        "statement": plan.statement(steps=max(steps, planned), epsilon=epsilon),
    }
