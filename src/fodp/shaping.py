"""The shape of a run's queries, step by step: public factors and maps, and where they come from.

A fixed shape is made of the parameters' own shapes. The shape `kronecker` looks at the present model, which is made of
releases, through made-up inputs; `transcript` at earlier releases and at the noise that is known to be in them. None
sees a record, a lot, or a release before its noise.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fodp._checks import ConfigurationError
from fodp.clipping.batches import Batch, Keyed, batch_size, take
from fodp.clipping.engine import Engine
from fodp.clipping.fallback import Unseparable
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.uses import Use
from fodp.clipping.maps import RANK, ROWS, WHOLE, Factor, Kronecker, Side, factors_of, whitening
from fodp.draws import Source, generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.methods.parts.shapes import Shape
from fodp.noise import Streams
from fodp.queries import Query
from fodp.synthetic import zipf_chances

SameOnAllRanks = Callable[[Callable[[], Tensor], Callable[[], Tensor]], Tensor]
_AT_ONCE = 64  # made-up records in one pass


class Shaping(Protocol):
    """The factors of each step."""

    @property
    def current(self) -> tuple[Factor, ...]:
        """Those that were asked for last."""

    def factors(self, step: int) -> tuple[Factor, ...]:
        """One for each parameter, in this step."""

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """A release, not yet mapped back, of a query of this shape, with its noise."""

    def state_dict(self) -> dict[str, Any] | None:
        """What another process needs to go on; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state."""


class FixedShape:
    """The same public numbers in every step."""

    def __init__(self, weights: Sequence[float]):
        self.current: tuple[Factor, ...] = tuple(weights)

    def factors(self, step: int) -> tuple[Factor, ...]:
        """Those numbers."""
        return self.current

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any] | None:
        """Nothing is kept."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing was kept."""


class KroneckerShape:
    """G^(-1/2)·(·)·A^(-1/2) of each layer, with second moments A of its inputs and G of its back-signals.

    Both are those of `sample(step)`, public records, in the model as it is at step 0 and at every `shape_every`-th step
    after it. The mean square of a map is that of the fan-in factor, which is its case of one number. A parameter whose
    gradients are no outer products, and no vector, keeps that number.
    """

    def __init__(self, shape: Shape, engine: Engine, sample: Callable[[int], Batch], same: SameOnAllRanks):
        self._shape, self._sample, self._same = shape, sample, same
        self._engine = Engine(engine.model, engine.loss_fn)  # the run's own shall not learn from made-up records
        shapes = [tuple(p.shape) for p in engine.layout.parameters]
        self._plain = shape.weights(shapes)
        self._factors: tuple[Factor, ...] | None = None
        self._made_at = -1

    @property
    def current(self) -> tuple[Factor, ...]:
        """The maps in force; before there are any the plain numbers, whose mean square they have."""
        return self._plain if self._factors is None else self._factors

    def factors(self, step: int) -> tuple[Factor, ...]:
        """Made anew at the steps of the public schedule."""
        every = self._shape.shape_every
        due = 0 if not every else step // every * every
        if step == due and self._made_at != due:
            made = self._made(step)
            self._factors = tuple(self._shared(factor) for factor in made)
            self._made_at = due
        return self.current

    def _made(self, step: int) -> list[Factor]:
        layout = self._engine.layout
        rows: list[list[Any]] = [[] for _ in layout.parameters]
        tables = [False] * len(rows)
        source = Source(Streams.seeded(0), step, "synthetic")
        foreign = foreign_state()
        try:
            with torch.no_grad(), generators_kept(), self._engine.exactly():
                sample = self._sample(step)
                count = batch_size(sample)
                for start in range(0, count, _AT_ONCE):
                    part = slice(start, min(start + _AT_ONCE, count))
                    keyed = Keyed(take(sample, part), torch.arange(part.start, part.stop), source)
                    for place, use in enumerate(self._engine.recorded(keyed)):
                        rows[place].append(_few(use, layout.parameters[place].shape))
                        tables[place] |= isinstance(use, Rows)
        except Unseparable as reason:
            warnings.warn(
                f"shape='kronecker' finds no inputs and back-signals of layers here, and takes fan-in: {reason}",
                stacklevel=2,
            )
            return list(self._plain)
        finally:
            restore_foreign(foreign)
        shapes = [tuple(parameter.shape) for parameter in layout.parameters]
        given = zip(rows, shapes, self._plain, tables, strict=True)
        return [self._map(found, shape, b, table) for found, shape, b, table in given]

    def _map(self, rows: list[Any], shape: tuple[int, ...], b: float, table: bool) -> Factor:
        if not rows or any(found is None for found in rows):
            return b
        damping, dtype = self._shape.shape_damping, self._engine.layout.dtype
        sides: list[Side | None] = []
        for column in zip(*rows, strict=True):
            known = [part for part in column if part is not None]
            sides.append(_in_type(whitening(torch.cat(known), damping), dtype) if known else None)
        left, right = sides
        if table:  # words by how often they come
            relative = zipf_chances(shape[0]) * shape[0]
            gains = (relative + damping).rsqrt()
            gains = gains / gains.square().mean().sqrt()
            left = Side(gains.to(self._engine.layout.device, dtype))
        fits = all(
            side is None or side.basis is None or len(side.basis) == size
            for side, size in zip((left, right), shape, strict=False)
        )
        return Kronecker(shape, left, right, b) if fits else b

    def _shared(self, factor: Factor) -> Factor:
        """The first rank's, for all: another processor rounds otherwise, and ranks must not drift apart."""
        if not isinstance(factor, Kronecker):
            return factor
        same = self._same
        sides = []
        for side in (factor.left, factor.right):
            parts = [] if side is None else [same(lambda t=t: t, lambda t=t: t) for t in side.tensors()]  # type: ignore[misc]
            sides.append(None if side is None else Side(*parts))
        return Kronecker(factor.shape, sides[0], sides[1], factor.factor)

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Nothing is learned from releases but by the model that they make."""

    def state_dict(self) -> dict[str, Any] | None:
        """The maps in force: of a model that has since moved on."""
        kept = [
            None
            if not isinstance(factor, Kronecker)
            else [None if side is None else side.tensors() for side in (factor.left, factor.right)]
            for factor in self._factors or ()
        ]
        return {"made_at": self._made_at, "sides": kept if self._factors is not None else None}

    def bytes_when_full(self, size: int) -> int:
        """Of all maps, before there are any."""
        shapes = [shape for parameter in self._engine.layout.parameters for shape in parameter.shape[:2]]
        width = self._engine.layout.dtype.itemsize
        return sum(n * (n if n <= WHOLE else RANK) * width for n in shapes)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over the maps in force."""
        assert state is not None
        self._made_at = int(state["made_at"])
        self._factors = None
        if state["sides"] is not None:
            shapes = [tuple(p.shape) for p in self._engine.layout.parameters]
            self._factors = tuple(
                b
                if sides is None
                else Kronecker(shape, *(None if parts is None else Side(*parts) for parts in sides), b)
                for sides, shape, b in zip(state["sides"], shapes, self._plain, strict=True)
            )


def _few(use: Use | None, shape: Sequence[int]) -> tuple[Tensor | None, Tensor | None] | None:
    """Rows of both factors, few enough to be kept from pass to pass."""
    found = factors_of(use, shape)
    if found is None:
        return None
    left, right = (None if part is None else _thinned(part) for part in found)
    return left, right


def _thinned(rows: Tensor) -> Tensor:
    quota = max(1, ROWS * _AT_ONCE // 256)
    return rows if len(rows) <= quota else rows[torch.linspace(0, len(rows) - 1, quota).long()].clone()


def _in_type(side: Side, dtype: torch.dtype) -> Side:
    return Side(*(part.to(dtype) for part in side.tensors()))


class TranscriptShape:
    """Factors that give every block its share of a gradient, from what earlier releases say of the blocks' energies.

    A release y of a query with bound C has ‖y_l‖² = ‖signal_l‖² + D_l·σ²C² on the average, and σ²C² is known. Divided
    by C² and by the squared factor of its step, the difference estimates the energy of block l; a geometric memory of
    about `shape_memory` steps averages it. What lies within two standard deviations of nothing counts as those two.
    Until `shape_warmup` releases were seen the factors are those of fan-in, and their geometric mean stays that of
    fan-in.
    """

    def __init__(self, shape: Shape, shapes: Sequence[tuple[int, ...]], same: SameOnAllRanks):
        self._shape, self._shapes, self._same = shape, [tuple(s) for s in shapes], same
        self._plain = shape.weights(self._shapes)
        # Rows of matrices are blocks of their own if that is asked for.
        self._rows = [s[0] if shape.shape_blocks == "row" and len(s) > 1 else 1 for s in self._shapes]
        sizes = [math.prod(s) // rows for s, rows in zip(self._shapes, self._rows, strict=True)]
        self._sizes = torch.cat([torch.full((r,), float(n)) for n, r in zip(sizes, self._rows, strict=True)]).double()
        self._energy = torch.zeros_like(self._sizes)
        self._variance = torch.zeros_like(self._sizes)
        self._weight, self._seen, self._at = 0.0, 0, -1
        self._current = self._fan_in()

    @property
    def current(self) -> tuple[Factor, ...]:
        """The factors of this step."""
        found: list[Factor] = []
        for part, rows, shape in zip(self._current.split(self._rows), self._rows, self._shapes, strict=True):
            found.append(Kronecker(shape, Side(part), None) if rows > 1 else float(part[0]))
        return tuple(found)

    def _fan_in(self) -> Tensor:
        """The factors to begin with, one for each block."""
        pairs = zip(self._plain, self._rows, strict=True)
        return torch.cat([torch.full((rows,), b, dtype=torch.float64) for b, rows in pairs])

    def factors(self, step: int) -> tuple[Factor, ...]:
        """From what was released before this step."""
        if step != self._at:
            self._at = step
            self._current = self._estimated()
        return self.current

    def _estimated(self) -> Tensor:
        fan_in, shape = self._fan_in(), self._shape
        if self._seen < shape.shape_warmup:
            return fan_in
        noise = self._variance.sqrt() / self._weight
        energy = torch.maximum(self._energy / self._weight, 2 * noise).clamp(min=1e-30)
        wanted = (self._sizes**shape.shape_share / energy).sqrt()
        scale = (fan_in.log().mean() - wanted.log().mean()).exp()
        return (wanted * scale).clamp(shape.shape_floor, shape.shape_ceiling)

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Remember the energies of a release beyond its noise."""
        if not query.bound or release.numel() != int((self._sizes).sum()):
            return
        parts = release.split([math.prod(shape) for shape in self._shapes])
        squares = [p.view(rows, -1).double().square().sum(1) for p, rows in zip(parts, self._rows, strict=True)]
        variance = (std / query.bound) ** 2
        # The first rank's sums, for all: another processor rounds otherwise, and ranks must not drift apart.
        energies = self._same(lambda: torch.cat(squares).cpu(), lambda: torch.empty_like(self._sizes))
        found = energies / query.bound**2 - self._sizes * variance
        spread = 2 * self._sizes * variance**2
        keep = 1 - 1 / self._shape.shape_memory
        self._energy = keep * self._energy + found / self._current**2
        self._variance = keep**2 * self._variance + spread / self._current**4
        self._weight = keep * self._weight + 1
        self._seen += 1

    def state_dict(self) -> dict[str, Any] | None:
        """Made of releases and public numbers."""
        return {
            "energy": self._energy,
            "variance": self._variance,
            "weight": self._weight,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over what was remembered; the next step's factors follow from it."""
        assert state is not None
        self._energy, self._variance = state["energy"].clone(), state["variance"].clone()
        self._weight, self._seen, self._at = float(state["weight"]), int(state["seen"]), -1


def start(shape: Shape, engine: Engine, sample: Callable[[int], Batch] | None, same: SameOnAllRanks) -> Shaping:
    """The shape of a run. `sample(step)` makes public records; None: the run has no loss of its own to show them to."""
    shapes = [tuple(parameter.shape) for parameter in engine.layout.parameters]
    if shape.shape == "kronecker":
        if sample is None:
            raise ConfigurationError(
                "shape='kronecker' shows made-up records to the model and its loss, and in a loop of your own the loss "
                "is yours: use fodp.Trainer, or another shape"
            )
        return KroneckerShape(shape, engine, sample, same)
    if shape.shape == "transcript":
        return TranscriptShape(shape, shapes, same)
    return FixedShape(shape.weights(shapes))
