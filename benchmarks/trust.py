"""What trust may cost on the paper's MLP: the secure stream a fifth of a step, writing spending down 2% of a run.

    make bench-trust

Ratios within one run, interleaved, medians; a busy machine gets three attempts, for it can only make things look
slower by turns. Each measure is first shown something that is too slow, and must see it. Prints pass or FAIL; 1 if one
fails.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import TensorDataset

from fodp.ledger import Account, Ledger
from fodp_lab.bench.trust import MLP, TorchNoise, milliseconds, share_of_writing, trainer_with

ATTEMPTS = 3
ROUNDS, BURST = 12, 4
STREAM = 1.2
# 2%, and as much again because two seconds hold only a few writes, of a disk that others use too: this only sees gross
# mistakes, and a test with a clock of its own holds the 2%. A write for every step is more than half of a run.
WRITING = 0.02 + 0.02


def judged(what: str, limit: float, too_slow: Callable[[], float], measure: Callable[[], float]) -> bool:
    """Whether the best of a few attempts is within the limit, by a measure that sees what is beyond it."""
    slow = too_slow()
    found = [measure()]
    while min(found) > limit and len(found) < ATTEMPTS:
        found.append(measure())
    passed = slow > limit >= min(found)
    print(
        f"{'pass' if passed else 'FAIL'}  {what}: {min(found):.3f}, at most {limit:g} (too slow on purpose: {slow:.3f})"
    )
    return passed


def secure_stream(data: TensorDataset) -> bool:
    steps = (ROUNDS * (ATTEMPTS + 1) + 1) * BURST
    noises = {"plain": TorchNoise(), "secure": None, "five times": TorchNoise(draws=5)}
    contenders = {k: trainer_with(data, "dp-sgd", steps, noise=noise).take_step for k, noise in noises.items()}
    milliseconds(contenders, 1, BURST)  # the first steps check the engine and warm caches up

    def ratio(name: str) -> float:
        pair = {k: contenders[k] for k in ("plain", name)}
        times = milliseconds(pair, ROUNDS, BURST, clock=time.thread_time)
        return statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True))

    what = "a step with the secure stream over one with torch's normal_"
    return judged(what, STREAM, lambda: ratio("five times"), lambda: ratio("secure"))


def writing(data: TensorDataset, folder: Path) -> bool:
    def share(seconds: float = 2.0) -> float:
        ledger = Ledger(folder / f"{time.monotonic_ns()}.sqlite", dataset="made up", budget=(1e6, 1e-5))
        return share_of_writing(trainer_with(data, "dp-sgd", 10**4, ledger=ledger), seconds)

    def every_step() -> float:
        with mock.patch.object(Account, "_block", return_value=1):
            return share(0.3)

    return judged("share of a run that goes into writing steps down", WRITING, every_step, share)


def main() -> int:
    torch.set_num_threads(1)
    data = TensorDataset(*MLP.data())
    runs = Path("runs")  # on the disk that runs are on, and not in git's way
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        return 0 if all([secure_stream(data), writing(data, Path(folder))]) else 1


if __name__ == "__main__":
    sys.exit(main())
