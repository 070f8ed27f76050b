"""`fodp train`: one private training run in one folder."""

import argparse
import secrets
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli.config import (
    completed,
    defaults,
    given,
    refuse_incomplete,
    refuse_odd,
    refuse_otherwise,
)
from fodp.cli.exits import stopped_by
from fodp.cli.options import CONFIGURATION, INPUTS, LEDGER, add
from fodp.cli.papers import NOTHING_CHARGED, conclude, remarks, result_of, write_beginning
from fodp.cli.ranks import joined
from fodp.cli.shared import open_ledger, with_ledger
from fodp.errors import ConfigurationError, LedgerError, PrivacyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fodp.callbacks import Callback
    from fodp.cli.job import Job
    from fodp.ledger import Ledger
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

DEFAULTS: dict[str, Any] = defaults("eval_every")
_SAVING = 0.02  # of the time may go into checkpoints


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp train`."""
    add(
        parser,
        f"{CONFIGURATION} preset seed eval_every early_stopping {INPUTS} device {LEDGER} wait threads rank_timeout "
        "out resume json quiet",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and say what came out and what it cost."""
    if options.resume and not options.out:
        raise ConfigurationError("--resume needs the run folder: add --out DIR")
    try:
        with joined(options.rank_timeout) as ranks:
            if ranks is not None and options.wait:
                raise ConfigurationError("--wait is for one process: other ranks would wait too long for the first")
            return _run(options, ranks)
    except KeyboardInterrupt as error:
        if not getattr(error, "__notes__", ()):  # before the first step, when nothing but reading was done
            error.add_note("nothing more was charged" if options.resume else NOTHING_CHARGED)
        raise


def _run(options: argparse.Namespace, ranks: "Processes | None") -> int:
    from fodp.runs.folder import RunFolder

    folder = RunFolder(options.out or _fresh_name())
    config = _stored_config(options, folder) if options.resume else _new_config(options)
    try:
        if options.resume and (ranks is None or ranks.is_first):
            folder.take()  # before the ledger: whoever opens the run there takes it from others
        return _train(options, config, folder, ranks)
    finally:
        folder.leave()


def _fresh_name() -> Path:
    """Of a run's folder: the time, and something that two runs of one second do not share."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def _new_config(options: argparse.Namespace) -> dict[str, Any]:
    config = with_ledger(completed(given(options), DEFAULTS, options.preset), options)
    refuse_odd(config)
    return config


def _stored_config(options: argparse.Namespace, folder: "RunFolder") -> dict[str, Any]:
    """The configuration of the run that is resumed; what is said against it is refused."""
    stored = folder.read_config()
    refuse_incomplete(stored, folder, DEFAULTS, vars(options))
    refuse_otherwise(stored, given(options), folder, "run")
    if options.ledger is not None:
        stored["ledger"] = options.ledger  # it may have moved; the run is refused unless it is in there
    return stored


def _train(options: argparse.Namespace, config: dict[str, Any], folder: "RunFolder", ranks: "Processes | None") -> int:
    """Make the job and its trainer, begin or go on, train, and write what came out."""
    import torch

    from fodp.cli.job import Job, use_threads
    from fodp.ranks import ALONE
    from fodp.support import devices

    ranks = ranks or ALONE
    use_threads(options)
    device = devices.named(config.get("device", "cpu"))  # the run's own: seeded noise differs from one to another
    job = Job.of(config, data_dir=options.data_dir, features_cache=options.features_cache, quiet=bool(options.quiet))
    plan = job.plan()
    job.refuse_idle_sample([plan])
    # PyTorch takes 64 bits of a seed; the streams of masks and noise take all of it.
    torch.manual_seed(plan.seed % 2**64 if plan.seed is not None else int(ranks.text(lambda: str(torch.seed()))))
    model = job.model(device)
    folder.refuse_unusable()
    callbacks = _callbacks(options, job, folder, shows=ranks.is_first)
    named = ranks.is_first and ("ledger" in config or options.resume)
    shared = open_ledger(folder.ledger_of(config), config, options) if named else None
    trainer = job.trainer(
        model,
        plan,
        device=device,
        callbacks=callbacks,
        target_epsilon=config.get("target_epsilon") if config.get("noise_multiplier") is not None else None,
        ledger=shared or (lambda: open_ledger(folder.ledger, config, options)),
        run_id=config.get("run"),
    )
    if options.resume:
        _resume(trainer, folder)
    else:
        _begin(trainer, job, folder, shared)
    started = time.perf_counter()
    with job.model_errors(), _broken_off(trainer, folder, shared, keep=bool(options.resume)):
        outcome = trainer.fit()
    if ranks.is_first:
        conclude(options, folder, trainer, result_of(config, trainer, outcome, time.perf_counter() - started, folder))
    return stopped_by(outcome.signal) if outcome.reason == "interrupted" else 0


def _callbacks(options: argparse.Namespace, job: "Job", folder: "RunFolder", *, shows: bool) -> "list[Callback]":
    """Scores on the public test split, where there is one, and an end that depends on them; log, bar, checkpoint."""
    from fodp.callbacks import Checkpoint, CSVLog, EarlyStopping, Evaluate, Progress
    from fodp.runs.scores import squared_error

    every, patience = job.config["eval_every"], job.config.get("early_stopping")
    test = job.splits.test
    found: list[Callback] = []
    if not len(test) and patience is not None:
        raise ConfigurationError("--early-stopping looks at public scores, and there is no test data: leave it out")
    if len(test):
        regression = job.splits.card.is_regression
        found.append(Evaluate(test, every, metric=squared_error) if regression else Evaluate(test, every))
        if patience is not None:
            found.append(EarlyStopping(*(("loss", patience, "min") if regression else ("accuracy", patience, "max"))))
    found.append(CSVLog(folder.metrics))
    if shows and not options.quiet:
        found.append(Progress())
    return [*found, Checkpoint(folder.checkpoint, share=_SAVING)]


def _begin(trainer: "Trainer", job: "Job", folder: "RunFolder", shared: "Ledger | None") -> None:
    """Make the folder, only now that everything else has proved right, and write how the run is resumed."""
    from fodp.state.ledgers import seed_mark

    plan, first = trainer.plan, trainer.session.processes.is_first
    if first:
        if shared is not None:
            shared.refuse_unfit(plan.events(), trainer.last_step, seed=seed_mark(shared, plan), unit=plan.unit)
        folder.create()
    _ = trainer.ledger  # the folder's own is made here, before the configuration that a resumed run is read from
    if first:
        write_beginning(folder, job, trainer)
        for sentence in remarks(plan, job.config, trainer.source.layout.size):
            print(f"fodp: {sentence}", file=sys.stderr)


def _resume(trainer: "Trainer", folder: "RunFolder") -> None:
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


@contextmanager
def _broken_off(trainer: "Trainer", folder: "RunFolder", shared: "Ledger | None", *, keep: bool) -> "Iterator[None]":
    """Of a run that does not come to its end: say what it has cost, and leave no folder if that is nothing."""
    try:
        yield
    except BaseException as error:
        if trainer.session.processes.is_first:
            used = _used(trainer)
            if isinstance(error, KeyboardInterrupt):
                error.add_note(f"{used} of {trainer.plan.steps} steps are charged" if used else NOTHING_CHARGED)
            if not keep and not used:
                if shared is None and trainer.ledger is not None:
                    trainer.ledger.close()  # the folder's own
                folder.discard()
        raise


def _used(trainer: "Trainer") -> int:
    """How many steps the run has used or charged; more than none where that cannot be told."""
    try:
        charged = trainer.ledger.steps(trainer.run_id) if trainer.ledger is not None else 0
    except PrivacyError:
        return max(1, trainer.step)
    return max(trainer.step, charged or 0)
