"""The checks of `fodp.testing`, by name: each trains on the small problem and yields what is wrong with a method."""

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fodp.accounting import Event, Phase, epsilon_of
from fodp.audit.tape import Tape, event_faults, promised, same
from fodp.errors import PrivacyError
from fodp.methods import METHODS
from fodp.options.table import known_names
from fodp.plan import Plan
from fodp.runs.scores import accuracy
from fodp.testing.problem import StopAfter, data, delete_one, flat, highest_rate, network, path, plan, record, trainer

# Adaptive clipping, a filter and another update at once: every method composes with them.
PARTS: Mapping[str, Any] = dict(
    quantile=0.5, count_noise=100.0, filter="doppler", filter_a=(-0.7, -0.2), filter_b=(0.05, 0.05), update="adamw",
    weight_decay=0.01,
)  # fmt: skip

Params = dict[str, Any]


def _events(method: str, params: Params) -> Iterator[str]:
    the_plan = plan(method, params, sampling_rate=0.25, noise_multiplier=1.1)
    found = record(the_plan)
    yield from event_faults(the_plan, found)
    yield from _turn_faults(the_plan, found)
    if found.releases:
        noise = torch.cat([row.flatten() for row in _innovations(the_plan, found)])
        size = noise.square().mean().item()
        if abs(size - 1) > 6 * math.sqrt(2 / len(noise)):
            yield f"noise of {math.sqrt(size):.2g} times the stated standard deviation was added"


def _turn_faults(the_plan: Plan, found: Tape) -> Iterator[str]:
    """Where records take turns: none may be in lots of two steps but whole rounds apart, or its releases overlap."""
    turns: dict[int, int] = {}
    for (step, _), lot in found.lots.items():
        for record_number in lot.records.tolist() if the_plan.algorithm.turns > 1 else ():
            turn = turns.setdefault(record_number, step % the_plan.algorithm.turns)
            if turn != step % the_plan.algorithm.turns:
                yield f"step {step}: a record was drawn whose turn it is not"


def _innovations(the_plan: Plan, found: Tape) -> Iterator[Tensor]:
    """The fresh noise of each release, in units of its standard deviation: correlation is undone."""
    bands = the_plan.algorithm.strategy()
    past: list[Tensor] = []
    for r in found.releases:
        noise = (r.result - r.value) / r.std
        if len(bands) == 1 or noise.dim() == 0:  # a count has fresh noise
            yield noise
        else:
            past = [noise, *past][: len(bands)]
            yield torch.stack([band * earlier for band, earlier in zip(bands, past, strict=False)]).sum(0)


def _events_with_parts(method: str, params: Params) -> Iterator[str]:
    yield from _events(method, {**PARTS, **params})
    parts, alone = (plan(method, p, noise_multiplier=1.1) for p in ({**PARTS, **params}, params))
    if promised(parts) != promised(alone):
        yield "adaptive clipping, a filter or an update changes the promised events"


def _bounds(method: str, params: Params) -> Iterator[str]:
    for noise in (1.0, 0.3):
        yield from delete_one(plan(method, params, sampling_rate=0.7, steps=6, noise_multiplier=noise))


def _bounds_with_parts(method: str, params: Params) -> Iterator[str]:
    yield from delete_one(plan(method, {**PARTS, **params}, sampling_rate=0.7, steps=6))


def _reported_epsilon(method: str, params: Params) -> Iterator[str]:
    the_plan = plan(method, params, sampling_rate=0.25, noise_multiplier=1.1)
    found, turns = record(the_plan).events(), the_plan.algorithm.turns
    spent = max(_spent(found[turn::turns], the_plan) for turn in range(turns))  # no record has two turns
    if not spent <= the_plan.epsilon() * (1 + 1e-6):
        yield f"the recorded events cost epsilon {spent:.6g}, the plan states {the_plan.epsilon():.6g}"


def _spent(events: list[tuple[float, float]], the_plan: Plan) -> float:
    # Rounded, so that equal events are composed at once: 1e-12 moves no digit that is compared.
    counts = Counter((round(rate, 12), round(z, 12)) for rate, z in events)
    phases = [Phase((Event(*event),), count) for event, count in counts.items()]
    return epsilon_of(phases, the_plan.delta, the_plan.accountant)


def _calibration(method: str, params: Params) -> Iterator[str]:
    public: Params = dict(steps=12, lot_size=24, clip_norm=1.0, delta=1e-5, accountant="rdp", seed=0)
    public["sampling_rate"] = highest_rate(method, params)
    found = Plan.calibrated(target_epsilon=5.0, method=method, params=params, **public)
    if not 0.95 * 5.0 <= found.epsilon() <= 5.0:
        yield f"calibrated to epsilon 5, the plan has {found.epsilon():.6g}"
    if found != Plan(noise_multiplier=found.noise_multiplier, method=method, params=params, **public):
        yield "calibration moves something else than the noise multiplier"


def _empty_lots(method: str, params: Params) -> Iterator[str]:
    """Whatever the data, the same run of noise alone comes out, and it comes to its end."""
    for given in (params, {**PARTS, **params}):
        rare = plan(method, given, sampling_rate=1e-9)
        first = trainer(rare)
        points = path(first)
        if not points.isfinite().all():
            yield "an empty lot makes parameters that are not finite"
        if len(points.unique(dim=0)) <= 1 + len(points) // 3:  # some may be rejected
            yield "an empty lot leaves the parameters as they were: it must be a step of noise alone"
        if not torch.equal(points, path(trainer(rare, dataset=data(5, seed=3)))):
            yield "with empty lots the run depends on the data"
        if first.step != rare.steps:
            yield f"{first.step} steps were taken of {rare.steps}"


def _resuming(method: str, params: Params) -> Iterator[str]:
    """Model, optimizer, method state, filter and clip norm must all be in the checkpoint."""
    for given in (params, {**PARTS, **params}):
        whole, first, second = (trainer(plan(method, given, steps=9)) for _ in range(3))
        whole.fit()
        first.callbacks.append(StopAfter(5))
        first.fit()
        with tempfile.TemporaryDirectory() as folder:
            first.save(Path(folder) / "c.pt")
            second.resume(Path(folder) / "c.pt")
        second.fit()
        parts = {
            "the parameters": (flat(second.model), flat(whole.model)),
            "the method's state": (second.session.state_dict(), whole.session.state_dict()),
            "the optimizer's state": (second.optimizer.state_dict(), whole.optimizer.state_dict()),
        }
        for part, (resumed, straight) in parts.items():
            if not same(resumed, straight):
                yield f"{part} of a resumed run are not those of a run without a break: is all state in state_dict?"


def _microbatches(method: str, params: Params) -> Iterator[str]:
    for given in (params, {**PARTS, **params}):
        whole, parts = trainer(plan(method, given)), trainer(plan(method, given), microbatch=5)
        if not torch.allclose(path(whole), path(parts), atol=1e-10):
            yield "examples in flight at a time (microbatch) change the run"
        if whole.session.clip_norm != parts.session.clip_norm:
            yield "examples in flight at a time (microbatch) change the clip norm"


def _secure(method: str, params: Params) -> Iterator[str]:
    """Secure streams refuse to give a step's numbers twice, so a method must name its draws apart."""
    for given in (params, {**PARTS, **params}):
        secure = plan(method, given, seed=None, steps=4)
        if torch.equal(path(trainer(secure)), path(trainer(secure))):
            yield "two secure runs made the same releases"


def _float64(method: str, params: Params) -> Iterator[str]:
    for dtype in (torch.float32, torch.float64):
        training = trainer(plan(method, params, steps=3), network(dtype), data(dtype=dtype))
        found = training.session.take_step().dtype
        if found != dtype:
            yield f"a model of {dtype} gets releases of {found}"


def _scheduled(method: str, params: Params) -> Iterator[str]:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))

    points = path(trainer(plan(method, params), scheduler=schedule))
    if torch.equal(points[0], points[2]):
        yield "the parameters do not move"
    if not torch.equal(points[2], points[-1]):
        yield "the parameters move although a scheduler has set the learning rate to zero"


def _chance(method: str, params: Params) -> Iterator[str]:
    """Ten clusters, easy to learn, of which a random network gets one or two right by chance."""
    labels = torch.arange(400) % 10
    noise = torch.randn(400, 10, generator=torch.Generator().manual_seed(2))
    problem = TensorDataset(3 * F.one_hot(labels, 10) + 0.5 * noise, labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Linear(10, 10)
    noisy = plan(method, params, steps=40, lot_size=200, noise_multiplier=1000.0)
    trainer(noisy, model, problem, public_score=lambda: 0.0).fit()
    reached = accuracy(model, problem)[0]
    if reached > 0.5:
        yield f"accuracy is {reached:.2f} under a noise multiplier of 1000, where only chance, 0.1, is left"


def _parameters(method: str, params: Params) -> Iterator[str]:
    own = [field.name for field in fields(METHODS[method].Params)]
    for name in ("leraning_rate", *own, *known_names()):
        try:
            plan(method, {**params, name: math.nan})
        except PrivacyError as refusal:
            if name not in str(refusal):
                yield f"the refusal of {name}=nan does not name it: {refusal}"
        else:
            yield f"{name}=nan is taken without a word: check every parameter in Params.__post_init__"


def _words(method: str, params: Params) -> Iterator[str]:
    row = METHODS[method]
    texts = {"summary": row.summary, "reference": row.reference, "noise_meaning": row.noise_meaning}
    yield from (f"{name} says nothing" for name, text in texts.items() if not text)
    if not row.__doc__:
        yield "there is no docstring: say what is released, and why its events are right"


# By name; each yields what it has against a method with these parameters.
CHECKS: Mapping[str, Callable[[str, Params], Iterator[str]]] = {
    "what is released is what was promised": _events,
    "also with adaptive clipping, a filter and AdamW": _events_with_parts,
    "deleting an example moves queries within their bounds and nothing else": _bounds,
    "also deleting one with adaptive clipping, a filter and AdamW": _bounds_with_parts,
    "the reported epsilon covers the recorded events": _reported_epsilon,
    "calibration meets the target and moves only the noise": _calibration,
    "empty lots are noise only, finite and counted": _empty_lots,
    "a run resumed in the middle goes on bit for bit": _resuming,
    "micro-batches change nothing": _microbatches,
    "a secure run draws everything once and never repeats": _secure,
    "releases have the precision of the model": _float64,
    "a learning rate of zero by schedule stops the model": _scheduled,
    "under a noise multiplier of 1000 accuracy falls to chance": _chance,
    "parameters that are unknown or no numbers are refused by name": _parameters,
    "the row of the table says what the method is": _words,
}
