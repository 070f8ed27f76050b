"""How long a ledger takes when it is large: opening, reserving, showing a page, checking everything.

    python benchmarks/ledger.py [--runs 100000]

Makes a ledger of so many runs of one data set, three rows each, without waiting for the disk, and times what the
library and the command do with it. Medians of several tries; `check` and `show` once, as a process would run them.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from fodp.accounting import Event, Phase, phases_to_data
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.rows import RunState, mark_of, states_after

PHASES = (Phase((Event(0.01, 4.0),), 100),)
ABOUT = {"method": "dp-sgd", "noise_multiplier": 4.0, "delta": 1e-5, "accountant": "rdp", "randomness": "seeded"}


def fill(path: Path, runs: int) -> None:
    """Write what so many runs would have written, in one transaction."""
    book = Ledger(path, dataset="people", budget=(1e5, 1e-5))
    book.open("first", PHASES, 100).settle(0)
    store, seals = book.store, book.store.header
    cost = float(book.budget("people").costs(PHASES)[100])
    last, of_data = store.last(), store.of_data("people")
    number, chain, numbers = last.id, last.chain, {"people": seals.number("dataset", "people")}
    with store.writing():
        for run in (f"{count:032x}" for count in range(runs)):
            began = {"who": "somebody@somewhere", "fodp": "0", "about": ABOUT, "phases": phases_to_data(PHASES)}
            began |= {"seed": f"0123456789ab:{run}", "planned": 100, "hold": cost}
            of_run, by_run = RunState(), seals.number("run", run)
            for kind, steps, rdp, data in (
                ("run", 0, 0.0, began),
                ("reserve", 100, cost, {}),
                ("settle", 100, cost, {}),
            ):
                number += 1
                of_data, of_run = states_after(number, kind, steps, rdp, data, of_data, of_run)
                mark = mark_of(kind, "people", data)
                by_mark = None if mark is None else seals.number("mark", mark)
                texts = json.dumps(data, sort_keys=True), json.dumps((of_data, of_run))
                row = seals.sealed(
                    chain,
                    (number, last.at, kind, "people", run, steps, rdp, *texts, numbers["people"], by_run, by_mark),
                )
                store._rows.insert(row)
                chain = row.chain
    book.close()


def milliseconds(work, tries: int = 9) -> float:
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def said(*words: str) -> tuple[float, int]:
    """Seconds that a command takes, and how many lines it prints."""
    started, out = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["ledger", *words]) == 0
    return time.perf_counter() - started, out.getvalue().count("\n")


def measure(path: Path, runs: int) -> dict[str, float]:
    started = time.perf_counter()
    fill(path, runs)
    results = {"runs": runs, "made in s": time.perf_counter() - started, "MB": os.path.getsize(path) / 1e6}
    results["opening, ms"] = milliseconds(lambda: Ledger(path).close())
    book = Ledger(path, dataset="people")
    results["what is left, ms"] = milliseconds(lambda: book.left("people"))
    names = iter(range(10**6))
    results["beginning a run, ms"] = milliseconds(
        lambda: book.open(f"new {next(names)}", PHASES, 100, about=ABOUT, seed=f"0123456789ab:new {next(names)}")
    )
    account, steps = book.open("timed", PHASES, 100, about=ABOUT), iter(range(100))
    account._block = lambda *_: 1  # a reservation for every step
    results["a reservation, ms"] = milliseconds(lambda: account.covers(next(steps)), 50)
    results["show, s"], results["show, lines"] = said("show", str(path))
    results["show --page 1000, s"], _ = said("show", str(path), "--page", str(max(1, runs // 100)))
    results["check, s"], _ = said("check", str(path))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fodp-bench-") as scratch:
        found = measure(Path(scratch) / "l.sqlite", options.runs)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:24} {value:12,.1f}" for name, value in found.items()))
