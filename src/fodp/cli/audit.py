"""`fodp audit`: attack a plan and its pipeline from outside; exit code 1 if the claimed epsilon does not stand."""

import argparse
import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli.config import completed, defaults, given
from fodp.cli.job import Job, use_threads
from fodp.cli.options import CONFIGURATION, add, flag
from fodp.errors import ConfigurationError, LedgerError, PrivacyError
from fodp.support import checks
from fodp.support.extras import MissingExtra
from fodp.support.files import atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fodp.audit import Report

EPILOG = """examples:
  fodp audit --method dp-sgd --noise-multiplier 1
  fodp audit --method fo-dp-sgd --set beta=0.5 --target-epsilon 2 --attack mechanism --attack replay --json
  fodp audit --run runs/paper --out audits/paper

Exit code 0: consistent with the claim; 1: violation found; 2: something to mend in the command. "Consistent" is
no proof. What an audit prints is computed from the data without noise: keep it as safe as the data."""

DEFAULTS: dict[str, Any] = defaults(epochs=10.0)


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp audit`."""
    parser.add_argument("--run", metavar="DIR", dest="run_folder", help="audit the configuration of this run")
    told = {
        "seed": "of masks, noise and canaries, default 0; secure runs take a key from it",
        "out": "write audit.json and audit.png there",
    }
    names = f"{CONFIGURATION} attack trials canaries confidence seed threads out json quiet"
    add(parser, names, told=told, epochs=DEFAULTS["epochs"])


def run(options: argparse.Namespace) -> int:
    """Attack, and say what was found."""
    config = _config(options)
    seed = options.seed or 0
    canaries = checks.whole("--canaries", options.canaries)
    checks.whole("--seed", seed, minimum=0, maximum=2**62)  # small numbers are added to it; PyTorch takes 2^63
    if options.trials is not None:
        checks.whole("--trials", options.trials)

    import torch

    from fodp import audit
    from fodp.data.models import loss_for

    if options.out is not None:
        _make(Path(options.out))  # before the work, not after it
    use_threads(options)
    job = Job.of(config, data_dir=options.data_dir, features_cache=options.features_cache, quiet=bool(options.quiet))
    plan, splits = job.plan(), job.splits
    torch.manual_seed(seed)
    asked: dict[str, Any] = {"trials": options.trials, "seed": seed, "attacks": options.attack or audit.ATTACKS}
    if options.confidence is not None:
        asked["confidence"] = options.confidence
    chosen = audit.random_canaries(splits.train, canaries, splits.card.classes, seed=seed)
    with _bars(options.quiet) as progress:
        report = audit.audit(
            plan,
            job.model(),
            loss_for(splits.card),
            splits.train,
            chosen,
            owners=splits.owners,
            progress=progress,
            **asked,
        )
    _show(report, options)
    return report.exit_code


def _config(options: argparse.Namespace) -> dict[str, Any]:
    said = given(options, apart=("seed",))
    if options.run_folder is not None:
        from fodp.runs.folder import RunFolder

        if said:
            raise ConfigurationError(
                f"--run audits the configuration of that run: leave out {flag(next(iter(said)))}, or leave out --run"
            )
        said = RunFolder(options.run_folder).read_config()
        if "plan" not in said:
            raise LedgerError(f"the configuration in {options.run_folder} lacks plan: restore a copy of it")
        return {**DEFAULTS, **said}
    if "target_epsilon" not in said:
        said.setdefault("noise_multiplier", 1.0)
    return completed(said, DEFAULTS)


@contextmanager
def _bars(quiet: bool) -> "Iterator[Callable[[str, float], None]]":
    """One bar per attack, on stderr."""
    if quiet:
        yield lambda attack, done: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True)) as bars:

        def show(attack: str, done: float) -> None:
            if attack not in tasks:
                tasks[attack] = bars.add_task(attack, total=1.0)
            bars.update(tasks[attack], completed=done)

        yield show


def _show(report: "Report", options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from fodp.accounting import rounded_up
    from fodp.audit.report import SHOWN

    table = Table("attack", "", "epsilon at least", "claimed", "at delta", "false alarms")
    for f in report.findings:
        lower = "-" if f.epsilon_lower is None else f"{f.epsilon_lower:.4g}"
        sure = "none" if f.confidence is None else f"{1 - f.confidence:.2g}"
        word = "consistent" if f.consistent else "VIOLATION"
        table.add_row(f.attack, word, lower, rounded_up(f.epsilon_claimed), f"{f.delta:.2g}", sure)
    console = Console(file=sys.stderr if options.json else sys.stdout)
    console.print(table)
    for finding in report.findings:
        for line in finding.faults[:SHOWN] or (finding.summary,):
            console.print(f"{finding.attack}: {line}", markup=False, highlight=False, soft_wrap=True)
    verdict = "consistent with the claim, which is no proof of it" if report.consistent else "the claim does not stand"
    console.print(f"{report.plan.method}: {verdict}", markup=False, highlight=False, soft_wrap=True)
    result = report.to_dict()
    if options.out is not None:
        console.print(_write(report, Path(options.out)), markup=False, highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps(result))


def _write(report: "Report", folder: Path) -> str:
    """Write the report down, draw it if that is possible, and say what was done."""
    from fodp.audit.plot import plot_report

    try:
        with atomically(folder / "audit.json") as part:  # readable by its owner only
            part.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
        plot_report(report, folder / "audit.png")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    except MissingExtra as error:
        return f"wrote {folder}/audit.json; no picture was drawn: {error}"
    return f"wrote {folder}/audit.json and {folder}/audit.png"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _cannot_write(folder: Path, error: OSError) -> PrivacyError:
    return ConfigurationError(f"{folder} cannot be written ({error.strerror}): choose another --out")
