"""`fodp bench`: what a private step costs beside a plain one and beside other libraries."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.errors import PrivacyError
from fodp.support.checks import whole
from fodp_lab.bench.targets import DP_SGD, MEMORY_BATCH, PLAIN, TITLES

if TYPE_CHECKING:
    from fodp_lab.bench.measure import Say

EPILOG = """examples:
  fodp bench --quick --no-peers --workload mlp        a first impression in half a minute
  fodp bench --all --out runs/bench                   everything, for docs/performance.md (about an hour)
  fodp bench --markdown docs/performance.json --out docs/images > docs/performance.md
  fodp bench --device cuda                            plain and private steps on a GPU: the table of docs/scaling.md
  fodp bench --zoo --model "LSTM, packed"             one of the models that people have
  fodp bench --zoo --markdown docs/zoo.json > docs/zoo.md
  fodp bench --ranks --out runs/bench                 1 to 3 processes with one model, for docs/scaling.md

Peers take part where installed: pip install "fodp[bench]". Parts measured one after the other with the same --out
end in one results file. Measure on an otherwise idle machine."""

RESULTS = "performance.json"
ZOO = "zoo.json"
RANKS = "scaling.json"
LOOPS = "kernels.json"  # beside it: what `make bench-kernels` has measured
_SETTLE = 33  # steps that fill the longest window


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp bench`."""
    add = parser.add_argument
    add("--workload", action="append", metavar="NAME", help=f"{', '.join(TITLES)}; may be repeated, default all")
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="rounds, each with new processes, default 9 (quick: 2); of --ranks steps",
    )
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="also measure Opacus and JAX-Privacy")
    add("--quick", action="store_true", help="few rounds of short bursts, no memory at large batches")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--scaling", action="store_true", help="cost per step against parameters, window and batch")
    part.add_argument("--paper-run", action="store_true", help="the paper's 250 epochs on CIFAR-10 (needs FODP_DATA)")
    part.add_argument("--all", action="store_true", help="the table, --scaling and --paper-run")
    add("--zoo", action="store_true", help="models that people have: path, error, time, memory (needs fodp[hf])")
    add("--model", action="append", metavar="NAME", help="with --zoo: a model of docs/zoo.md; may be repeated")
    add("--ranks", action="store_true", help="1 to 3 processes that train one model: time, bytes sent, memory")
    part.add_argument("--markdown", metavar="FILE", help="measure nothing: print the page of a results file")
    add("--device", metavar="NAME", help="measure on this device (cuda, cuda:1, …), beside plain training there")
    add("--out", metavar="DIR", help=f"folder for {RESULTS} and pictures, default runs/bench")
    add("--json", action="store_true", help="the last line on stdout is the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, keep the results, draw them, and compare them with the targets."""
    if options.ranks and (options.zoo or options.device is not None):
        raise PrivacyError("--ranks, --zoo and --device are tables of their own: measure one at a time")
    if options.ranks:
        return _ranks(options)
    if options.device is not None:
        return _on_device(options)
    if options.zoo:
        return _zoo(options)
    from fodp_lab.bench import measurements, performance_page, plots

    if options.markdown is not None:
        stored, loops = measurements.load(Path(options.markdown)), Path(options.markdown).with_name(LOOPS)
        if options.out:
            plots.draw(stored, Path(options.out))
        print(performance_page.markdown(stored, measurements.load(loops) if loops.exists() else None), end="")
        return 0
    folder = Path(options.out or Path("runs") / "bench")
    measured = measurements.begun(folder / RESULTS)  # found out before an hour of measuring, not after
    with _progress() as say:
        for part in _parts(options, say):  # written part by part: an interrupt loses the one under way only
            measured = measurements.merge(folder / RESULTS, part)
    plots.draw(measured, folder)
    if options.json:
        print(json.dumps(measured))
    else:
        performance_page.show(measured)
        print(f"results: {folder / RESULTS}")
    return 0


def _on_device(options: argparse.Namespace) -> int:
    """Plain and private steps on one device, as the rows of a table."""
    asked = [name for name in ("zoo", "scaling", "paper_run", "all", "markdown", "model") if getattr(options, name)]
    if asked:
        raise PrivacyError(f"--device measures the workloads alone: leave out --{asked[0].replace('_', '-')}")
    from fodp.support import devices
    from fodp_lab.bench import on_device
    from fodp_lab.bench.measure import BURST_SECONDS

    device = devices.named(options.device)
    names = _named_workloads(options)
    rounds = whole("--rounds", options.rounds if options.rounds is not None else 2 if options.quick else 9)
    with _progress() as say:
        results = on_device.measured(device, names, rounds, BURST_SECONDS / (8 if options.quick else 1), say)
    path = Path(options.out or Path("runs") / "bench") / f"performance-{device.type}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results) if options.json else f"{on_device.markdown(results)}\nresults: {path}")
    return 0


def _named_workloads(options: argparse.Namespace) -> list[str]:
    names = options.workload or list(TITLES)
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        raise PrivacyError(f"--workload must be one of {', '.join(TITLES)}; got {unknown[0]!r}")
    return names


def _zoo(options: argparse.Namespace) -> int:
    """Real models: measured, or the page of what was."""
    from fodp.support.extras import need
    from fodp_lab.bench import measurements

    if options.markdown is None:
        for package in ("transformers", "peft"):
            need(package, "the zoo", extra="hf")
    from fodp_lab.bench import zoo_table

    if options.markdown is not None:
        print(zoo_table.markdown(measurements.load(Path(options.markdown))), end="")
        return 0
    names = options.model or zoo_table.everything()
    unknown = [name for name in names if name not in zoo_table.everything()]
    if unknown:
        raise PrivacyError(f"--model must be a name in docs/zoo.md; got {unknown[0]!r}")
    rounds = whole("--rounds", options.rounds if options.rounds is not None else 2 if options.quick else 9)
    path = Path(options.out or Path("runs") / "bench") / ZOO
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with _progress() as say:
        for new in zoo_table.measured(names, rounds, options.peers, say):  # an interrupt loses one row only
            results = zoo_table.merged(measurements.load(path) if path.exists() else None, new)
            path.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        print(json.dumps(results))
    else:
        print(zoo_table.markdown(results), end="")
        print(f"results: {path}")
    return 0


def _ranks(options: argparse.Namespace) -> int:
    """Several processes with one model: measured, or the tables of what was."""
    from fodp_lab.bench import measurements, ranks, ranks_page

    if options.markdown is not None:
        for table in ranks_page.tables(measurements.load(Path(options.markdown))).values():
            print(f"{table}\n")
        return 0
    names = options.workload or list(ranks.NAMES)
    unknown = [name for name in names if name not in ranks.NAMES]
    if unknown:
        raise PrivacyError(f"--workload must be one of {', '.join(ranks.NAMES)} with --ranks; got {unknown[0]!r}")
    steps = whole("--rounds", options.rounds if options.rounds is not None else 2 if options.quick else 20)
    path = Path(options.out or Path("runs") / "bench") / RANKS
    path.parent.mkdir(parents=True, exist_ok=True)
    known = measurements.load(path)["rows"] if path.exists() else []
    results: dict[str, Any] = {}
    with _progress() as say:
        for row in ranks.measured(names, steps, say):  # an interrupt loses one row only
            known = [old for old in known if (old["workload"], old["ranks"]) != (row["workload"], row["ranks"])] + [row]
            results = {"conditions": measurements.conditions(), "rows": known}
            path.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        print(json.dumps(results))
    else:
        print(ranks_page.measured(results))
        print(f"results: {path}")
    return 0


def _parts(options: argparse.Namespace, say: "Say") -> Iterator[dict[str, Any]]:
    from fodp_lab.bench.measure import BURST_SECONDS, TURNS
    from fodp_lab.bench.paper_run import paper_run
    from fodp_lab.bench.scaling import scaling

    rounds = whole("--rounds", options.rounds if options.rounds is not None else 2 if options.quick else 9)
    turns, burst_seconds = (1, BURST_SECONDS / 8) if options.quick else (TURNS, BURST_SECONDS)
    names = _named_workloads(options)
    if not options.scaling and not options.paper_run:
        for name in names:
            yield {"workloads": {name: _workload(name, options, rounds, turns, burst_seconds, say)}}
    if options.scaling or options.all:
        yield {"scaling": scaling(2 if options.quick else 15, burst_seconds, say)}
    if options.paper_run or options.all:
        yield {"paper_run": paper_run(1 if options.quick else 3, say)}


def _workload(
    name: str, options: argparse.Namespace, rounds: int, turns: int, burst_seconds: float, say: "Say"
) -> dict[str, Any]:
    from fodp_lab.bench.contenders import CONTENDERS
    from fodp_lab.bench.measure import peak_memory, table
    from fodp_lab.bench.workloads import WORKLOADS

    taking_part = [c for c in CONTENDERS if options.peers or not c.is_peer]
    measured = table(name, taking_part, rounds, turns, burst_seconds, 1 if options.quick else _SETTLE, say)
    memory: dict[str, Any] = {}
    for contender in CONTENDERS if not options.quick else ():
        if contender.name in (PLAIN, DP_SGD):
            say(f"{name}: memory of {contender.name} at batch {MEMORY_BATCH}")
            memory[contender.name] = peak_memory(name, contender, MEMORY_BATCH)
    return {"batch": WORKLOADS[name].batch, **measured, "memory": {str(MEMORY_BATCH): memory} if memory else {}}


@contextmanager
def _progress() -> Iterator["Say"]:
    """One line on stderr that says what is being measured; nothing where nobody watches."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text)
