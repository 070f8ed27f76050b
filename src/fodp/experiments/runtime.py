"""The runtime tables: all methods in one process, taking turns, so that the ratios are fair."""

import time
from typing import Any

import torch

from fodp.experiments.catalog import METHODS
from fodp.experiments.code_version import code_version
from fodp.experiments.execute import Curve, make_trainer, splits_for
from fodp.experiments.records import Records
from fodp.experiments.spec import RunSpec
from fodp.models import build
from fodp.training.callbacks import Callback
from fodp.training.trainer import Trainer

TURN = 250  # steps, ten epochs: short against the machine's moods, long against a change of method


class _Turn(Callback):
    """Ends a fit after a turn, and keeps the time from its start to its end."""

    def __init__(self, steps: int):
        self.steps, self.seconds = steps, 0.0

    def on_start(self, trainer: Trainer) -> None:
        """The turn begins."""
        self._until = trainer.step + self.steps
        self._started = time.perf_counter()

    def on_step(self, trainer: Trainer) -> None:
        """The turn ends."""
        trainer.interrupted = trainer.step >= self._until

    def on_stop(self, trainer: Trainer) -> None:
        """Keep the time; the accounting that a fit ends with is not training."""
        self.seconds = time.perf_counter() - self._started


def measure(records: Records, steps: int, show: Any) -> None:
    """Train every method of the paper's table on CIFAR-10, evaluation included, and record the seconds."""
    torch.set_num_threads(1)
    contenders = {
        label: RunSpec(dataset="cifar10", method=method, params=params, plan_steps=steps, steps=steps)
        for label, (method, params) in METHODS.items()
    }
    keys = {label: f"runtime-{spec.key}" for label, spec in contenders.items()}
    if all(records.get(keys[label], code_version(spec.method)) for label, spec in contenders.items()):
        return
    splits = splits_for("cifar10", "mlp")
    trainers: dict[str, tuple[Trainer, _Turn]] = {}
    for label, spec in contenders.items():
        torch.manual_seed(spec.seed)
        model, turn = build(spec.model, splits.card), _Turn(TURN)
        trainers[label] = make_trainer(spec, splits, model, [turn, Curve(model, splits.test, spec.score_every)]), turn
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for number in range(steps // TURN):
        order = list(trainers)
        for label in order[number % len(order) :] + order[: number % len(order)]:
            trainer, turn = trainers[label]
            trainer.fit()
            seconds[label].append(round(turn.seconds, 4))
            show(label)
    for label, spec in contenders.items():
        records.append({
            "key": keys[label], "code": code_version(spec.method), "run": spec.to_dict(), "algorithm": spec.method,
            "label": label, "turns": seconds[label], "seconds": round(sum(seconds[label]), 2),
            "torch": torch.__version__, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        })  # fmt: skip
