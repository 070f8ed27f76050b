"""`fodp audit`: attack a plan and its pipeline from outside; exit code 1 if the claimed epsilon does not stand."""

import argparse
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fodp import _checks
from fodp.cli import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fodp.audit import Report

EPILOG = """examples:
  fodp audit --method dp-sgd --noise-multiplier 1
  fodp audit --method fo-dp-sgd --set beta=0.5 --target-epsilon 2 --attack mechanism --attack replay --json
  fodp audit --run runs/paper --out audits/paper

Exit code 0: consistent with the claim; 1: violation found; 2: something to mend in the command. "Consistent" is
no proof. What an audit prints is computed from the data without noise: keep it as safe as the data."""

_DEFAULTS: dict[str, Any] = {**train._DEFAULTS, "epochs": 10.0}


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp audit`."""
    add = parser.add_argument
    add("--run", metavar="DIR", dest="run_folder", help="audit the configuration of this run")
    add("--dataset", metavar="NAME", help="digits (default), cifar10, cifar100, svhn, or your own .npz")
    add("--model", metavar="NAME", help="mlp (default), cnn, logistic, or module:function of your own")
    add("--method", metavar="NAME", help="private optimizer, default fo-dp-sgd (see `fodp methods`)")
    add("--set", action="append", metavar="NAME=VALUE", help="a parameter of the method; may be repeated")
    add("--lr", type=float, help="learning rate (default: the method's)")
    add("--epochs", type=float, help="passes over the data, default 10")
    add("--target-epsilon", type=float, metavar="EPS", help="calibrate the noise to this epsilon")
    add("--noise-multiplier", type=float, metavar="SIGMA", help="the noise itself, default 1")
    add("--delta", type=float, help="default 1e-5")
    add("--clip-norm", type=float, metavar="C", help="default 1")
    add("--sampling-rate", type=float, metavar="Q", help="default: from the data set's public card")
    add("--lot-size", type=float, metavar="L", help="public divisor, default: q times the public size")
    add("--accountant", metavar="NAME", help="pld (default), rdp, rdp-classic")
    add("--data-dir", metavar="DIR", help="folder with data sets (default: the variable FODP_DATA)")
    add("--assume-size", type=int, metavar="N", help="public size of your own data")
    add("--classes", type=int, metavar="N", help="public number of classes of your own data")
    add("--attack", action="append", metavar="NAME", help="mechanism, sampling, replay, one-run; default all")
    add("--trials", type=int, metavar="N", help="guesses per direction of the mechanism attack (default: by the noise)")
    add("--canaries", type=int, metavar="M", default=1000, help="canaries of the one-run attack, default 1000")
    add("--confidence", type=float, metavar="P", help="of the bounds; default 1 - 1e-6 for the whole audit")
    add("--seed", type=int, default=0, help="of masks, noise and canaries, default 0; an audit is always seeded")
    add("--out", metavar="DIR", help="write audit.json and audit.png there")
    add("--threads", type=int, metavar="N", help="threads of PyTorch")
    add("--json", action="store_true", help="the last line on stdout is the report as JSON")
    add("--quiet", action="store_true", help="no progress bars")


def run(options: argparse.Namespace) -> int:
    """Attack, and say what was found."""
    config = _config(options)
    _checks.whole("--seed", options.seed, minimum=0, maximum=2**62)  # small numbers are added to it; PyTorch takes 2^63

    import torch

    from fodp import audit
    from fodp.models import build, cross_entropy

    if options.threads is not None:
        torch.set_num_threads(_checks.whole("--threads", options.threads, maximum=4096))
    splits = train._load(config, options)
    plan = train._plan(config, splits)
    torch.manual_seed(options.seed)
    canaries = audit.random_canaries(splits.train, options.canaries, splits.card.classes, seed=options.seed)
    given: dict[str, Any] = {"trials": options.trials, "seed": options.seed, "attacks": options.attack or audit.ATTACKS}
    if options.confidence is not None:
        given["confidence"] = options.confidence
    with _bars(options.quiet) as progress:
        report = audit.audit(
            plan, build(config["model"], splits.card), cross_entropy, splits.train, canaries, progress=progress, **given
        )
    _show(report, options)
    return report.exit_code


def _config(options: argparse.Namespace) -> dict[str, Any]:
    given = train._given(options)
    if options.run_folder is not None:
        from fodp.training.folder import RunFolder

        return {**_DEFAULTS, **RunFolder(options.run_folder).read_config(), "seed": options.seed}
    if "target_epsilon" not in given:
        given.setdefault("noise_multiplier", 1.0)
    return {**_DEFAULTS, **given}


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
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from fodp.audit.plot import plot_report
    from fodp.audit.report import SHOWN

    table = Table("attack", "", "epsilon at least", "claimed", "at delta", "false alarms")
    for f in report.findings:
        lower = "-" if f.epsilon_lower is None else f"{f.epsilon_lower:.4g}"
        sure = "none" if f.confidence is None else f"{1 - f.confidence:.2g}"
        word = "consistent" if f.consistent else "VIOLATION"
        table.add_row(f.attack, word, lower, f"{f.epsilon_claimed:.4g}", f"{f.delta:.2g}", sure)
    console = Console(file=sys.stderr if options.json else sys.stdout)
    console.print(table)
    for finding in report.findings:
        for line in finding.faults[:SHOWN] or (finding.summary,):
            console.print(f"{finding.attack}: {line}", markup=False, highlight=False, soft_wrap=True)
    verdict = "consistent with the claim, which is no proof of it" if report.consistent else "the claim does not stand"
    console.print(f"{report.plan.method}: {verdict}", markup=False, highlight=False, soft_wrap=True)
    result = report.to_dict()
    if options.out is not None:
        folder = Path(options.out)
        _make(folder)
        (folder / "audit.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        plot_report(report, folder / "audit.png")
        console.print(
            f"wrote {folder}/audit.json and {folder}/audit.png", markup=False, highlight=False, soft_wrap=True
        )
    if options.json:
        print(json.dumps(result))


def _make(folder: Any) -> None:
    from fodp._checks import PrivacyError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrivacyError(f"{folder} cannot be written ({error.strerror}): choose another --out") from None
