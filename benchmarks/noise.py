"""What trust costs on the paper's MLP, one thread: the secure stream against PyTorch's in-place generator, the ledger.

    make bench-noise

Whole DP-SGD steps that differ in nothing but where the noise comes from, in interleaved bursts; then the draws alone;
then steps that are written down in a ledger before they are used.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fodp
from fodp.bench.workloads import WORKLOADS
from fodp.exact import rounded_normals
from fodp.models import cross_entropy
from fodp.noise import Streams
from fodp.training.bookkeeping import open_account

BURST = 20
MLP = WORKLOADS["mlp"]


class TorchNoise:
    """What most libraries do: `normal_` on the output, with masks from the secure stream as before."""

    def __init__(self) -> None:
        self._masks = Streams.secure()

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        return out.normal_(0.0, std)

    def words(self, count: int, step: int, name: str) -> Any:
        return self._masks.words(count, step, name)


def step_with(
    noise: Any, data: TensorDataset, method: str, steps: int, ledger: fodp.Ledger | None = None, **plan: Any
) -> Callable[[], None]:
    public = dict(
        sampling_rate=MLP.batch / MLP.examples, steps=steps, lot_size=MLP.batch, clip_norm=1.0, noise_multiplier=1.1
    )
    trainer = fodp.Trainer(MLP.model(), cross_entropy, data, fodp.Plan(**public, delta=1e-5, method=method, **plan))
    if ledger is not None:
        trainer._account = open_account(ledger, trainer.run_id, trainer.plan, trainer.last_step, data)
    if noise is not None:
        trainer.run.streams = noise
        trainer.run._sampler._streams = noise
    return trainer._one_step


def milliseconds(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            started = time.perf_counter()
            for _ in range(BURST):
                contenders[name]()
            times[name].append((time.perf_counter() - started) / BURST * 1e3)
    return times


def report(title: str, times: dict[str, list[float]], base: str) -> dict[str, float]:
    print(f"{title}, relative to {base} (median of paired bursts, middle 80%)")
    found = {}
    for name, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times[base], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        found[name] = statistics.median(ratios)
        print(f"  {name:28s} {statistics.median(values):7.3f} ms   {found[name]:5.2f}  [{low:.2f}, {high:.2f}]")
    return found


def rounding_of_sums(data: TensorDataset) -> float:
    """How far s(D) - s(D without its last) is from the last one's own clipped gradient, in units of C."""
    model, worst = MLP.model(), 0.0

    def total(rows: slice) -> Tensor:
        batch = tuple(tensor[rows] for tensor in data.tensors)
        return fodp.clipped_sum(model, cross_entropy, batch, 1.0).double()

    for count in (2, 20, 100, MLP.batch, 255):
        apart = total(slice(0, count)) - total(slice(0, count - 1)) - total(slice(count - 1, count))
        worst = max(worst, float(apart.norm()))
    return worst


def durability(data: TensorDataset, rounds: int) -> dict[str, float]:
    """Long bursts, since a durable write comes every half second; of the disk that the working folder is on."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        book = fodp.Ledger(Path(folder) / "l.sqlite", dataset="made up", budget=(1e6, 1e-5))
        steps = BURST * 20 * (rounds // 2 + 2) + 1
        contenders = {
            "no ledger": step_with(None, data, "dp-sgd", steps),
            "ledger": step_with(None, data, "dp-sgd", steps, ledger=book),
        }
        bursts = {name: repeated(step, 20) for name, step in contenders.items()}
        milliseconds(bursts, 1)
        return report("a durable dp-sgd step (times 20)", milliseconds(bursts, rounds // 2), "no ledger")


def repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
    def often() -> None:
        for _ in range(times):
            step()

    return often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = TensorDataset(*MLP.data())
    steps = BURST * (options.rounds + 2) + 1
    results = {}
    for method in ("dp-sgd", "fo-dp-sgd"):
        contenders = {
            "torch.normal_": step_with(TorchNoise(), data, method, steps),
            "secure stream": step_with(None, data, method, steps),
            "secure stream, exact noise": step_with(None, data, method, steps, exact_noise=True),
        }
        milliseconds(contenders, 1)
        results[method] = report(f"a {method} step", milliseconds(contenders, options.rounds), "torch.normal_")
    size = sum(p.numel() for p in MLP.model().parameters())
    buffer, streams, step = torch.empty(size), Streams.seeded(0), iter(range(10**9))
    draws = {
        "torch.normal_": lambda: buffer.normal_(0.0, 1.1),
        "secure stream": lambda: streams.normal_(buffer, 1.1, next(step), "noise"),
        "secure stream, exact noise": lambda: rounded_normals(size, streams, next(step), "noise"),
    }
    milliseconds(draws, 1)
    results["draw"] = report(f"{size} normals alone", milliseconds(draws, options.rounds), "torch.normal_")
    results["ledger"] = durability(data, options.rounds)
    results["rounding"] = {"of C": rounding_of_sums(data)}
    print(f"rounding of float32 sums when one example leaves: at most {results['rounding']['of C']:.1e} of C")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
