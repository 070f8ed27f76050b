"""A private loop whose checkpoints another package writes.

The package saves model and optimizer; this is what it cannot know: the method's memory, the step, the position in the
ledger, and a digest of all that with the weights, by which the ledger knows its own checkpoints again. What is refused
is what a checkpoint of ours would be refused for.
"""

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

import fodp
from fodp._checks import PrivacyError
from fodp.ledger import Ledger
from fodp.run import Run
from fodp.training import checkpoint
from fodp.training.loop import PrivateLoader
from fodp.training.witness import witness_of


def loop_state(loader: PrivateLoader) -> dict[str, Any]:
    """What a private loop needs to go on: releases and public numbers only, as tensors and plain values.

    To be taken between steps, beside the model's weights of the same moment; a ledger notes that it was written.
    """
    keeper, run, account = loader._keeper, loader._run, loader._run.account
    state: dict[str, Any] = {
        "made_with": {"fodp": fodp.__version__, "torch": str(torch.__version__)},
        "run": keeper.run_id,
        "ledger": None if account is None else list(account.position),
        "plan": {**run.plan.to_dict(), "params": dict(run.plan.params)},
        "step": run.step,
        "lost_steps": keeper.lost_steps,
        "state": run.state_dict(),
    }
    state["digest"] = _digest(run, state)
    if account is not None:
        account.note_checkpoint(run.step, state["digest"])
    return state


def take_up(loader: PrivateLoader, state: dict[str, Any], ledger: Ledger | None) -> None:
    """Put a fresh loop where `loop_state` was taken; its model has the weights of that moment already.

    Seeded: the same releases follow, bit for bit. Secure: steps that were used after the checkpoint are lost but stay
    charged, so the run ends that much earlier; this takes the run's ledger.
    """
    keeper, run = loader._keeper, loader._run
    checkpoint.refuse_other_plan(state["plan"], run.plan)
    checkpoint.refuse_other_version(state["made_with"], run.plan.seed is not None)
    if _digest(run, state) != state["digest"]:
        raise PrivacyError("the checkpoint is damaged or was changed (its digest differs): restore a copy of it")
    keeper.ledger = ledger
    checkpoint._refuse_other_ledger(keeper, state)
    run.load_state_dict(state["state"])
    keeper.run_id, keeper.lost_steps, run.step = str(state["run"]), int(state["lost_steps"]), int(state["step"])
    if ledger is not None:
        run.account = checkpoint._reopened_account(keeper)
        checkpoint._skip_lost_steps(keeper, run.account)
    run.witness = witness_of(run, run.account)


def _digest(run: Run, state: dict[str, Any]) -> str:
    """Of the state without its digest, and of the weights that it belongs to."""
    found = hashlib.sha256()
    leaves, _ = tree_flatten_with_path({key: value for key, value in state.items() if key != "digest"})
    for path, leaf in [*leaves, (("weights",), run.parameters())]:
        found.update(str(path).encode())
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
