"""Writes tests/reference_runs.json: what seeded runs release, step by step, which no rebuilding may change.

    python tests/reference_runs.py          (on purpose only: where the file changes, seeded runs of users change)

Each run is a method, its parameters and a way to train: the Trainer, a loop of one's own, two ranks. After every step
the release, which the optimizer finds in `.grad`, and the weights are noted twice: as a hash, which holds bit for bit
on a machine like the one that wrote the file, and as three numbers, which hold on every machine up to rounding.
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import ConfigurationError, kernels
from fodp.callbacks import Callback
from fodp.methods import METHODS
from ranks_for_tests import in_ranks

FILE = Path(__file__).with_name("reference_runs.json")
STEPS, ROWS = 6, 48
SEEDS = (0, 1)


class Case(NamedTuple):
    """One run."""

    door: str
    method: str
    params: dict[str, Any]
    seed: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012  of the Trainer
    plan: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        said = [f"{k}={v}" for part in (self.params, self.options, self.plan) for k, v in part.items()]
        return " ".join([self.door, self.method, *said, f"seed={self.seed}"])


_FILTER = dict(filter="doppler", filter_a=(-0.7, -0.2), filter_b=(0.05, 0.05))
# Options: each alone or with one other, with the method that is most its own.
_VARIANTS: tuple[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("dp-sgd", dict(quantile=0.5, count_noise=20.0), {}, {}),
    ("dp-sgd", dict(_FILTER, update="adamw", weight_decay=0.01), {}, {}),
    ("dp-sgd", dict(filter="momentum"), {}, {}),
    ("dp-sgd", dict(filter="fractional", update="adambc"), {}, {}),
    ("dp-sgd", dict(clip="per-layer", momentum=0.9), {}, {}),
    ("dp-sgd", dict(clip="normalised", lr_schedule="linear", lr_warmup=2), {}, {}),
    ("dp-sgd", dict(shape="fan-in", width=4, lr="auto"), {}, {}),
    ("dp-sgd", dict(shape="kronecker"), {}, {}),
    ("dp-sgd", dict(shape="transcript", shape_warmup=2), {}, {}),
    ("dp-sgd", dict(shape=(0.5, 1.0, 1.0, 2.0), clip_schedule=((0, 1.0), (3, 0.5))), {}, {}),
    ("dp-sgd", dict(noise_schedule=((0, 1.0), (3, 2.0)), average="ema", average_decay=0.5), {}, {}),
    ("dp-sgd", dict(rate_rule="transcript", average="tail", average_share=0.5), {}, {}),
    ("dp-sgd", {}, {}, dict(exact_noise=True)),
    ("dp-sgd", {}, dict(microbatch=3), {}),
    ("dp-sgd", {}, dict(engine="loop"), {}),
    ("dp-sgd", {}, dict(augment="jitter", copies=2), {}),
    ("dp-sgd", {}, dict(owners="pairs"), dict(unit="person", records_per_person=2)),
    ("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0, shape="fan-in", width=4), {}, {}),
    ("fo-dp-sgd", dict(update="adamwbc", weight_decay=0.01), {}, {}),
    ("fo-noise", dict(bands=2, shape="fan-in", width=4, lr="auto", average="ema"), {}, {}),
    ("fo-noise", dict(bands=2), dict(owners="pairs"), dict(unit="person", records_per_person=2)),
)


def cases() -> Iterator[Case]:
    """All runs of the file."""
    for method in METHODS:
        for seed in SEEDS:
            yield Case("trainer", method, {}, seed)
            yield Case("own loop", method, {}, seed)
        yield Case("two ranks", method, {})
    for method, params, options, plan in _VARIANTS:
        yield Case("trainer", method, params, 0, options, plan)
        if not options:
            yield Case("own loop", method, params, 0, options, plan)


def noted(case: Case) -> list[list[Any]]:
    """For each step: a hash and three numbers of the release and the weights; a loop may be refused instead."""
    work = {"trainer": _trained, "own loop": _looped, "two ranks": _on_ranks}[case.door]
    return work(case)


def machine() -> str:
    """What must be the same for equal bits: the processor, the packages that compute, and the compiled kernels."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    parts = (name, torch.__version__, torch.backends.cpu.get_cpu_capability(), np.__version__)
    return " | ".join((*parts, "kernels" if kernels.library() is not None else "no kernels"))


def _plan(case: Case) -> fodp.Plan:
    rate = 0.25 if case.method == "fo-noise" else 0.4
    params = {**({} if "lr" in case.params or case.door == "own loop" else {"lr": 0.1}), **case.params}
    if case.method == "fo-noise":
        params = {"bands": 2, **params}
    return fodp.Plan(
        **dict(sampling_rate=rate, steps=STEPS, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5,
               seed=case.seed, accountant="rdp") | case.plan, method=case.method, params=params,
    )  # fmt: skip


def _problem() -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(ROWS, 6, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    return model, TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())


def _losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _jitter(batch: Any) -> Any:
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


class _Notes(Callback):
    def __init__(self) -> None:
        self.lines: list[list[Any]] = []

    def on_step(self, trainer: Any) -> None:
        self.lines.append(_line(trainer.model))


def _line(model: nn.Module) -> list[Any]:
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.blake2b(gradient.numpy().tobytes() + weights.numpy().tobytes(), digest_size=8).hexdigest()
    ways = torch.arange(1, len(gradient) + 1, dtype=torch.float64).sin()
    numbers = (gradient.double().norm(), gradient.double() @ ways, weights.double() @ ways)
    return [digest, *(float(f"{number:.6g}") for number in numbers)]


def _trained(case: Case) -> list[list[Any]]:
    model, data = _problem()
    options = dict(case.options)
    if "augment" in options:
        options["augment"] = _jitter
    if "owners" in options:
        options["owners"] = [f"person {i // 2}" for i in range(ROWS)]
    public = tuple(tensor[:10] for tensor in _problem()[1].tensors)

    def score() -> float:
        model.eval()
        with torch.no_grad():
            found = float(_losses(model, public).mean())
        model.train()
        return found

    if case.method == "sa-dpsgd":
        options["public_score"] = score
    notes = _Notes()
    fodp.Trainer(model, _losses, data, _plan(case), callbacks=[notes], **options).fit()
    return notes.lines


def _looped(case: Case) -> list[list[Any]]:
    model, data = _problem()
    lines: list[list[Any]] = []
    try:
        model, optimizer, loader = fodp.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, _plan(case)
        )
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            lines.append(_line(model))
    except ConfigurationError:  # what wants more than one gradient in a step, or an update of its own
        return [["refused"]]
    return lines


def _on_ranks(case: Case) -> list[list[Any]]:
    found: list[Any] = in_ranks(2, lambda rank: _trained(case))
    assert all(isinstance(lines, list) for lines in found), found
    assert not found[1]  # callbacks are the first rank's
    return list(found[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = [f"{json.dumps(str(case))}: {json.dumps(noted(case))}" for case in cases()]
    head, runs = f'{{"machine": {json.dumps(machine())}, "runs": {{', ",\n".join(lines)
    FILE.write_text(f"{head}\n{runs}\n}}}}\n", encoding="utf-8")
    print(f"{len(lines)} runs on {machine()}")
