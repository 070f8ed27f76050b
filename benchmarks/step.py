"""One step on the paper's MLP: plain SGD, DP-SGD and FO-DP-SGD, in interleaved bursts, one thread.

    make bench

Prints the median time of a step and its ratio to plain PyTorch SGD, with the middle 80% of the paired ratios.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.flat import GradientBuffer, Layout
from fodp.noise import Streams
from fodp.sampling import Fetcher, PoissonSampler

INPUTS, CLASSES, EXAMPLES, LOT = 3072, 10, 5000, 200
BURST = 30  # steps in a row before the next contender: training runs in a steady state


def paper_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plain_step(data: TensorDataset) -> Callable[[], None]:
    """What people write without privacy: gather a random batch, mean loss, backward, SGD."""
    model = paper_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = data.tensors

    def step() -> None:
        rows = torch.randint(EXAMPLES, (LOT,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

    return step


def private_step(
    data: TensorDataset, method: str, seed: int | None, steps: int, **params: object
) -> Callable[[], None]:
    model = paper_mlp()
    plan = fodp.Plan(
        sampling_rate=LOT / EXAMPLES,
        steps=steps,
        lot_size=LOT,
        clip_norm=1.0,
        noise_multiplier=1.1,
        delta=1e-5,
        method=method,
        params=params,
        seed=seed,
    )
    held_out = tuple(t[:LOT] for t in data.tensors)
    score = lambda: losses(model, held_out).mean().item()  # noqa: E731  # stands in for a public split
    trainer = fodp.Trainer(model, losses, data, plan, public_score=score)
    return trainer._one_step


def by_hand_step(data: TensorDataset, with_memory: bool) -> Callable[[], None]:
    """The same operations written out for this one model, without an engine or checks: the floor for a library."""
    model = paper_mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    streams, memory, counter = Streams.seeded(0), fodp.FractionalMemory(), itertools.count()
    sampler, fetcher = PoissonSampler(EXAMPLES, LOT / EXAMPLES, streams), Fetcher(data)
    layout = Layout(model)
    total, release = layout.zeros(), layout.zeros()
    views, gradients = layout.views(total), GradientBuffer(layout)

    def step() -> None:
        number = next(counter)
        inputs, labels = fetcher.fetch(sampler.draw(number).indices)
        activations, outputs = [inputs], []
        for layer in layers:
            outputs.append(layer(activations[-1]))
            activations.append(torch.tanh(outputs[-1]))
        loss = F.cross_entropy(outputs[-1], labels, reduction="none")
        backs = torch.autograd.grad(loss, outputs, torch.ones_like(loss))
        with torch.no_grad():
            pairs = list(zip(activations, backs, strict=False))
            norm = torch.linalg.vector_norm
            squares = [norm(b, dim=1) ** 2 * (norm(a, dim=1) ** 2 + 1) for a, b in pairs]
            weights = (1 / torch.stack(squares).sum(0).sqrt_()).clamp_(max=1.0)
            for i, (a, b) in enumerate(pairs):
                weighted = b * weights[:, None]
                torch.mm(weighted.t(), a, out=views[2 * i])
                torch.sum(weighted, 0, out=views[2 * i + 1])
            u = memory.read() if with_memory else None
            streams.normal_(release, 1.1, number, "noise").add_(total, alpha=1.0 if u is None else 0.9)
            if u is not None:
                release.add_(u, alpha=0.1)
            if with_memory:
                memory.write(release)
        gradients.set(release, LOT)
        optimizer.step()

    return step


def burst(step: Callable[[], None], count: int = BURST) -> float:
    """Median time of some steps in a row: training runs with warm caches, other contenders' leftovers are not its."""
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of interleaved bursts (default 12)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(EXAMPLES, INPUTS), torch.randint(CLASSES, (EXAMPLES,)))
    steps = (options.rounds + 1) * BURST
    contenders = {
        "plain SGD": plain_step(data),
        "dp-sgd, seeded": private_step(data, "dp-sgd", 0, steps),
        "dp-sgd, secure": private_step(data, "dp-sgd", None, steps),
        "fo-dp-sgd K=8, seeded": private_step(data, "fo-dp-sgd", 0, steps),
        "fo-dp-sgd K=8, secure": private_step(data, "fo-dp-sgd", None, steps),
        "fo-dp-sgd K=32, seeded": private_step(data, "fo-dp-sgd", 0, steps, window=32),
        "dp-sgd by hand": by_hand_step(data, with_memory=False),
        "fo-dp-sgd K=8 by hand": by_hand_step(data, with_memory=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for turn in range(options.rounds + 1):
        for name, step in order.sample(list(contenders.items()), len(contenders)):
            spent = burst(step)
            if turn:  # the first round is warm-up
                times[name].append(spent)
    rows = []
    for name, spent in times.items():
        ratios = sorted(mine / plain for mine, plain in zip(spent, times["plain SGD"], strict=True))
        tenth = len(ratios) // 10
        rows.append(
            {
                "step": name,
                "milliseconds": 1e3 * statistics.median(spent),
                "ratio": statistics.median(spent) / statistics.median(times["plain SGD"]),
                "paired_10": ratios[tenth],
                "paired_90": ratios[-1 - tenth],
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'step':24} {'ms':>7} {'ratio':>7}   middle 80% of paired ratios")
    for row in rows:
        span = f"{row['paired_10']:.2f} to {row['paired_90']:.2f}"
        print(f"{row['step']:24} {row['milliseconds']:7.2f} {row['ratio']:7.2f}   {span}")


if __name__ == "__main__":
    main()
