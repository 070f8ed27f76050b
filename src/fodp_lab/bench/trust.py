"""What trust costs on the paper's MLP: steps that differ in where the noise comes from, and steps with a ledger."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.data import TensorDataset

from fodp.data.models import cross_entropy
from fodp.ledger import Ledger
from fodp.plan import Plan
from fodp.queries import Query
from fodp.release import FreshNoise
from fodp.step import Step as SessionStep
from fodp.trainer import Trainer
from fodp_lab.bench.contenders import Step
from fodp_lab.bench.workloads import WORKLOADS

MLP = WORKLOADS["mlp"]


class TorchNoise:
    """What most libraries do: `normal_` on the output (`draws` times)."""

    def __init__(self, draws: int = 1) -> None:
        self._draws = draws

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""
        for _ in range(self._draws):
            out.normal_(0.0, std)
        return out


def trainer_with(
    data: TensorDataset,
    method: str,
    steps: int,
    *,
    noise: TorchNoise | None = None,
    ledger: Ledger | None = None,
    **plan: Any,
) -> Trainer:
    """A trainer of the paper's MLP with this noise, by default the secure stream's; lots are from there anyway."""
    public = dict(
        sampling_rate=MLP.batch / MLP.examples, steps=steps, lot_size=MLP.batch, clip_norm=1.0, noise_multiplier=1.1
    )
    the_plan = Plan(**public, delta=1e-5, method=method, **plan)  # type: ignore[arg-type]
    trainer = Trainer(MLP.model(), cross_entropy, data, the_plan, ledger=ledger)
    trainer.course.begin()
    if noise is not None:
        fresh = FreshNoise(noise)

        class OtherNoise(SessionStep):
            """A step that takes its noise from elsewhere."""

            def noised(self, query: Query, std: float, name: str) -> Tensor:
                return fresh.add(query, std, self.number, name)

        trainer.session.steps_by(OtherNoise)
    return trainer


def milliseconds(
    contenders: Mapping[str, Step], rounds: int, burst: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Of a step, for each round: every contender takes a burst of steps in it, in a new order."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            started = clock()
            for _ in range(burst):
                contenders[name]()
            times[name].append((clock() - started) / burst * 1e3)
    return times


def share_of_writing(trainer: Trainer, seconds: float) -> float:
    """Which part of a run's time goes into writing its steps down, after the first few.

    Measured within one run, so that what slows the machine down slows both. The first blocks are of one step or
    two, because nothing is known yet of how long steps take, and are left out.
    """
    account = trainer.course.account
    assert account is not None
    covers, writing = account.covers, 0.0

    def timed(step: int) -> bool:
        nonlocal writing
        started = time.perf_counter()
        covered = covers(step)
        writing += time.perf_counter() - started
        return covered

    for _ in range(4):
        trainer.take_step()
    with mock.patch.object(account, "covers", timed):
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            trainer.take_step()
        return writing / (time.perf_counter() - started)
