"""The ledger of a command: which one it is, the words about its budget, and how it is opened."""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.errors import BudgetError, ConfigurationError
from fodp.support.files import is_address

if TYPE_CHECKING:
    from fodp.ledger import Ledger


def parse_budget(text: str | None) -> tuple[float, float] | None:
    """The (ε, δ) of --budget, or None."""
    if text is None:
        return None
    try:
        epsilon, delta = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"--budget takes EPS,DELTA, for example --budget 4,1e-5; got {text!r}") from None
    return epsilon, delta


def with_ledger(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The configuration with the ledger that runs share, if one was said, and its budget checked."""
    parse_budget(config.get("budget"))
    if options.ledger is None:
        if {"dataset_name", "budget"} & set(config):
            raise ConfigurationError(
                "--dataset-name and --budget are kept in a ledger shared by runs: add --ledger FILE"
            )
        return config
    if "dataset_name" not in config:
        raise ConfigurationError(
            "a shared ledger keeps a budget per data set: add --dataset-name NAME, your name for it"
        )
    path = options.ledger if is_address(options.ledger) else os.path.abspath(options.ledger)
    refuse_unguarded(path, config["dataset_name"], config.get("budget"), bool(options.no_budget))
    return {**config, "ledger": path}


def refuse_unguarded(path: Path | str, dataset: str, budget: str | None, no_budget: bool) -> None:
    """A new name in a ledger needs a budget or a word that there is none: a typo would escape the one that exists."""
    from fodp.ledger import Ledger
    from fodp.ledger.rows import DataState, NoLedger

    if budget is not None or no_budget:
        return
    try:
        ledger = Ledger(path, create=False)
    except NoLedger:
        ledger = None
    if ledger is None or ledger.store.of_data(dataset) == DataState():
        known = "" if ledger is None else ledger.names()
        told = f"knows {known}" if known else "is new"
        raise BudgetError(
            f"{path} {told}, and {dataset!r} has no budget in it: mend the name, add --budget EPS,DELTA, or say "
            "--no-budget to write down without a limit"
        )


def open_ledger(
    path: Path | str, config: dict[str, Any], options: argparse.Namespace, *, own_name: str | None = None
) -> "Ledger":
    """The ledger that a run or a search is kept in; `own_name` is that of the data in a folder's own ledger."""
    from fodp.ledger import Ledger

    ledger = Ledger(
        path,
        dataset=config.get("dataset_name", own_name),
        budget=parse_budget(config.get("budget")),
        allow_changed_data=bool(options.allow_changed_data),
        allow_other_name=bool(options.allow_other_name),
        create=not options.resume or own_name is not None,
        wait=math.inf if getattr(options, "wait", None) else 0.0,
    )
    ledger.tell_waiting(lambda text: print(text, file=sys.stderr))
    return ledger
