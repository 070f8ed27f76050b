"""What trust costs on the paper's MLP, one thread: the secure stream against PyTorch's in-place generator, the ledger.

    make bench-noise

Whole DP-SGD steps that differ in nothing but where the noise comes from, in interleaved bursts; then the draws alone;
then steps that are written down in a ledger before they are used.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fodp
from fodp.clipping import Engine, Gradients
from fodp.clipping.chunks import Chunks
from fodp.data.models import cross_entropy
from fodp.noise import Streams
from fodp.noise.exact import rounded_normals
from fodp_lab.bench.trust import MLP, TorchNoise, milliseconds, trainer_with

BURST = 20


def report(title: str, times: dict[str, list[float]], base: str) -> dict[str, float]:
    print(f"{title}, relative to {base} (median of paired bursts, middle 80%)")
    found = {}
    for name, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times[base], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        found[name] = statistics.median(ratios)
        print(f"  {name:28s} {statistics.median(values):7.3f} ms   {found[name]:5.2f}  [{low:.2f}, {high:.2f}]")
    return found


def rounding_of_sums(data: TensorDataset, exact: bool) -> float:
    """How far s(D) - s(D without its last) is from the last one's own clipped gradient, in units of C."""
    engine, worst = Engine(MLP.model(), cross_entropy), 0.0

    def total(rows: slice) -> Tensor:
        batch = tuple(tensor[rows] for tensor in data.tensors)
        query = Gradients(Chunks(engine, batch, exact=exact), engine.layout, exact=exact).clipped_sum(1.0)
        return torch.stack([factor * term.double() for factor, term in query._terms]).sum(0)

    for count in (2, 20, 100, MLP.batch, 255):
        apart = total(slice(0, count)) - total(slice(0, count - 1)) - total(slice(count - 1, count))
        worst = max(worst, float(apart.norm()))
    return worst


def durability(data: TensorDataset, rounds: int) -> dict[str, float]:
    """Long bursts, since a durable write comes every half second; of the disk that the working folder is on."""
    runs = Path("runs")  # on the disk that runs are on, and not in git's way
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        book = fodp.Ledger(Path(folder) / "l.sqlite", dataset="made up", budget=(1e6, 1e-5))
        steps = BURST * 20 * (rounds // 2 + 2) + 1
        contenders = {
            "no ledger": trainer_with(data, "dp-sgd", steps).take_step,
            "ledger": trainer_with(data, "dp-sgd", steps, ledger=book).take_step,
        }
        milliseconds(contenders, 1, 20 * BURST)
        return report("a durable dp-sgd step", milliseconds(contenders, rounds // 2, 20 * BURST), "no ledger")


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
            "torch.normal_": trainer_with(data, method, steps, noise=TorchNoise()).take_step,
            "secure stream": trainer_with(data, method, steps).take_step,
            "secure stream, exact noise": trainer_with(data, method, steps, exact_noise=True).take_step,
        }
        milliseconds(contenders, 1, BURST)
        results[method] = report(f"a {method} step", milliseconds(contenders, options.rounds, BURST), "torch.normal_")
    size = sum(p.numel() for p in MLP.model().parameters())
    buffer, streams, step = torch.empty(size), Streams.seeded(0), iter(range(10**9))
    draws = {
        "torch.normal_": lambda: buffer.normal_(0.0, 1.1),
        "secure stream": lambda: streams.normal_(buffer, 1.1, next(step), "noise"),
        "secure stream, exact noise": lambda: rounded_normals(size, streams, next(step), "noise"),
    }
    milliseconds(draws, 1, BURST)
    results["draw"] = report(f"{size} normals alone", milliseconds(draws, options.rounds, BURST), "torch.normal_")
    results["ledger"] = durability(data, options.rounds)
    results["rounding"] = {"of C": rounding_of_sums(data, False), "of C, exact": rounding_of_sums(data, True)}
    print(f"rounding of float32 sums when one example leaves: at most {results['rounding']['of C']:.1e} of C")
    print(f"the same of exact sums, by gradients alone: at most {results['rounding']['of C, exact']:.1e} of C")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
