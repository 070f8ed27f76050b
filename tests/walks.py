"""Counts the stations of four walks through the library by tracing them, not by a list:  python tests/walks.py

A walk enters functions of fodp. Its *stations* are the rooms that it enters, each counted once, in the order of first
entry: a file of the core (directly in `src/fodp`), or a folder, which is an engine behind a protocol. Helpers are no
stations: the folder `support`, and `errors`. Calls and files are counted whole.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp

ROOT = str(Path(fodp.__file__).parent) + "/"


class Walk(NamedTuple):
    """What a traced call has entered."""

    stations: list[str]
    files: list[str]
    calls: int


def traced(work: Callable[[], object]) -> Walk:
    """Run it, and note every function of fodp that is entered."""
    files: dict[str, None] = {}
    calls = 0

    def note(frame, event, arg):
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            calls += 1
            files[name.removeprefix(ROOT)] = None

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    rooms = [file.partition("/")[0].removesuffix(".py") for file in files]
    stations = dict.fromkeys(room for room in rooms if room not in ("support", "errors"))
    return Walk(list(stations), list(files), calls)


def problem():
    """A two-layer network, data, a loss of one number per example, and a plan of dp-sgd."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 8), torch.randint(2, (200,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    plan = fodp.Plan(
        sampling_rate=0.1, steps=50, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, method="dp-sgd",
        params=dict(lr=0.1),
    )  # fmt: skip
    return model, data, plan


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def a_batch() -> Walk:
    """One step of the Trainer, once the first looks are over."""
    model, data, plan = problem()
    trainer = fodp.Trainer(model, losses, data, plan)
    for _ in range(4):
        trainer.take_step()
    return traced(trainer.take_step)


def a_lot_of_ones_own() -> Walk:
    """One lot of `make_private`: drawn, differentiated, stepped."""
    model, data, plan = problem()
    from dataclasses import replace

    plan = replace(plan, params={})
    model, optimizer, loader = fodp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan)
    lots = iter(loader)

    def step():
        batch = next(lots)
        loader.backward(losses(model, batch))
        optimizer.step()

    for _ in range(4):
        step()
    return traced(step)


def a_noise_draw() -> Walk:
    """A release: a query gets its noise."""
    from fodp.noise import Streams
    from fodp.queries import Query
    from fodp.release import FreshNoise

    noise = FreshNoise(Streams.secure())
    noise.add(Query(torch.zeros(100), 1.0), 1.0, 0, "noise")
    return traced(lambda: noise.add(Query(torch.zeros(100), 1.0), 1.0, 1, "noise"))


def an_epsilon() -> Walk:
    """ε of a plan."""
    problem()[2].epsilon()
    plan = problem()[2]
    return traced(plan.epsilon)


WALKS = {
    "a batch, Trainer": (a_batch, 10),
    "a batch, own loop": (a_lot_of_ones_own, 10),
    "a noise draw": (a_noise_draw, 6),
    "an epsilon": (an_epsilon, 12),
}

if __name__ == "__main__":
    for title, (walk, most) in WALKS.items():
        found = walk()
        print(
            f"{title}: {len(found.stations)} stations (at most {most}), {found.calls} calls in {len(found.files)} files"
        )
        print("   ", " -> ".join(found.stations))
        print("   ", ", ".join(found.files))
