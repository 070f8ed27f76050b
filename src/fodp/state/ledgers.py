"""How a training talks to the ledger: what it says about itself, and the fingerprint of its data."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fodp.errors import ConfigurationError, LedgerError
from fodp.ledger import Account, Ledger
from fodp.ledger.fingerprint import fingerprint
from fodp.plan import Plan
from fodp.support.checks import shown


def refuse_other_ledger(ledger: Any, *, may_open: bool = False) -> None:
    """Raise for what is no ledger, such as its path; `may_open`: a function that opens one will do."""
    if ledger is None or isinstance(ledger, Ledger) or (may_open and callable(ledger)):
        return
    raise ConfigurationError(
        f"ledger must be a fodp.Ledger{', or a function that opens one' if may_open else ''}, got {shown(ledger)}: "
        "fodp.Ledger('people.sqlite', dataset='people')"
    )


def open_account(ledger: Ledger, run: str, plan: Plan, steps: int, dataset: Any) -> Account:
    """Begin a run in the ledger, or take it up again."""
    about = {
        "method": plan.method,
        "noise_multiplier": plan.noise_multiplier,
        "randomness": "secure" if plan.seed is None else "seeded",  # the seed itself is nobody's business
        **plan.described().facts(),
    }
    return ledger.open(
        run,
        plan.events(),
        steps,
        about=about,
        fingerprint=fingerprint_of(dataset),
        seed=seed_mark(ledger, plan),
        replays=plan.seed is not None,
    )


def seed_mark(ledger: Ledger, plan: Plan) -> str | None:
    """By what a ledger knows the plan's seed again, without knowing it; None for a secure run."""
    if plan.seed is None:
        return None
    mark = fingerprint([b"the seed of a run;", str(plan.seed).encode()])
    if mark is None and ledger.has_budgets():
        raise LedgerError(
            "a ledger with a budget must know a seed again, and no secret can be kept in the user's configuration "
            "folder (XDG_CONFIG_HOME, ~/.config) to mark it with: make that writable, or leave the seed out"
        )
    return mark


def fingerprint_of(dataset: Any) -> str | None:
    """Of data made of tensors; other data sets may draw or augment when read, so they have none."""
    if type(dataset) is TensorDataset:
        return fingerprint(_chunks(dataset.tensors))
    if isinstance(dataset, tuple) and dataset and all(isinstance(column, torch.Tensor) for column in dataset):
        return fingerprint(_chunks(dataset))
    return None


def _chunks(columns: tuple[torch.Tensor, ...]) -> Iterator[bytes | memoryview]:
    for column in columns:
        yield f"{column.dtype} {len(column)};".encode()  # images are the same data when a model takes them flat
        for part in column.detach().split(4096):
            yield part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
