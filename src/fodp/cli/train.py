"""`fodp train`: one private training run in one folder."""

import argparse
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fodp
from fodp import _checks
from fodp._checks import PrivacyError
from fodp.cli.job import DEFAULTS, add_options, given, load_data, make_plan, use_threads
from fodp.cli.ledger import is_address, parse_budget, refuse_unguarded

if TYPE_CHECKING:
    from fodp.plan import Plan

EPILOG = """examples:
  fodp train --dataset digits --method fo-dp-sgd --target-epsilon 4 --epochs 40 --lr 0.5
  fodp train --preset paper --dataset cifar10 --set beta=1 --seed 0 --out runs/paper
  fodp train --resume --out runs/paper

With --target-epsilon alone the noise is calibrated to it; with --noise-multiplier as well, training stops
before the target would be exceeded. Without --seed masks and noise come from the operating system's entropy."""

_DEFAULTS: dict[str, Any] = dict(DEFAULTS, epochs=40.0, eval_every=1)
# The paper's protocol; an option given beside it wins.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": dict(
        dataset="cifar10", model="mlp", method="fo-dp-sgd", epochs=250.0, delta=1e-5, clip_norm=1.0, lr=0.8,
        noise_multiplier=1.1, sampling_rate=0.04, lot_size=200.0, accountant="rdp-classic",
    ),
}  # fmt: skip
_SAVING = 0.02  # of the time may go into checkpoints
# What may be said anew when resuming; everything else belongs to the run.
_ANEW = ("resume", "preset", "ledger", "allow_changed_data", "allow_other_name", "no_budget", "wait")
_OF_THE_RUN = {"plan", "run", "fodp"}  # written beside the options


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp train`."""
    add = parser.add_argument
    add_options(parser, epochs=_DEFAULTS["epochs"])
    add("--preset", metavar="NAME", help="paper: the paper's protocol")
    add("--seed", type=int, help="research mode: repeatable, not private against who knows the seed")
    add("--eval-every", type=int, metavar="N", help="score on the public test split every N epochs, default 1")
    add("--microbatch", type=int, metavar="N", help="examples in flight at a time (default: by the model)")
    add("--ledger", metavar="FILE", help="privacy ledger of many runs, or postgresql://… (default: the folder's own)")
    add("--dataset-name", metavar="NAME", help="your name for the data; its runs in the ledger share one budget")
    add("--budget", metavar="EPS,DELTA", help="budget of the data over all runs, fixed by its first run")
    add("--no-budget", action="store_true", default=None, help="a new data set in --ledger, without a limit")
    add(
        "--wait",
        action="store_true",
        default=None,
        help="wait for what other runs hold of the budget and may give back",
    )
    add("--allow-changed-data", action="store_true", default=None, help="the data has changed on purpose")
    add("--allow-other-name", action="store_true", default=None, help="the ledger knows the data by two names")
    add("--out", metavar="DIR", help="run folder (default: runs/<time>)")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--json", action="store_true", help="the last line on stdout is the result as JSON")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Train, and say what came out and what it cost."""
    if options.resume and not options.out:
        raise PrivacyError("--resume needs the run folder: add --out DIR")
    config = _stored_config(options) if options.resume else _new_config(options)

    import torch

    from fodp.cli.bookkeeping import open_ledger, resume, share_left
    from fodp.models import accuracy, build, cross_entropy
    from fodp.training.bookkeeping import seed_mark
    from fodp.training.callbacks import Callback, Checkpoint, CSVLog, Evaluate, Progress
    from fodp.training.folder import RunFolder
    from fodp.training.rehearsal import rehearse
    from fodp.training.trainer import Trainer

    use_threads(options)
    splits = load_data(config, options)
    plan = make_plan(config, splits)
    # PyTorch takes 64 bits of a seed; the streams of masks and noise take all of it.
    torch.manual_seed(plan.seed % 2**64) if plan.seed is not None else torch.seed()
    model = build(config["model"], splits.card)
    rehearse(config["model"], model, splits.card)

    folder = RunFolder(options.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S"))
    callbacks: list[Callback] = [Evaluate(splits.test, config["eval_every"]), CSVLog(folder.metrics)]
    if not options.quiet:
        callbacks.append(Progress())
    callbacks.append(Checkpoint(folder.checkpoint, share=_SAVING))
    trainer = Trainer(
        model,
        cross_entropy,
        splits.train,
        plan,
        callbacks=callbacks,
        target_epsilon=config.get("target_epsilon") if config.get("noise_multiplier") is not None else None,
        microbatch=config.get("microbatch"),
        public_score=(lambda: accuracy(model, splits.validation)[1]) if len(splits.validation) else None,
    )
    if options.resume:
        trainer.ledger = open_ledger(folder.ledger_of(config), config, options)
        resume(trainer, folder, config)
    else:
        if "ledger" in config:
            trainer.ledger = open_ledger(folder.ledger_of(config), config, options)
            trainer.ledger.refuse_unfit(plan.events(), trainer.last_step, seed=seed_mark(trainer.ledger, plan))
        folder.create()  # only now, when everything else has proved right
        if trainer.ledger is None:
            trainer.ledger = open_ledger(folder.ledger, config, options)
        stored = {**config, "plan": plan.to_dict(), "run": trainer.run_id, "fodp": fodp.__version__}
        folder.write(folder.statement, trainer.statement() + "\n")
        folder.write(folder.config, json.dumps(stored, indent=1))
    started = time.perf_counter()
    outcome = trainer.fit()
    result = {
        "dataset": config["dataset"],
        "model": config["model"],
        "method": plan.method,
        "params": dict(plan.params),
        "reason": outcome.reason,
        "steps": outcome.steps,
        "lost_steps": outcome.lost_steps,
        "final_accuracy": trainer.metrics.get("accuracy"),
        "best_accuracy": trainer.metrics.get("best_accuracy"),
        "final_loss": trainer.metrics.get("loss"),
        "epsilon": outcome.epsilon,
        "delta": outcome.delta,
        "noise_multiplier": plan.noise_multiplier,
        "accountant": plan.accountant,
        "randomness": "secure" if plan.seed is None else "seeded",
        "dataset_name": config.get("dataset_name"),
        "budget_left": share_left(trainer.ledger),
        # How long it took tells how large the lots were, and so the data: for research only.
        "seconds": None if plan.seed is None else round(time.perf_counter() - started, 3),
        "out": str(folder.path),
    }
    return _conclude(options, folder, plan, result, trainer.statement())


def _conclude(options: argparse.Namespace, folder: Any, plan: "Plan", result: dict[str, Any], statement: str) -> int:
    """Write and print what came out; all of it states one ε."""
    from fodp._extras import MissingExtra
    from fodp.accounting import rounded_up
    from fodp.training.plot import plot_accuracy

    text = sys.stderr if options.json else sys.stdout
    if result["reason"] == "interrupted":
        print(
            f"stopped after step {result['steps']} of {plan.steps}; if it ends here, after what was seen, its epsilon "
            f"is {rounded_up(result['epsilon'])}; go on with: fodp train --resume --out {folder.path}",
            file=text,
        )
        return 130
    folder.write(folder.result, json.dumps(result, indent=1) + "\n")
    try:
        plot_accuracy(folder.metrics, folder.plot, f"{result['method']} on {result['dataset']}, δ={plan.delta:g}")
    except OSError as error:
        print(f"no picture: {folder.plot} could not be written ({error.strerror})", file=sys.stderr)
    except MissingExtra as error:
        print(f"no picture was drawn: {error}", file=sys.stderr)
    if result["final_accuracy"] is not None:
        print(f"accuracy {result['final_accuracy']:.4f} on the public test split", file=text)
    print(f"epsilon {rounded_up(result['epsilon'])} at delta {rounded_up(result['delta'], 6)}", file=text)
    if result["reason"] == "target reached":
        print(f"stopped at step {result['steps']} of {plan.steps}: one more would exceed the target", file=text)
    if result["reason"] == "budget spent":
        print(f"stopped at step {result['steps']} of {plan.steps}: other runs took the rest of the budget", file=text)
    if result["budget_left"] is not None:
        print(f"{result['budget_left']:.1%} of the budget of {result['dataset_name']} is left", file=text)
    if result["lost_steps"]:
        print(f"{result['lost_steps']} steps were lost to a crash but stay charged", file=text)
    print(f"\n{statement}\n\nrun folder: {folder.path}", file=text)
    if options.json:
        print(json.dumps(result))
    return 0


def _new_config(options: argparse.Namespace) -> dict[str, Any]:
    """Defaults, then the preset, then what was given."""
    said = given(options, apart=_ANEW)
    preset: dict[str, Any] = {}
    if options.preset is not None:
        if options.preset not in _PRESETS:
            raise PrivacyError(f"--preset must be one of {', '.join(_PRESETS)}; got {options.preset!r}")
        preset = dict(_PRESETS[options.preset])
        if "target_epsilon" in said and "noise_multiplier" not in said:
            del preset["noise_multiplier"]  # a target alone calibrates
    config = {**_DEFAULTS, **preset, **said}
    if options.ledger is not None:
        if "dataset_name" not in config:
            raise PrivacyError("a shared ledger keeps a budget per data set: add --dataset-name NAME, your name for it")
        config["ledger"] = options.ledger if is_address(options.ledger) else os.path.abspath(options.ledger)
        refuse_unguarded(config["ledger"], config["dataset_name"], config.get("budget"), bool(options.no_budget))
    elif {"dataset_name", "budget"} & set(config):
        raise PrivacyError("--dataset-name and --budget are kept in a ledger shared by runs: add --ledger FILE")
    if "budget" in config:
        parse_budget(config["budget"])
    if not _says_how_private(config):
        raise PrivacyError("how private? add --target-epsilon EPS (for example 4), or --noise-multiplier SIGMA")
    return config


def _says_how_private(config: dict[str, Any]) -> bool:
    return config.get("target_epsilon") is not None or config.get("noise_multiplier") is not None


def _stored_config(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the run that is resumed; what is said against it is refused."""
    from fodp.training.folder import RunFolder

    stored = RunFolder(options.out).read_config()
    missing = sorted({*_DEFAULTS, "plan", "run"} - stored.keys())
    if not _says_how_private(stored):
        missing.append("noise_multiplier")
    if missing:
        raise PrivacyError(f"the configuration in {options.out} lacks {missing[0]}: restore a copy of it")
    unknown = sorted(stored.keys() - vars(options).keys() - _OF_THE_RUN)
    if unknown:
        raise PrivacyError(
            f"the configuration in {options.out} says {_checks.shown(unknown[0])}, which no run knows: restore a copy "
            "of it"
        )
    if options.ledger is not None:
        stored["ledger"] = options.ledger  # it may have moved; the run is refused unless it is in there
    for name, value in given(options, apart=_ANEW).items():
        if stored.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise PrivacyError(
                f"the run in {options.out} has {option} {stored.get(name)}, not {value}: leave the option out to "
                "resume, or start a new run in another folder"
            )
    return stored
