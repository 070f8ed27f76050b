"""`fodp ledger`: who spent what on which data, what is left, and whether the file can be believed."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli.options import add
from fodp.cli.shared import parse_budget, refuse_unguarded
from fodp.errors import ConfigurationError, LedgerError
from fodp.support import checks
from fodp.support.files import is_address

if TYPE_CHECKING:
    from rich.table import Table

    from fodp.ledger import Ledger

EPILOG = """examples:
  fodp ledger show patients.sqlite
  fodp ledger check runs/paper
  fodp ledger export patients.sqlite --dataset-name patients > card.txt
  fodp ledger select patients.sqlite --dataset-name patients --mean 10 --sampling-rate 0.04 --noise-multiplier 4 \\
                     --steps 250

FILE may also be the folder of a run. `select` charges, before they are made, for releasing the best of a random
number of runs and nothing else; it prints how many to make, which must stay secret."""


_METHOD = "dp-sgd"  # of runs to select from
_ACTIONS = {
    "show": ("what is left, and a table of the newest runs", "page all json dataset_name"),
    "check": ("verify the chain of entries and every sum; exit code 2 if something is wrong", "json"),
    "export": ("the privacy card in plain text; with --json every entry", "json dataset_name"),
    "select": (
        "charge for the best of a random number of runs",
        "json dataset_name budget no_budget method set import mean unit sampling_rate noise_multiplier steps",
    ),
    "release": ("give back what a dead run holds for steps to come; what it used stays charged", "json"),
    "accept-rollback": (
        "go on with a restored copy that is older than what was known; every card will say so",
        "json",
    ),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp ledger`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, (text, names) in _ACTIONS.items():
        sub = actions.add_parser(action, help=text, description=text)
        sub.add_argument("file", metavar="FILE", help="the ledger (a file, or postgresql://…), or the folder of a run")
        if action == "release":
            sub.add_argument("held_by", metavar="RUN", help="the run, or the first letters of its name")
        told, required = {"json": "print JSON", "dataset_name": "only this data set"}, ""
        if action == "select":
            told |= dict.fromkeys(("method", "sampling_rate", "noise_multiplier", "steps"), "of each run")
            told["dataset_name"] = "the data set that is charged"
            required = "dataset_name mean sampling_rate noise_multiplier steps"
            shape = "1 geometric (default), 0 logarithmic, inf Poisson"
            sub.add_argument("--shape", type=float, default=1.0, help=shape)
        add(sub, names, required=required, told=told, method=_METHOD)


def run(options: argparse.Namespace) -> int:
    """Show, check, export or charge."""
    from fodp.ledger import Ledger
    from fodp.runs.folder import RunFolder

    path: Path | str = options.file if is_address(options.file) else Path(options.file)
    if os.path.isdir(path):  # unlike Path.is_dir, it does not mind a name too long
        folder = RunFolder(path)
        path = folder.ledger_of(folder.read_config())
    if options.action == "select":
        return _select(options, path)
    if options.action == "check":
        return _check(options, Ledger(path, create=False, verify=False))
    if options.action == "accept-rollback":
        return _accept_rollback(options, Ledger(path, create=False, older=True))
    ledger = Ledger(path, create=False)
    if options.action == "release":
        return _release(options, ledger)
    if options.action == "show":
        return _show(options, ledger)
    records = _records(ledger, options.dataset_name)
    if options.json:
        entries = [e._asdict() for e in ledger.store.select() if options.dataset_name in (None, e.dataset)]
        print(json.dumps({"summary": records, "entries": entries}))
    else:
        from fodp.ledger.card import card

        print("\n\n".join(card(record) for record in records))
    return 0


def _records(ledger: "Ledger", dataset: str | None) -> list[dict[str, Any]]:
    from fodp.ledger.card import summary

    if dataset is not None:
        ledger.known(dataset)
    return summary(ledger, dataset)


def _show(options: argparse.Namespace, ledger: "Ledger") -> int:
    from fodp.ledger.card import overview

    records = overview(ledger, options.dataset_name, None if options.all else options.page)
    if not records and not options.json:
        print(f"{ledger.path}: nothing was charged yet")
        return 0
    print(json.dumps(records)) if options.json else _table(records)
    return 0


def _check(options: argparse.Namespace, ledger: "Ledger") -> int:
    from fodp.cli.waiting import slow_bar
    from fodp.ledger.card import faults

    entries = ledger.store.count()
    with slow_bar("checking", 2 * entries) as tick:
        found = faults(ledger, tick)
    if options.json:
        print(json.dumps({"ok": not found, "entries": entries, "faults": found}))
    elif not found:
        print(f"{ledger.path}: {entries} entries, chain and sums are right")
    if found and not options.json:
        raise LedgerError(f"{ledger.path} cannot be believed: {'; '.join(found[:3])}: restore a copy of it")
    return 2 if found else 0


def _release(options: argparse.Namespace, ledger: "Ledger") -> int:
    begun = {entry.run for entry in ledger.store.select("run") if entry.run.startswith(options.held_by)}
    held = sorted(run for run in begun if ledger.store.of_run(run).holds)
    if len(held) > 1:
        raise ConfigurationError(
            f"{options.held_by!r} may be {' or '.join(run[:20] for run in held[:3])}: write more of it"
        )
    hold = ledger.release(held[0] if held else options.held_by)
    if options.json:
        print(json.dumps({"run": hold.run, "dataset": hold.dataset, "left": ledger.left(hold.dataset)}))
    else:
        left = f"{ledger.left(hold.dataset):.1%} of the budget of {hold.dataset} is left"
        print(f"what run {hold.run[:12]} of {hold.who} held since {hold.since} is given back; {left}")
    return 0


def _accept_rollback(options: argparse.Namespace, ledger: "Ledger") -> int:
    entry = ledger.accept_rollback()
    if options.json:
        print(json.dumps({"entry": entry.id, **entry.data}))
    else:
        print(f"{ledger.path} goes on from entry {entry.id}, which says that what was known before is forgotten")
    return 0


def _select(options: argparse.Namespace, path: Path | str) -> int:
    from fodp.accounting.budget import Repetitions
    from fodp.cli.plans import public_plan
    from fodp.ledger import Ledger
    from fodp.plan import UNITS

    checks.one_of("--unit", options.unit, UNITS)
    repetitions = Repetitions(options.mean, options.shape)
    plan = public_plan(options, options.method or _METHOD, noise_multiplier=options.noise_multiplier)
    refuse_unguarded(path, options.dataset_name, options.budget, options.no_budget)
    ledger = Ledger(path, dataset=options.dataset_name, budget=parse_budget(options.budget))
    charge, count = ledger.charge_selection(plan.events(), repetitions, unit=options.unit), repetitions.draw()
    left = ledger.left(options.dataset_name)
    if options.json:
        print(json.dumps({"charge": charge, "runs": count, "left": left if left <= 1 else None}))
        return 0
    print(f"charged as {charge}; make {count} runs and keep the best")
    print("Neither this number nor anything else about the other runs may be published or looked at.")
    return 0


def _table(records: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from fodp.accounting import rounded_up

    console = Console()
    for record in records:
        console.print(_summary(record), soft_wrap=True)
    for record in filter(lambda record: record["run_count"], records):
        table = _columns(record["dataset"])
        for row in record["runs"]:
            run = f"{row['run'][:12]}\n{row['began']}\n{row['who']}"
            what = f"{row['about'].get('method', '')}\n{row['about'].get('randomness', '')}"
            epsilon = f"{rounded_up(row['epsilon'])}\nat {rounded_up(row['delta'], 6)}"
            steps = f"{row['steps']} of {row['planned']}"
            table.add_row(*map(Text, (run, what, steps, epsilon, _share(row), row["state"])))
        for row in record["selections"]:
            run = f"selection\n{row['began']}\n{row['who']}"
            what = f"best of a random number, mean {row['mean']:g}"
            table.add_row(*map(Text, (run, what, "", rounded_up(row["epsilon"]), _share(row), "charged")))
        console.print(table)
        if record["page"] is not None and record["pages"] > 1:
            console.print(f"page {record['page']} of {record['pages']}, newest first: --page N, or --all")


def _columns(title: str) -> "Table":
    """Eighty columns are enough for names of methods and runs; what is longer goes on in the next line."""
    from rich.table import Column, Table

    titles = ("run, began, who", "what", "steps", "epsilon", "share", "state")
    return Table(*(Column(title, overflow="fold") for title in titles), title=title, show_lines=True)


def _summary(record: dict[str, Any]) -> str:
    from fodp.accounting import rounded_up

    budget, runs = record["budget"], record["run_count"]
    text = f"{record['dataset']}: {runs} {'run' if runs == 1 else 'runs'}"
    if budget is None:
        return f"{text}, no budget"
    granted = f"({rounded_up(budget['epsilon'], 6)}, {rounded_up(budget['delta'], 6)})"
    held = f", {budget['held']:.1%} held by runs that have not ended" if budget["held"] > 1e-9 else ""
    more = "" if record["more_runs"] is None else f", room for {record['more_runs']} more like the last"
    return f"{text}, budget {granted}: {budget['spent']:.1%} spent{held}, {budget['left']:.1%} left{more}"


def _share(row: dict[str, Any]) -> str:
    return "" if row["share"] is None else f"{row['share']:.1%}"
