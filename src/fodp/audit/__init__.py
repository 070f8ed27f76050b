"""Audits: attacks from outside on a mechanism or a whole pipeline, beside the ε that it claims.

    from fodp import audit
    report = audit.audit(plan, model, loss_fn, dataset, canaries=audit.random_canaries(dataset, 1000, classes=10))
    report.consistent, report.epsilon_lower, report.to_dict()

An attack that finds nothing proves nothing; one that finds something proves a mistake.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import nn

from fodp.audit.mechanism import attack_mechanism
from fodp.audit.one_run import attack_training, random_canaries
from fodp.audit.replay import replay_neighbours
from fodp.audit.report import LEVEL, Finding, Progress, Report
from fodp.audit.sampling import check_sampling
from fodp.audit.subject import Canvas, How, MakeTrainer, plain_trainer
from fodp.clipping.engine import LossFunction
from fodp.plan import Plan
from fodp.ranks import refuse_group
from fodp.support import checks

__all__ = [
    "ATTACKS",
    "Canvas",
    "Finding",
    "How",
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
    progress: Callable[[str, float], None] = lambda attack, done: None,
    **how: Unpack[How],
) -> Report:
    """The chosen attacks on a plan and on the pipeline that `make` builds for it.

    Guarantee: a correct pipeline passes all attacks with probability `confidence` at least. Passing is no proof.

    Args:
        plan: the claim under attack.
        model, loss_fn: what is trained. Replay and one-run attack both, with all that they draw.
        dataset: tensors or a `TensorDataset`. What is found is computed from it without noise.
        canaries: records like those of the data set, such as `random_canaries` makes.
        make: `make(model, loss_fn, dataset, plan)` returns a fresh trainer; give your own to audit your augmentation,
            your optimizer or your run. Where the plan's unit is a person, it is also given `owners`.
        owners: for a plan with unit="person", whose each record of the data is.
        attacks: some of `ATTACKS`.
        trials: guesses of the mechanism attack for each direction; None makes enough to show a tenth too little noise.
        confidence: of the whole report.
        progress: called with an attack and the fraction of it that is done.
        how: `seed` of the audit's own random numbers, and of the key of secure runs, so that an audit can be repeated;
            `secure` True or False runs everything in that mode, None the plan in its own and the replay in both.

    Returns:
        A `Report`: `consistent`, `exit_code`, `epsilon_lower`, a `Finding` for each attack, `to_dict()`.

    Raises:
        ConfigurationError: an attack that is not known, a confidence that is no probability, a group of processes.
        DataError: a data set that is not made of tensors.

    Example:
        >>> import fodp, torch
        >>> from fodp import audit
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
        >>> plan = fodp.Plan(sampling_rate=0.5, steps=3, lot_size=20, noise_multiplier=2.0, delta=1e-3)
        >>> losses = lambda model, rows: torch.nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")
        >>> canaries = audit.random_canaries(data, 20, classes=2)
        >>> report = audit.audit(plan, torch.nn.Linear(3, 2), losses, data, canaries, attacks=["replay"])
        >>> report.consistent
        True
    """
    refuse_group("an audit")
    checks.open_fraction("confidence", confidence)
    chosen = [checks.one_of("attack", attack, ATTACKS) for attack in attacks]
    each = 1 - (1 - confidence) / 3  # the replay is deterministic and needs no share

    def attack(name: str) -> Finding:
        told = functools.partial(progress, name)
        if name == "mechanism":
            return attack_mechanism(plan, make, trials=trials, confidence=each, progress=told, **how)
        if name == "sampling":
            return check_sampling(plan, make, confidence=each, progress=told, **how)
        if name == "replay":
            return replay_neighbours(plan, model, loss_fn, dataset, make, progress=told, **how)
        of_all = (plan, model, loss_fn, dataset, canaries, make)
        return attack_training(*of_all, owners=owners, confidence=each, progress=told, **how)

    return Report(plan, tuple(attack(name) for name in chosen))
