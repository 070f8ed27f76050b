"""Counts the stations of four walks through the library by tracing them, not by a list:  python tests/walks.py

A walk enters functions of fodp. A *station* is a room that a reader of the core
must know of to follow the walk, counted
once, in the order of first entry:

* a file of the core (directly in `src/fodp`), whoever calls it;
* an engine (a folder) that is entered from the core, from a method, or from outside. An engine that only another engine
  calls is behind that one's protocol: keystreams under noise, draws under clipping.

Not counted are `support` and `errors`, and the core's files that hold numbers and do nothing: a `Query`, a `Lot`, a
`Layout`, a `Plan`. Calls and files are counted whole, with everything that engines do inside.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp

ROOT = str(Path(fodp.__file__).parent) + "/"
HELPERS = ("support", "errors")
VALUES = ("queries", "sampling", "layout", "plan")


class Walk(NamedTuple):
    """What a traced call has entered."""

    stations: list[str]
    files: list[str]
    calls: int


class Most(NamedTuple):
    """The most that a walk may have. `calls` and `files` are what was reached; beside them is what to aim for."""

    stations: int
    calls: int
    files: int


def traced(work: Callable[[], object]) -> Walk:
    """Run it, and note every function of fodp that is entered."""
    files: dict[str, None] = {}
    stations: dict[str, None] = {}
    calls = 0

    def note(frame, event, arg):
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            calls += 1
            files[name.removeprefix(ROOT)] = None
            if is_station(name, caller_of(frame)):
                stations[room(name)] = None

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Walk(list(stations), list(files), calls)


def caller_of(frame: FrameType) -> str | None:
    """The file of fodp from which a function was called, perhaps through PyTorch; None: from outside."""
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(ROOT):
        above = above.f_back
    return None if above is None else above.f_code.co_filename


def room(file: str) -> str:
    """A file of the core without its ending, or the folder of an engine."""
    return file.removeprefix(ROOT).partition("/")[0].removesuffix(".py")


def is_core(file: str) -> bool:
    """Whether a file lies directly in `src/fodp`."""
    return "/" not in file.removeprefix(ROOT)


def is_station(file: str, caller: str | None) -> bool:
    """Whether entering this file from that one is a station of a walk."""
    if room(file) in (*HELPERS, *VALUES):
        return False
    return is_core(file) or caller is None or is_core(caller) or room(caller) == "methods"


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
    "a batch, Trainer": (a_batch, Most(10, 202, 37)),  # aim: 160 calls in 16 files
    "a batch, own loop": (a_lot_of_ones_own, Most(10, 312, 41)),  # aim: 160 calls in 16 files
    "a noise draw": (a_noise_draw, Most(6, 18, 7)),
    "an epsilon": (an_epsilon, Most(12, 36, 7)),
}

if __name__ == "__main__":
    for title, (walk, most) in WALKS.items():
        found = walk()
        print(f"{title}: {len(found.stations)} stations, {found.calls} calls in {len(found.files)} files; {most}")
        print("   ", " -> ".join(found.stations))
        print("   ", ", ".join(found.files))
