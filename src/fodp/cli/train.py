"""`fodp train`: one private training run in one folder."""

import argparse
import json
import math
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fodp
from fodp.cli.job import DEFAULTS, add_options, completed, given, load_data, make_plan, public_sample, use_threads
from fodp.cli.ledger import parse_budget, with_ledger
from fodp.cli.ranks import joined
from fodp.errors import ConfigurationError, LedgerError, PrivacyError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.callbacks import Callback
    from fodp.data import Splits
    from fodp.ledger import Ledger
    from fodp.plan import Plan
    from fodp.ranks import Processes
    from fodp.runs.folder import RunFolder
    from fodp.trainer import Trainer

EPILOG = """examples:
  fodp train --dataset digits --method fo-dp-sgd --target-epsilon 4 --epochs 40 --lr 0.5
  fodp train --preset paper --dataset cifar10 --set beta=1 --seed 0 --out runs/paper
  fodp train --resume --out runs/paper
  fodp train --data patients.csv --schema schema.toml --target disease --target-epsilon 3
  fodp train --data visits.csv --schema schema.toml --target disease --target-epsilon 3 \
             --owners patient --records-per-person 4 --assume-people 5000

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
NOTHING = "nothing was charged"
_MOST_COPIES = 1024
_MUCH_MEMORY = 2e9  # bytes of earlier noise that are told of
# What may be said anew when resuming; everything else belongs to the run.
_ANEW = (
    "resume",
    "preset",
    "ledger",
    "allow_changed_data",
    "allow_other_name",
    "no_budget",
    "wait",
    "rank_timeout",
)
_OF_THE_RUN = {"plan", "described", "run", "fodp", "card", "model_code"}  # written beside the options


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp train`."""
    add = parser.add_argument
    add_options(parser, epochs=_DEFAULTS["epochs"])
    add("--preset", metavar="NAME", help="paper: the paper's protocol")
    add("--seed", type=int, help="research mode: repeatable, not private against who knows the seed")
    add("--eval-every", type=int, metavar="N", help="score on the public test split every N epochs, default 1")
    add("--early-stopping", type=int, metavar="N", help="stop after N public scores without a better one; same epsilon")
    add("--microbatch", type=int, metavar="N", help="examples in flight at a time (default: by the model)")
    add("--augment", metavar="NAME", help="of images: standard, crop, flip or crop+flip; see --copies")
    add("--copies", type=int, metavar="K", help="augmented pictures of a record, averaged before clipping; default 1")
    add(
        "--public-sample", metavar="FILE", help="with --shape kronecker: public records of the data's form (.npz, .csv)"
    )
    add("--device", metavar="NAME", help="where to train: cpu (default), cuda, cuda:1, … (docs/scaling.md)")
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
    add("--rank-timeout", type=float, metavar="SECONDS", help="under torchrun: wait so long for a rank, default 300")
    add("--out", metavar="DIR", help="run folder (default: a fresh one under runs/)")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--json", action="store_true", help="the last line on stdout is the result as JSON")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Train, and say what came out and what it cost."""
    if options.resume and not options.out:
        raise ConfigurationError("--resume needs the run folder: add --out DIR")
    try:
        return _run(options)
    except KeyboardInterrupt as error:
        if not getattr(error, "__notes__", ()):  # before the first step, when nothing but reading was done
            error.add_note(NOTHING if not options.resume else "nothing more was charged")
        raise


def _run(options: argparse.Namespace) -> int:
    from fodp.runs.folder import RunFolder

    with joined(options.rank_timeout) as ranks:
        first = ranks is None or ranks.is_first
        if ranks is not None and options.wait:
            raise ConfigurationError("--wait is for one process: other ranks would wait too long for the first")
        folder = RunFolder(options.out or _fresh_name())
        config = _stored_config(options) if options.resume else _new_config(options)
        try:
            if options.resume and first:
                folder.take()  # before the ledger: whoever opens the run there takes it from others
            return _train(options, config, folder, ranks)
        finally:
            folder.leave()


def _fresh_name() -> Path:
    """Of a run's folder: the time, and something that two runs of one second do not share."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def _train(options: argparse.Namespace, config: dict[str, Any], folder: "RunFolder", ranks: "Processes | None") -> int:
    import torch

    from fodp.callbacks import Checkpoint, CSVLog, Progress
    from fodp.cli.rehearsal import rehearse
    from fodp.data.models import build, loss_for, source_code
    from fodp.ranks import ALONE
    from fodp.runs.scores import accuracy
    from fodp.state.ledgers import seed_mark
    from fodp.support import devices
    from fodp.trainer import Trainer

    ranks = ranks or ALONE
    use_threads(options)
    device = devices.named(config.get("device", "cpu"))  # the run's own: seeded noise differs from one to another
    splits = load_data(config, options)
    plan = make_plan(config, splits)
    _tell_large_delta(plan.delta, config.get("assume_people", splits.card.train_size))
    # PyTorch takes 64 bits of a seed; the streams of masks and noise take all of it.
    torch.manual_seed(plan.seed % 2**64 if plan.seed is not None else int(ranks.text(lambda: str(torch.seed()))))
    model = build(config["model"], splits.card)
    rehearse(config["model"], model, splits.card)
    model.to(device)

    folder.refuse_unusable()
    callbacks: list[Callback] = [*_scoring(config, splits), CSVLog(folder.metrics)]
    if not options.quiet and ranks.is_first:
        callbacks.append(Progress())
    callbacks.append(Checkpoint(folder.checkpoint, share=_SAVING))
    named = ranks.is_first and ("ledger" in config or options.resume)
    shared = _open_ledger(folder.ledger_of(config), config, options) if named else None
    trainer = Trainer(
        model,
        loss_for(splits.card, device),
        splits.train,
        plan,
        owners=splits.owners,
        callbacks=callbacks,
        target_epsilon=config.get("target_epsilon") if config.get("noise_multiplier") is not None else None,
        microbatch=config.get("microbatch"),
        **_augmenting(config, splits),
        **public_sample(config, plan, splits),
        ledger=shared or (lambda: _open_ledger(folder.ledger, config, options)),
        run_id=config.get("run"),
        public_score=(lambda: accuracy(model, splits.validation)[1]) if len(splits.validation) else None,
    )
    if options.resume:
        _resume(trainer, folder, config)
    elif ranks.is_first:
        if shared is not None:
            shared.refuse_unfit(plan.events(), trainer.last_step, seed=seed_mark(shared, plan), unit=plan.unit)
        folder.create()  # only now, when everything else has proved right
    ledger = trainer.ledger  # the folder's own is made here, before the configuration that a resumed run is read from
    if not options.resume and ranks.is_first:
        stored = {
            **config,
            "delta": plan.delta,
            "plan": plan.to_dict(),
            "run": trainer.run_id,
            "fodp": fodp.__version__,
        }
        stored["described"] = plan.described().sentences()
        # What predicting takes; all of it is public.
        stored |= {"card": asdict(splits.card), "model_code": source_code(config["model"], model, splits.card)}
        folder.write(folder.statement, trainer.statement() + "\n")
        folder.write(folder.config, json.dumps(stored, indent=1))
    _tell_kept_noise(plan, trainer.source.layout.size)
    if ranks.is_first and not options.resume:
        _tell_odd_strength(plan, config)
    started = time.perf_counter()
    try:
        outcome = trainer.fit()
    except BaseException as error:
        if ranks.is_first:
            _tell_what_was_spent(trainer, plan, error)
            if not options.resume and not _used(trainer):
                if shared is None and ledger is not None:
                    ledger.close()  # the folder's own
                folder.discard()
        raise
    code = 128 + (outcome.signal or signal.SIGINT) if outcome.reason == "interrupted" else 0
    if not ranks.is_first:
        return code
    result = {
        "dataset": config["dataset"],
        "model": config["model"],
        "method": plan.method,
        "params": dict(plan.params),
        "lr": trainer.learning_rate,
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
        **({"unit": plan.unit_in_words()} if plan.unit == "person" else {}),
        "dataset_name": config.get("dataset_name"),
        "budget_left": _share_left(ledger),
        # How long it took tells how large the lots were, and so the data: for research only.
        "seconds": None if plan.seed is None else round(time.perf_counter() - started, 3),
        "out": str(folder.path),
    }
    _conclude(options, folder, plan, result, trainer.statement())
    return code


def _augmenting(config: dict[str, Any], splits: "Splits") -> dict[str, Any]:
    """The Trainer's words for --augment and --copies."""
    from fodp.data.augmentations import augmentation

    copies = checks.whole("--copies", config.get("copies", 1), maximum=_MOST_COPIES)
    if "augment" in config:
        return dict(augment=augmentation(config["augment"], splits.card), copies=copies)
    if copies > 1:
        raise ConfigurationError(f"--copies {copies} of the same picture do nothing: add --augment standard")
    return {}


def _scoring(config: dict[str, Any], splits: "Splits") -> "list[Callback]":
    """Scores on the public test split, where there is one, and an end that depends on them if that was asked for."""
    from fodp.callbacks import EarlyStopping, Evaluate
    from fodp.runs.scores import squared_error

    checks.whole("--eval-every", config["eval_every"])
    patience = config.get("early_stopping")
    if not len(splits.test):
        if patience is not None:
            raise ConfigurationError("--early-stopping looks at public scores, and there is no test data: leave it out")
        return []
    if splits.card.is_regression:
        scores, stop = Evaluate(splits.test, config["eval_every"], metric=squared_error), ("loss", "min")
    else:
        scores, stop = Evaluate(splits.test, config["eval_every"]), ("accuracy", "max")
    return [scores] if patience is None else [scores, EarlyStopping(stop[0], patience, stop[1])]


def _tell_large_delta(delta: float, public_size: int) -> None:
    """Say that δ allows what nobody means by privacy, where the size of the data is public."""
    if delta >= 1 / public_size:
        print(
            f"fodp: delta {delta:g} is not below 1/{public_size}, one over the public size of the data: publishing one "
            f"record drawn at random would satisfy it. A smaller one: --delta {0.1 / public_size:.0e}",
            file=sys.stderr,
        )


def _used(trainer: "Trainer") -> int:
    """How many steps the run has used or charged; more than none where that cannot be told."""
    try:
        charged = trainer.ledger.steps(trainer.run_id) if trainer.ledger is not None else 0
    except PrivacyError:
        return max(1, trainer.step)
    return max(trainer.step, charged or 0)


def _tell_what_was_spent(trainer: "Trainer", plan: "Plan", error: BaseException) -> None:
    """Of a run that was broken off: whether it has cost anything."""
    if isinstance(error, KeyboardInterrupt):
        used = _used(trainer)
        error.add_note(f"{used} of {plan.steps} steps are charged" if used else NOTHING)


def _tell_odd_strength(plan: "Plan", config: dict[str, Any]) -> None:
    """Say what is allowed and hardly meant of a target and a rate."""
    from fodp.plan import odd_strength

    for sentence in odd_strength(plan, config.get("target_epsilon")):
        print(f"fodp: {sentence}", file=sys.stderr)


def _tell_kept_noise(plan: "Plan", size: int) -> None:
    """Say what correlated noise keeps of a model with so many trained numbers, where that is a lot."""
    earlier = len(plan.algorithm.strategy()) - 1
    if 4 * earlier * size > _MUCH_MEMORY:
        print(
            f"fodp: noise is correlated over {earlier + 1} steps, and that of earlier ones takes "
            f"{4e-9 * earlier * size:.1f} GB of memory. Less: --method fo-noise --shape fan-in --set order=None "
            "--set average=ema --set bands=4, or --method dp-sgd",
            file=sys.stderr,
        )


def _open_ledger(path: Path | str, config: dict[str, Any], options: argparse.Namespace) -> "Ledger":
    """The ledger that a run is kept in."""
    from fodp.ledger import Ledger

    ledger = Ledger(
        path,
        dataset=config.get("dataset_name"),
        budget=parse_budget(config["budget"]) if "budget" in config else None,
        allow_changed_data=bool(options.allow_changed_data),
        allow_other_name=bool(options.allow_other_name),
        create=not options.resume,
        wait=math.inf if options.wait else 0.0,
    )
    ledger.tell_waiting(lambda text: print(text, file=sys.stderr))
    return ledger


def _share_left(ledger: "Ledger | None") -> float | None:
    """The share of the data's budget that is left; None without a budget."""
    if ledger is None or ledger.dataset is None or ledger.budget(ledger.dataset) is None:
        return None
    return ledger.left(ledger.dataset)


def _resume(trainer: "Trainer", folder: "RunFolder", config: dict[str, Any]) -> None:
    """Go on from the checkpoint; a run that broke off before it released anything may begin anew."""
    if folder.checkpoint.exists():
        trainer.resume(folder.checkpoint)
        if trainer.session.processes.is_first:
            folder.tidy()
        return
    if not trainer.session.processes.is_first:
        return
    used = trainer.ledger.steps(trainer.run_id) if trainer.ledger is not None else None
    if used:
        raise LedgerError(
            f"{folder.checkpoint} is gone, though {used} steps were used: restore it, or start a new run in another "
            "folder (--out); what was used stays charged"
        )
    folder.tidy()
    print(f"{folder.path} broke off before its first step: it begins anew", file=sys.stderr)


def _conclude(options: argparse.Namespace, folder: Any, plan: "Plan", result: dict[str, Any], statement: str) -> None:
    """Write and print what came out; all of it states one ε."""
    from fodp.accounting import rounded_up
    from fodp.cli.plot import plot_accuracy
    from fodp.support.extras import MissingExtra

    text = sys.stderr if options.json else sys.stdout
    if result["reason"] == "interrupted" and not result["steps"]:
        print(
            f"stopped before the first step: {NOTHING}; begin again with: fodp train --resume --out {folder.path}",
            file=text,
        )
        return
    if result["reason"] == "interrupted":
        print(
            f"stopped after step {result['steps']} of {plan.steps}; if it ends here, after what was seen, its epsilon "
            f"is {rounded_up(result['epsilon'])}; go on with: fodp train --resume --out {folder.path}",
            file=text,
        )
        return
    folder.write(folder.result, json.dumps(result, indent=1) + "\n")
    try:
        plot_accuracy(folder.metrics, folder.plot, f"{result['method']} on {result['dataset']}, δ={plan.delta:g}")
    except OSError as error:
        print(f"no picture: {folder.plot} could not be written ({error.strerror})", file=sys.stderr)
    except MissingExtra as error:
        print(f"no picture was drawn: {error}", file=sys.stderr)
    if result["final_accuracy"] is not None:
        print(f"accuracy {result['final_accuracy']:.4f} on the public test split", file=text)
    elif result["final_loss"] is not None:
        print(f"mean squared error {result['final_loss']:.4f} on the public test split, target in [-1, 1]", file=text)
    else:
        print("no accuracy: there is no public test data to score on", file=text)
    if plan.options.rate.is_automatic:
        then = ", then by what was released" if result["params"].get("rate_rule", "none") != "none" else ""
        print(f"learning rate {result['lr']:.4g}, chosen from public numbers only (lr=auto){then}", file=text)
    print(f"epsilon {rounded_up(result['epsilon'])} at delta {rounded_up(result['delta'], 6)}", file=text)
    if result["reason"] == "stopped early":
        print(
            f"stopped early at step {result['steps']} of {plan.steps}, because of public scores: the epsilon is still "
            "that of all planned steps, since where a run stops tells something too",
            file=text,
        )
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


def _new_config(options: argparse.Namespace) -> dict[str, Any]:
    """Defaults, then the preset, then what was given."""
    said = given(options, apart=_ANEW)
    preset: dict[str, Any] = {}
    if options.preset is not None:
        if options.preset not in _PRESETS:
            raise ConfigurationError(f"--preset must be one of {', '.join(_PRESETS)}; got {options.preset!r}")
        preset = dict(_PRESETS[options.preset])
        if "target_epsilon" in said and "noise_multiplier" not in said:
            del preset["noise_multiplier"]  # a target alone calibrates
    config = completed(said, _DEFAULTS, preset)
    config = with_ledger(config, options)
    _refuse_odd_options(config, options)
    return config


def _refuse_odd_options(config: dict[str, Any], options: argparse.Namespace) -> None:
    """Raise, in one message, for all options that no run can have, before any data is read."""
    from fodp.cli.job import said_params
    from fodp.methods import METHODS, find
    from fodp.plan import field_checks

    def privacy() -> None:
        if not _says_how_private(config):
            raise ConfigurationError(
                "how private? add --target-epsilon EPS (for example 4), or --noise-multiplier SIGMA"
            )

    def params() -> None:
        if config["method"] in METHODS:
            find(config["method"]).from_dict(said_params(config))

    numbers: dict[str, Callable[[str, Any], object]] = {
        "epochs": checks.positive,
        "sampling_rate": checks.fraction,
        "target_epsilon": checks.positive,
        "eval_every": checks.whole,
        "early_stopping": checks.whole,
        "microbatch": checks.whole,
        "copies": lambda name, value: checks.whole(name, value, maximum=_MOST_COPIES),
    }
    mine = {name: config[name] for name in numbers if config.get(name) is not None}
    of_the_plan = {name: value for name, value in config.items() if name not in numbers and value is not None}
    checks.together(
        privacy,
        *(partial(numbers[name], f"--{name.replace('_', '-')}", value) for name, value in mine.items()),
        *field_checks(of_the_plan),
        params,
    )


def _says_how_private(config: dict[str, Any]) -> bool:
    return config.get("target_epsilon") is not None or config.get("noise_multiplier") is not None


def _stored_config(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the run that is resumed; what is said against it is refused."""
    from fodp.runs.folder import RunFolder

    stored = RunFolder(options.out).read_config()
    missing = sorted({*_DEFAULTS, "delta", "method", "plan", "run"} - stored.keys())
    if not _says_how_private(stored):
        missing.append("noise_multiplier")
    if missing:
        raise LedgerError(f"the configuration in {options.out} lacks {missing[0]}: restore a copy of it")
    unknown = sorted(stored.keys() - vars(options).keys() - _OF_THE_RUN)
    if unknown:
        raise LedgerError(
            f"the configuration in {options.out} says {checks.shown(unknown[0])}, which no run knows: restore a copy "
            "of it"
        )
    if options.ledger is not None:
        stored["ledger"] = options.ledger  # it may have moved; the run is refused unless it is in there
    for name, value in given(options, apart=_ANEW).items():
        if stored.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"the run in {options.out} has {option} {stored.get(name)}, not {value}: leave the option out to "
                "resume, or start a new run in another folder"
            )
    return stored
