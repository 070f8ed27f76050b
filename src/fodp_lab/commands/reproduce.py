"""`fodp reproduce`: the paper's experiments and the fair comparison, resumable."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.errors import PrivacyError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp_lab.paper.fair import Row

EPILOG = """examples:
  fodp reproduce --quick                      every experiment of the paper, ten epochs each, in minutes
  fodp reproduce window                       one of them; several with --only final-accuracy,window
  fodp reproduce fair                         all methods at equal epsilon
  fodp reproduce utility                      what helps at equal epsilon: shapes, untuned rates, averages, noise
  fodp reproduce fair --challenge dp-sgd --set momentum=0.95 --label "more momentum"

Experiments: baseline-rates, final-accuracy, accuracy, insertion, memory-design, window, order, beta-tradeoff,
beta-joint, clipping, learning-rate, reference, sensitivity, runtime. They need the data sets of the paper: FODP_DATA
names their folder, or they are downloaded. The utility comparison also needs sst2-train.tsv and sst2-dev.tsv there.

Runs are recorded one by one under --out: stop at any time and start again, nothing is computed twice."""


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp reproduce`."""
    add = parser.add_argument
    add(
        "suite",
        nargs="?",
        default="paper",
        metavar="SUITE",
        help="paper (default), fair, utility, or one experiment's name",
    )
    add(
        "--only",
        metavar="NAMES",
        help="experiments of the paper, separated by commas; utility: search, without final runs",
    )
    add("--quick", action="store_true", help="short runs that show that everything works; the numbers mean nothing")
    add("--seeds", type=int, metavar="N", help="at most so many seeds per row")
    add("--jobs", type=int, metavar="N", help="processes, one thread each (default: the number of cores)")
    add("--ray", metavar="ADDRESS", help="run on this Ray cluster (HOST:PORT or auto), or on a local one (local)")
    add("--out", metavar="DIR", help="folder of the records (default: results, or results-quick)")
    add("--data-dir", metavar="DIR", help="folder with data sets (default: the variable FODP_DATA)")
    add("--challenge", metavar="METHOD", help="fair: add a row with this method")
    add("--label", metavar="TEXT", help="fair: what the added row is called")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="fair: a parameter of the added row")
    add("--lr", type=float, help="fair: its learning rate (default: the common search)")
    add("--import", dest="modules", action="append", default=[], metavar="MODULE", help="fair: where the method is")
    add("--json", action="store_true", help="the last line on stdout is a summary as JSON")
    add("--no-report", action="store_true", help="do not write tables, figures and report.html at the end")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Compute what is missing."""
    from fodp_lab.paper.catalog import NAMES

    if options.suite in NAMES and options.only is None:
        options = argparse.Namespace(**{**vars(options), "suite": "paper", "only": options.suite})
    checks.one_of("SUITE", options.suite, ("paper", "fair", "utility", *NAMES))
    for name in ("seeds", "jobs"):
        if getattr(options, name) is not None:
            checks.whole(f"--{name}", getattr(options, name))
    if options.data_dir:
        os.environ["FODP_DATA"] = str(Path(options.data_dir).resolve())  # the worker processes read it
    folder = Path(options.out or ("results-quick" if options.quick else "results"))
    done = {"fair": _fair, "utility": _utility}.get(options.suite, _paper)(options, folder)
    if not options.no_report and options.suite != "utility":  # its page is `fodp report --utility`
        from fodp_lab.report.files import write

        done["report"] = write(folder)["report"]
    if options.json:
        print(json.dumps(done))
    elif "report" in done:
        print(f"wrote {done['report']}")
    return 0


def _paper(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from fodp_lab.paper.catalog import EXPERIMENTS, NAMES, RUNTIME, quick
    from fodp_lab.paper.runner import Runner

    if options.challenge:
        raise PrivacyError("--challenge adds a row to the fair comparison: say `fodp reproduce fair --challenge ...`")
    names = [name.strip() for name in options.only.split(",")] if options.only else list(NAMES)
    for name in names:
        checks.one_of("--only", name, NAMES)
    seeds = 2 if options.quick and options.seeds is None else options.seeds
    specs = [spec for name in names if name != RUNTIME for spec in EXPERIMENTS[name].runs(seeds)]
    with Runner(folder / "paper.jsonl", options.jobs, quiet=options.quiet, ray=options.ray) as runner:
        runner.run([quick(spec) for spec in specs] if options.quick else specs, "experiments")
    if RUNTIME in names:
        _runtime(options, folder)
    return {"experiments": names, "runs": len(runner.records), "records": str(runner.records.path)}


def _runtime(options: argparse.Namespace, folder: Path) -> None:
    from fodp_lab.paper import catalog, runtime
    from fodp_lab.paper.runner import progress_bar

    rounds = 1 if options.quick else runtime.ROUNDS
    with progress_bar(quiet=options.quiet) as bar:
        task = bar.add_task("runtime", total=len(catalog.METHODS) * rounds, note="")
        runtime.measure(folder / "runtime.jsonl", lambda label: bar.update(task, advance=1, note=label), rounds)


def _fair(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from dataclasses import replace

    from fodp_lab.paper import fair
    from fodp_lab.paper.code_version import code_of
    from fodp_lab.paper.runner import Runner

    if options.only:
        raise PrivacyError("--only names experiments of the paper; the fair comparison runs as a whole")
    sys.path.insert(0, os.getcwd())  # --import looks where the command is called, like `python -m`
    for name in (*options.modules, *fair.modules_in(folder)):
        _import(name)
    if options.challenge:
        _challenge(options, folder)
    elif options.label or options.set or options.lr is not None:
        raise PrivacyError("--label, --set and --lr belong to an added row: say which method with --challenge METHOD")
    protocol = fair.QUICK if options.quick else fair.FULL
    if options.seeds is not None:
        protocol = replace(protocol, seeds=protocol.seeds[: options.seeds])
    modules = fair.modules_in(folder)
    with Runner(folder / "fair.jsonl", options.jobs, quiet=options.quiet, modules=modules, ray=options.ray) as runner:
        comparison = fair.Comparison(fair.rows_in(folder), runner.records, protocol, code_of)
        for title, specs in comparison.rounds():
            runner.run(specs, title)
    return {"rows": list(comparison.rows), "runs": len(runner.records), "records": str(runner.records.path)}


def _utility(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from fodp_lab.paper import utility
    from fodp_lab.paper.code_version import code_of
    from fodp_lab.paper.runner import Runner

    if options.challenge or options.label or options.set or options.lr is not None:
        raise PrivacyError("--challenge and its options add a row to the fair comparison: say `fodp reproduce fair`")
    if options.only is not None:
        checks.one_of("--only", options.only, ("search",))
    beside = utility.taken_over(folder)
    with Runner(folder / "utility.jsonl", options.jobs, quiet=options.quiet, beside=beside, ray=options.ray) as runner:
        suite = utility.Suite(runner.records, options.quick, options.seeds, code_of)
        for line in (*suite.left_out_notes(), *suite.estimated(runner.jobs)):
            print(line, file=sys.stderr)
        for title, specs in suite.rounds(only_search=options.only == "search"):
            runner.run(specs, title)
    return {"settings": [trial.name for trial in suite.comparisons], "runs": len(runner.records),
            "records": str(runner.records.path)}  # fmt: skip


def _challenge(options: argparse.Namespace, folder: Path) -> "Row":
    from fodp.cli.config import setting
    from fodp_lab.paper import fair

    params = dict(setting(item) for item in options.set)
    label = options.label or " ".join([options.challenge, *options.set])
    return fair.challenge(folder, label, options.challenge, params, options.lr, tuple(options.modules))


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise PrivacyError(
            f"cannot import {name} ({type(error).__name__}: {error}); --import takes a module"
        ) from error
