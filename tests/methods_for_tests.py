"""The small problem of `fodp.testing`, for the tests over all private optimizers."""

import torch
from torch import Tensor

from fodp.session import Session
from fodp.testing.problem import (
    ODD,
    SIZE,
    StopAfter,
    adversarial_data,
    data,
    delete_one,
    flat,
    losses,
    network,
    plan,
    public_loss,
    record,
    trainer,
)
from fodp.trainer import Trainer

__all__ = [
    "ODD",
    "SIZE",
    "StopAfter",
    "adversarial_data",
    "data",
    "delete_one",
    "flat",
    "losses",
    "network",
    "plan",
    "public_loss",
    "record",
    "trainer",
    "trajectory",
]


def trajectory(training: Trainer, steps: int | None = None) -> Tensor:
    """The parameters after each step. Never asks for ε, so that it also serves with next to no noise."""
    points = []
    for _ in range(training.plan.steps if steps is None else steps):
        training.take_step()
        points.append(flat(training.model))
    return torch.stack(points)


def let_rate_rules_hear_clean_sums(monkeypatch):
    """A fault: a rate rule is given the sum before its noise in place of the release."""
    heard = Session.heard

    def before_noise(session, query, released, std, noise_std):
        found = heard(session, query, released, std, noise_std)
        rule = session.states.get("rate")
        if rule is not None and not query.is_number:
            rule.see(query.map_back_(query.value.clone()), std)
        return found

    monkeypatch.setattr(Session, "heard", before_noise)
