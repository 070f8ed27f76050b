"""Audits: attacks from outside on a mechanism or a whole pipeline, beside the ε that it claims.

    from fodp import audit
    report = audit.audit(plan, model, loss_fn, dataset, canaries=audit.random_canaries(dataset, 1000, classes=10))
    report.consistent, report.epsilon_lower, report.to_dict()

An attack that finds nothing proves nothing; one that finds something proves a mistake.
"""

from typing import Any

from torch import nn

from fodp.audit.mechanism import attack_mechanism
from fodp.audit.one_run import attack_training, random_canaries
from fodp.audit.replay import replay_neighbours
from fodp.audit.report import LEVEL, Finding, Progress, Report, silent
from fodp.audit.sampling import check_sampling
from fodp.audit.subject import Canvas, MakeTrainer, plain_trainer
from fodp.clipping.engine import LossFunction
from fodp.plan import Plan

__all__ = [
    "Canvas",
    "Finding",
    "MakeTrainer",
    "Progress",
    "Report",
    "attack_mechanism",
    "attack_training",
    "audit",
    "check_sampling",
    "plain_trainer",
    "random_canaries",
    "replay_neighbours",
]


def audit(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction,
    dataset: Any,
    canaries: Any,
    make: MakeTrainer = plain_trainer,
    *,
    trials: int | None = None,
    confidence: float = 1 - LEVEL,
    seed: int = 0,
    progress: Progress = silent,
) -> Report:
    """All four attacks on a plan and the pipeline that `make` builds for it.

    `make(model, loss_fn, dataset, plan)` returns a fresh trainer; give your own to audit your augmentation, your
    optimizer or your run. `dataset` and `canaries` are tensors or a `TensorDataset`. With a correct pipeline the
    whole report is consistent with probability `confidence` at least.
    """
    each = 1 - (1 - confidence) / 3  # the replay is deterministic and needs no share

    def part(place: int) -> Progress:
        return lambda done: progress((place + done) / 4)

    common: dict[str, Any] = {"make": make, "seed": seed}
    return Report(
        plan,
        (
            attack_mechanism(plan, trials=trials, confidence=each, progress=part(0), **common),
            check_sampling(plan, confidence=each, progress=part(1), **common),
            replay_neighbours(plan, model, loss_fn, dataset, progress=part(2), **common),
            attack_training(plan, model, loss_fn, dataset, canaries, confidence=each, progress=part(3), **common),
        ),
    )
