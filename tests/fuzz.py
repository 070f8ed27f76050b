"""`make fuzz`: search for the inputs that let one example move a clipped sum the furthest beyond its bound.

Random starts from float patterns that are hard on sums (positions that cancel, one large entry and many whose squares
are just too small to count beside it, denormals, huge and equal numbers), then hill climbing: the worst found so far is
changed a little, and kept if it got worse. Losses hand out the back-signals as they are given, so both factors of a
gradient are in the hands of the search, and a lot and its parts see the same numbers.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fodp.clipping import FLOAT_TOLERANCE, Engine, Gradients
from fodp.clipping.batches import Keyed, take
from fodp.clipping.layers import uses
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.rounding import gamma
from fodp.clipping.layers.segments import Ragged
from fodp.clipping.layers.uses import Outer, Product
from fodp.draws import Source
from fodp.noise import Streams
from fodp.queries import Query
from gradients_for_tests import gradients_of

_DOUBLE_SUMS = 1e-12  # of float64 sums in the search itself


def paired(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose back-signal is the second half of the batch."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


class Twice(nn.Module):
    """A layer that is called on both halves of its positions: one weight, two uses."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part) for part in x.chunk(2, 1)], 1)


class Attention(nn.Module):
    """A module without a rule."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Apply(nn.Module):
    """Parts by name and a function over them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def by_addmm() -> nn.Module:
    """As GPT-2 has it: the weight lies the other way."""
    return Apply(
        lambda m, x: torch.addmm(m.bias, x.flatten(0, 1), m.weight).unflatten(0, x.shape[:2]),
        weight=nn.Parameter(torch.randn(200, 60)),
        bias=nn.Parameter(torch.zeros(60)),
    )


def over_time(kind: Any) -> nn.Module:
    return Apply(lambda m, x: m.layer(x)[0], layer=kind(8, 6, batch_first=True))


def scaled() -> nn.Module:
    """Parameters that no layer holds, spread out over the lot and over positions."""
    parts = dict(scale=nn.Parameter(torch.randn(24)), shift=nn.Parameter(torch.randn(1, 12, 1)))
    return Apply(lambda m, x: x * (1 + m.scale) + m.shift, **parts)


def shared_positions() -> nn.Module:
    """The same rows of a table for every example."""
    table = nn.Parameter(torch.randn(8, 24))
    return Apply(lambda m, x: x * nn.functional.embedding(torch.arange(12) // 3, m.table)[None], table=table)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30))
    model[0].requires_grad_(False)
    return model


def tied_table() -> nn.Module:
    table = nn.Embedding(30, 24)
    output = nn.Linear(24, 30, bias=False)
    output.weight = table.weight
    return nn.Sequential(table, output)


@dataclass(frozen=True)
class Kind:
    """A model, the shape of one example, and what else is set."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0  # inputs are that many tokens, drawn from few
    held: bool = True  # whether small gradients are held between norms and sums
    copies: int = 1
    people: bool = False  # the copies are one person's records, and others have two each
    given: bool = True  # whether all factors are: no forward pass in between that rounds by the size of a lot


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(300, 64), (300,)),
    "linear, wide": Kind(lambda: nn.Linear(20_000, 3), (20_000,)),
    "linear, copies": Kind(lambda: nn.Linear(90, 80), (90,), copies=3),
    "positions, ghost": Kind(lambda: nn.Linear(512, 96), (12, 512)),
    "positions, long ghost": Kind(lambda: nn.Linear(3072, 128), (32, 3072)),
    "positions, many ghost": Kind(lambda: nn.Linear(256, 256), (100, 256)),
    "positions, ghost, copies": Kind(lambda: nn.Linear(200, 100), (4, 200), copies=3),
    "linear, people": Kind(lambda: nn.Linear(90, 80), (90,), copies=5, people=True),
    "positions, ghost, people": Kind(lambda: nn.Linear(200, 100), (4, 200), copies=3, people=True),
    "positions, direct, people": Kind(lambda: nn.Linear(24, 16), (15, 24), copies=3, people=True, held=False),
    "conv2d, people": Kind(lambda: nn.Conv2d(3, 5, 3), (3, 6, 6), copies=3, people=True),
    "conv2d, ghost, people": Kind(lambda: nn.Conv2d(64, 48, 3), (64, 4, 4), copies=3, people=True),
    "embedding, people": Kind(lambda: nn.Embedding(40, 32), (), tokens=12, copies=3, people=True),
    "layer norm, people": Kind(lambda: nn.LayerNorm(48), (4, 48), copies=3, people=True, given=False),
    "positions, held": Kind(lambda: nn.Linear(24, 16), (40, 24)),
    "positions, direct": Kind(lambda: nn.Linear(24, 16), (40, 24), held=False),
    "called twice": Kind(lambda: Twice(nn.Linear(200, 60)), (8, 200)),
    "conv1d": Kind(lambda: nn.Conv1d(6, 8, 3, padding=1), (6, 20)),
    "conv2d": Kind(lambda: nn.Conv2d(3, 5, 3), (3, 8, 8)),
    "conv2d, by place": Kind(lambda: nn.Conv2d(16, 4, 3), (16, 7, 7)),
    "conv2d, direct": Kind(lambda: nn.Conv2d(3, 5, 3, stride=2), (3, 9, 9), held=False),
    "conv2d, groups": Kind(lambda: nn.Conv2d(6, 6, 3, groups=3, stride=2, padding=1), (6, 8, 8)),
    "conv2d, ghost": Kind(lambda: nn.Conv2d(64, 48, 3), (64, 5, 5)),
    "conv2d, groups, ghost": Kind(lambda: nn.Conv2d(64, 96, 3, groups=2), (64, 4, 4)),
    "embedding": Kind(lambda: nn.Embedding(40, 32), (), tokens=30),
    "embedding, one word": Kind(lambda: nn.Embedding(2, 64), (), tokens=100),
    "tied table": Kind(tied_table, (), tokens=12, given=False),
    "tied table, cross terms": Kind(tied_table, (), tokens=12, given=False, held=False),
    "layer norm": Kind(lambda: nn.LayerNorm(48), (20, 48), given=False),
    "group norm": Kind(lambda: nn.GroupNorm(4, 16), (16, 5, 5), given=False),
    "frozen first": Kind(frozen_first, (12,), given=False),
    "attention": Kind(lambda: Attention(8), (5, 8), given=False),
    "addmm": Kind(by_addmm, (8, 200)),
    "scale and shift": Kind(scaled, (12, 24)),
    "shared positions": Kind(shared_positions, (12, 24)),
    "embedding bag": Kind(lambda: nn.EmbeddingBag(40, 32), (), tokens=30),
    "rms norm": Kind(lambda: nn.RMSNorm(48), (20, 48), given=False),
    "prelu": Kind(lambda: nn.PReLU(16), (16, 5, 5)),
    "conv3d": Kind(lambda: nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "conv3d, direct": Kind(lambda: nn.Conv3d(2, 3, 2, stride=2), (2, 4, 5, 5), held=False),
    "conv3d, by place": Kind(lambda: nn.Conv3d(16, 3, 2), (16, 3, 4, 4)),
    "transposed convolution": Kind(lambda: nn.ConvTranspose2d(3, 4, 2), (3, 5, 5)),
    "transposed, direct": Kind(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), (3, 5, 5), held=False),
    "lstm": Kind(lambda: over_time(nn.LSTM), (7, 8), given=False),
    "gru": Kind(lambda: over_time(nn.GRU), (7, 8), given=False),
    "weight norm": Kind(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(30, 20)), (30,), given=False),
    "weight norm, positions": Kind(
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 5, 3)), (6, 9), given=False
    ),
    "spectral norm": Kind(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(30, 20)).eval(), (30,), given=False
    ),
    "two layers": Kind(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10)), (6, 20), given=False),
}


# ---- float patterns ------------------------------------------------------------------------------------------


def _normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng)


def _equal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.ones(shape) * (1 + torch.rand((), generator=rng))


def _scale(shape: tuple[int, ...], rng: torch.Generator, low: float, high: float) -> Tensor:
    return torch.pow(2.0, low + (high - low) * torch.rand(shape, generator=rng))


def _one_and_many(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Squares just below half a unit in the last place of the first: one by one they vanish, together they count."""
    small = _scale((), rng, -12.6, -11.9)
    values = small * (torch.randint(0, 2, shape, generator=rng) * 2 - 1).float()
    values[..., 0] = 1.0
    return values


def _cancelling(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Positions in pairs that nearly cancel, if the other factor is nearly equal in all of them."""
    values = torch.randn((1, *shape[1:]), generator=rng).expand(shape).clone()
    values[1::2] *= -1
    return values + _scale((), rng, -24.0, 0.0) * torch.randn(shape, generator=rng)


def _alternating(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """One and many; the many change their sign from position to position. What `_opposed` leaves of them is the norm,
    and it is just what products of positions with themselves and with each other lose, in opposite directions."""
    values = _one_and_many((1, *shape[1:]), rng).expand(shape).clone()
    values[1::2, ..., 1:] *= -1
    return values


def _opposed(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """The same vector with changing sign, and a little more of one sign than of the other."""
    values = torch.randn((1, *shape[1:]), generator=rng).expand(shape).clone()
    values[1::2] *= -1 + _scale((), rng, -8.0, 0.0)
    return values


def _alike(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Nearly the same at all positions, with one large entry."""
    values = _one_and_many((1, *shape[1:]), rng).expand(shape).clone()
    return values + _scale((), rng, -24.0, -6.0) * torch.randn(shape, generator=rng)


def _orders(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * _scale(shape, rng, -30.0, 30.0)


def _denormal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * _scale((), rng, -149.0, -120.0)


def _huge(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * _scale((), rng, 40.0, 95.0)


def _sparse(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * (torch.rand(shape, generator=rng) < 0.1)


PATTERNS = [
    _normal, _equal, _one_and_many, _cancelling, _alternating, _opposed, _alike, _orders, _denormal, _huge, _sparse
]  # fmt: skip
_PAIRS = [(_alternating, _opposed), (_alike, _cancelling), (_one_and_many, _one_and_many), (_equal, _cancelling)]


# ---- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One lot whose first example is in question; `others` come after it."""

    kind: str
    dtype: torch.dtype
    inputs: Tensor
    back: Tensor
    clip: float  # of the first example's norm
    blocks: bool = False


@dataclass(frozen=True)
class Rounding:
    """What one example changes beyond its contribution, by the rounding of sums, in units of the bound; and stated."""

    float32: float
    exact: float
    stated: float
    exact_stated: float


def start(kind: str, rng: torch.Generator, pick: random.Random) -> Case:
    """A fresh case from the patterns."""
    about, others = KINDS[kind], pick.choice([0, 0, 0, 0, 1, 3, 20])
    rows = (1 + others) * about.copies
    model = about.model()
    patterns = pick.choice(_PAIRS) if pick.random() < 0.5 else (pick.choice(PATTERNS), pick.choice(PATTERNS))
    if about.tokens:
        words = next(
            model.modules() if isinstance(model, nn.Embedding | nn.EmbeddingBag) else iter(model[0].modules())
        ).num_embeddings
        inputs = torch.randint(0, pick.choice([1, 2, words]), (rows, about.tokens), generator=rng)
    else:
        inputs = _rows(rows, about.shape, patterns[0], rng, pick)
    with torch.no_grad():
        back = _rows(rows, tuple(model(inputs[:1]).shape[1:]), patterns[1], rng, pick)
    return Case(
        kind, pick.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16]), inputs, back,
        pick.choice([0.5, 0.9, 0.999999, 0.01, 1e-6]), pick.random() < 0.2,
    )  # fmt: skip


def _rows(count: int, shape: tuple[int, ...], pattern: Any, rng: torch.Generator, pick: random.Random) -> Tensor:
    """The example in question, and others that are like it or plain."""
    positions = shape if len(shape) > 1 else (1, *shape)
    kinds = [pattern, *(pick.choice([pattern, _normal]) for _ in range(count - 1))]
    return torch.stack([kind(positions, rng).view(shape) for kind in kinds])


def mutated(case: Case, rng: torch.Generator, pick: random.Random) -> Case:
    """A little changed: single bits, entries, positions, sizes, the clip norm."""
    how = pick.randrange(10)
    if how == 0:
        return replace(case, clip=min(1.0, case.clip * pick.choice([0.5, 0.9, 1.1, 2.0])))
    name = "back" if not case.inputs.is_floating_point() or pick.random() < 0.5 else "inputs"
    values = getattr(case, name).clone()
    first = values[0].view(values.shape[1], -1) if values.dim() > 2 else values[0].view(1, -1)
    some = torch.rand(first.shape, generator=rng) < pick.choice([0.02, 0.3, 1.0])
    if how in (1, 2):  # last bits
        bits = first.view(torch.int32)
        bits += some * torch.randint(-2, 3, first.shape, generator=rng, dtype=torch.int32)
    elif how == 3:
        first[some] *= pick.choice([-1.0, 0.5, 2.0, 0.0, 1.001, 0.999])
    elif how == 4:  # one position
        first[pick.randrange(len(first))] *= pick.choice([-1.0, 0.5, 2.0, 0.0, 1.01, 0.99])
    elif how == 5:  # one like another
        first[pick.randrange(len(first))] = first[pick.randrange(len(first))].clone() * pick.choice([1.0, -1.0])
    elif how == 6:
        first += pick.choice([1e-1, 1e-3, 1e-5]) * torch.randn(first.shape, generator=rng) * some * first.abs().mean()
    elif how == 7:  # what is large beside many others
        first[:, 0] *= pick.choice([0.9, 1.1, 2.0, 0.5])
    elif how == 8:  # how well positions cancel
        first[1::2] *= pick.choice([0.9, 1.1, 0.99, 1.01])
    else:
        values *= pick.choice([0.5, 2.0, 1.0001, 1e3, 1e-3])
    return replace(case, **{name: values}) if values.isfinite().all() else case


# ---- what a case does ----------------------------------------------------------------------------------------


class Lot:
    """A case at work: sums of its examples, clipped to a share of the first one's norm."""

    def __init__(self, case: Case):
        self.about, self.case = KINDS[case.kind], case
        self.engine = _engine(case.kind, case.dtype)
        self.batch = case.inputs if self.about.tokens else case.inputs.to(case.dtype), case.back.to(case.dtype)
        self.one, self.others = slice(0, self.about.copies), slice(self.about.copies, None)
        self.copies = 1 if self.about.people else self.about.copies
        self.whole: Any = self.batch
        if self.about.people:
            rows = torch.arange(len(self.batch[0]))
            owners = torch.where(rows < self.about.copies, -1, (rows - self.about.copies) // 2)
            self.whole = Keyed(self.batch, rows, Source(Streams.seeded(0), 0, "fuzz"), owners, summed=case.blocks)

    def asked(self, rows: slice, exact: bool = False) -> Gradients:
        rows_taken, factors = take(self.whole, rows), self.factors if self.case.blocks else None
        return gradients_of(self.engine, rows_taken, copies=self.copies, factors=factors, exact=exact)

    @property
    def factors(self) -> list[float]:
        return [0.5 + i % 3 for i in range(len(self.engine.layout.names))]

    def contribution(self) -> float | None:
        """Of the first example, in units of the bound; None where it counts as not finite or has no gradient."""
        with _settings(self.case):
            gradients = self.asked(self.one)
            norm = _norms(gradients)[0]
            if not norm > 1e-8:  # smaller ones are not clipped by less
                return None
            self.bound = self.case.clip * norm
            return float(_value(gradients.clipped_sum(self.bound)).norm()) / self.bound

    def rounding(self) -> Rounding | None:
        """After `contribution`. None where there are no others, or a forward pass that rounds by the size of a lot."""
        if not self.about.given or len(self.batch[0]) == self.about.copies:
            return None
        apart, stated = [], []
        with _settings(self.case):
            for exact in (False, True):
                parts = [self.asked(rows, exact) for rows in (slice(None), self.others, self.one)]
                lot, rest, alone = (_value(part.clipped_sum(self.bound)) for part in parts)
                apart.append(float((lot - rest - alone).norm()) / self.bound)
                stated.append(_stated(self, exact))
        return Rounding(*apart, *stated)


@cache
def _engine(kind: str, dtype: torch.dtype) -> Engine:
    torch.manual_seed(0)
    engine = Engine(KINDS[kind].model().to(dtype), paired)
    engine._checked = True
    return engine


def _stated(lot: Lot, exact: bool) -> float:
    """The rounding of sums (docs/threat-model.md), in units of C: 2·γ_n·Σ_i w_i·m_i, and what is too small to round."""
    dtype = torch.float64 if exact else lot.engine.layout.dtype
    gradients = lot.asked(slice(None))
    weights = (lot.bound / torch.tensor(_norms(gradients), dtype=torch.float64)).clamp(max=1).nan_to_num(0)
    blocks = gradients.factors or (1.0,) * len(lot.engine.layout.names)
    squares, terms = torch.zeros(len(weights), dtype=torch.float64), 1
    for use, b in zip(lot.engine.recorded(lot.whole, copies=lot.copies), blocks, strict=True):
        if use is not None:
            mass, positions = _mass(use)
            squares, terms = squares + (b * mass).square(), max(terms, positions)
    smallest = torch.finfo(dtype).tiny * lot.engine.layout.size
    mass = float((weights * squares.sqrt()).nan_to_num(0, 0, 0).sum())
    return (2 * gamma(terms * len(weights) + 2, dtype) * mass + smallest) / lot.bound


def _mass(use: Any) -> tuple[Tensor, int]:
    """Σ of norms of what is summed in an example, and how many terms that are."""
    if isinstance(use, Ragged):
        parts = [_mass(part) for _, part in use.parts]
        return use._spread([mass for mass, _ in parts]), max(terms for _, terms in parts)
    if isinstance(use, Outer):
        lengths = (t.double().norm(dim=3) for t in (use.inputs(), use.back))
        left, right = lengths
        return (left * right).sum(2).square().sum(1).sqrt(), use.back.shape[2]
    if isinstance(use, Rows):
        return use.back.double().norm(dim=2).sum(1), use.back.shape[1]
    if isinstance(use, Product):
        return use.inputs.double().norm(dim=1) * use.back.double().norm(dim=1), 1
    return use.gradients.double().flatten(1).norm(dim=1), 1


def _norms(gradients: Gradients) -> list[float]:
    seen: list[Tensor] = []
    gradients.sum(bound=1.0, weight=lambda norms: seen.append(norms) or norms)
    return torch.cat(seen).tolist()


def _value(query: Query) -> Tensor:
    """In float64, with what an exact sum has beyond float32."""
    return sum(factor * term.double() for factor, term in query._terms)  # type: ignore[union-attr, return-value]


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    held = uses.HELD_ENTRIES
    uses.HELD_ENTRIES = held if KINDS[case.kind].held else 1
    try:
        yield
    finally:
        uses.HELD_ENTRIES = held


# ---- the search ----------------------------------------------------------------------------------------------


@dataclass
class Worst:
    """The furthest that one kind got: contributions by the type of the model, roundings in all."""

    alone: dict[torch.dtype, float] = field(default_factory=dict)
    rounding: float = 0.0
    exact_rounding: float = 0.0
    share: float = 0.0  # of the stated rounding
    tried: int = 0
    fault: str = ""


def search(kind: str, seed: int, worst: Worst, stop: Callable[[], bool]) -> None:
    """One random start and a climb from there, short or long; everything follows from the kind and the seed."""
    rng, pick = torch.Generator().manual_seed(seed), random.Random(seed)
    climb = pick.choice([2, 2, 2, 40])  # tries without gain
    case, best = start(kind, rng, pick), -math.inf
    candidate, without_gain, gains = case, 0, 0
    while without_gain < climb and not worst.fault:
        lot = Lot(candidate)
        alone = lot.contribution()
        worst.tried += 1
        without_gain += 1
        if alone is not None and not alone <= best:
            _note(worst, lot, alone, gains % 8 == 0, f"--kind {kind!r} --seed {seed}")
            best, case, without_gain, gains = alone, candidate, 0, gains + 1
        if stop():
            return
        candidate = mutated(case, rng, pick)


def _note(worst: Worst, lot: Lot, alone: float, whole: bool, repeat: str) -> None:
    dtype = lot.case.dtype
    worst.alone[dtype] = max(worst.alone.get(dtype, 0.0), alone)
    if not alone <= 1 + FLOAT_TOLERANCE:
        worst.fault = f"one example contributes {alone:.9f} of its bound: {repeat}"
    found = lot.rounding() if whole else None
    if found is None:
        return
    worst.exact_rounding = max(worst.exact_rounding, found.exact)
    if dtype != torch.float64:
        worst.rounding = max(worst.rounding, found.float32)
    share = max(found.float32 / (found.stated + _DOUBLE_SUMS), found.exact / (found.exact_stated + _DOUBLE_SUMS))
    worst.share = max(worst.share, share)
    if not share <= 1:
        worst.fault = f"the rounding of sums is {share:.3g} of what is stated: {repeat}"


def fuzz(seconds: float, kinds: list[str], seed: int = 0, report: Callable[[str], None] = print) -> dict[str, Worst]:
    """Search each kind for its share of the time, until something is found."""
    found, begin = {}, time.monotonic()
    for place, kind in enumerate(kinds):
        end = begin + seconds * (place + 1) / len(kinds)
        found[kind] = climbed(kind, seed, lambda _, end=end: time.monotonic() > end)
        report(line(kind, found[kind]))
    return found


def climbed(kind: str, seed: int, enough: Callable[[Worst], bool]) -> Worst:
    """Search one kind from one random start after the other, until it is enough or something is found."""
    worst, round_ = Worst(), 0
    while (not enough(worst) and not worst.fault) or not round_:
        search(kind, seed + round_, worst, lambda: enough(worst))
        round_ += 1
    return worst


def line(kind: str, worst: Worst) -> str:
    """What was found of one kind."""
    alone = "  ".join(f"{str(dtype)[6:]} {value:.9f}" for dtype, value in sorted(worst.alone.items(), key=str))
    return (
        f"{kind:24s} {worst.tried:6d} tries, of C: {alone}; rounding of sums {worst.rounding:.1e}, exact "
        f"{worst.exact_rounding:.1e} ({worst.share:.2g} of what is stated)"
    )


def main() -> int:
    """Search; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="of the first random start; each start adds one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [options.kind] if options.kind else list(KINDS)
    found = fuzz(options.seconds, kinds, options.seed, lambda text: print(text, flush=True))
    for worst in found.values():
        if worst.fault:
            print(f"beyond the bound: {worst.fault}")
    faults = sum(bool(worst.fault) for worst in found.values())
    largest = max(value for worst in found.values() for value in worst.alone.values())
    print(f"the largest contribution is {largest:.9f} of C, tolerance {FLOAT_TOLERANCE:g}; {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
