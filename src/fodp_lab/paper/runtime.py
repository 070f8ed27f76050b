"""The runtime tables: all methods in one process, taking turns, so that the ratios are fair.

A round is one turn of each method, and one line of the records. A measurement that was stopped goes on with the rounds
that are missing, on models of its own.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fodp
from fodp.callbacks import Callback
from fodp.data.models import build
from fodp.trainer import Trainer
from fodp_lab.paper.catalog import METHODS
from fodp_lab.paper.execute import Curve, make_trainer, splits_for
from fodp_lab.paper.records import Records, alone
from fodp_lab.paper.spec import RunSpec

TURN = 250  # steps, ten epochs: short against the machine's moods, long against a change of method
ROUNDS = 25  # the paper's 250 epochs
_WARM_UP = 25  # steps, on models that are thrown away
_NOT_TIMED = ("audit", "cli")


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
        if trainer.step >= self._until:
            trainer.interrupt()

    def on_stop(self, trainer: Trainer) -> None:
        """Keep the time; the accounting that a fit ends with is not training."""
        self.seconds = time.perf_counter() - self._started


def speed_version() -> str:
    """Names the code whose speed is measured: its sources and PyTorch. Unlike results, speed shows in nothing else."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(fodp.__file__).parent
    for path in sorted(root.rglob("*")):
        where = path.relative_to(root)
        if path.suffix in (".py", ".c", ".h") and where.parts[0] not in _NOT_TIMED:
            digest.update(f"\n{where.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def measure(path: Path, show: Callable[[str], None], rounds: int = ROUNDS, turn: int = TURN) -> None:
    """Train every method of the paper's table on CIFAR-10, evaluation included, and record the rounds that are missing.

    `show` is told each method that has had its turn, those of recorded rounds too.
    """
    torch.set_num_threads(1)
    code, labels = speed_version(), list(METHODS)
    with alone(path):
        records = Records(path)
        keys = {number: f"runtime-{code}-{turn}-{number}" for number in range(rounds)}
        missing = {number: key for number, key in keys.items() if records.get(key) is None}
        for label in labels * (rounds - len(missing)):
            show(label)
        if missing:
            for label in labels:  # what the first steps of a process build belongs to no turn
                _trainer(label, _WARM_UP)[0].fit()
            trainers = {label: _trainer(label, turn) for label in labels}
        for number, key in missing.items():
            seconds, first = {}, number % len(labels)
            for label in labels[first:] + labels[:first]:
                trainer, timed = trainers[label]
                trainer.fit()
                seconds[label] = round(timed.seconds, 4)
                show(label)
            records.append({
                "key": key, "code": code, "round": number, "steps": turn, "seconds": seconds,
                "torch": torch.__version__, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            })  # fmt: skip


def _trainer(label: str, steps: int) -> tuple[Trainer, _Turn]:
    method, params = METHODS[label]
    spec = RunSpec(dataset="cifar10", method=method, params=params)
    splits = splits_for(spec.dataset, spec.model)
    torch.manual_seed(spec.seed)
    model, turn = build(spec.model, splits.card), _Turn(steps)
    return make_trainer(spec, splits, model, [turn, Curve(model, splits.test, spec.score_every)]), turn
