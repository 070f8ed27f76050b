"""Audits: attacks from outside on a mechanism or a whole pipeline, beside the ε that it claims.

    from fodp import audit
    report = audit.audit(plan, model, loss_fn, dataset, canaries=audit.random_canaries(dataset, 1000, classes=10))
    report.consistent, report.epsilon_lower, report.to_dict()

An attack that finds nothing proves nothing; one that finds something proves a mistake.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fodp.audit.mechanism import attack_mechanism
from fodp.audit.one_run import attack_training, random_canaries
from fodp.audit.replay import replay_neighbours
from fodp.audit.report import LEVEL, Finding, Progress, Report
from fodp.audit.sampling import check_sampling
from fodp.audit.subject import Canvas, MakeTrainer, plain_trainer
from fodp.clipping.engine import LossFunction
from fodp.plan import Plan
from fodp.ranks import refuse_group
from fodp.support import checks

__all__ = [
    "ATTACKS",
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


ATTACKS = ("mechanism", "sampling", "replay", "one-run")
"""The attacks of a whole audit, in the order in which they are made."""


def audit(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction,
    dataset: Any,
    canaries: Any,
    make: MakeTrainer = plain_trainer,
    *,
    owners: Sequence[int | str] | None = None,
    attacks: Sequence[str] = ATTACKS,
    trials: int | None = None,
    confidence: float = 1 - LEVEL,
    seed: int = 0,
    secure: bool | None = None,
    progress: Callable[[str, float], None] = lambda attack, done: None,
) -> Report:
    """The chosen attacks on a plan and the pipeline that `make` builds for it.

    `make(model, loss_fn, dataset, plan)` returns a fresh trainer; give your own to audit your augmentation, your
    optimizer or your run. Replay and one-run attack your model with all of that, its loss and its random numbers
    included; painted gradients and made-up records leave the augmentation out. `secure` True or False runs everything
    in that mode; None runs the plan in its own and the replay in both. Secure runs take a key made from `seed`, so
    that an audit can be repeated. Where the plan's unit is a person, people are added and removed, and `make` is given
    `owners` too; those given here are of the data. `dataset` and `canaries` are tensors or a `TensorDataset`. With a
    correct pipeline the whole report is consistent with probability `confidence` at least. `progress` is told an attack
    and how far it is.
    """
    refuse_group("an audit")
    checks.open_fraction("confidence", confidence)
    chosen = [checks.one_of("attack", attack, ATTACKS) for attack in attacks]
    each = 1 - (1 - confidence) / 3  # the replay is deterministic and needs no share

    def attack(name: str) -> Finding:
        told = functools.partial(progress, name)
        common: dict[str, Any] = {"make": make, "seed": seed, "secure": secure, "progress": told}
        if name == "mechanism":
            return attack_mechanism(plan, trials=trials, confidence=each, **common)
        if name == "sampling":
            return check_sampling(plan, confidence=each, **common)
        if name == "replay":
            return replay_neighbours(plan, model, loss_fn, dataset, **common)
        return attack_training(plan, model, loss_fn, dataset, canaries, owners=owners, confidence=each, **common)

    return Report(plan, tuple(attack(name) for name in chosen))
