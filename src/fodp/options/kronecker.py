"""Maps from the second moments of what layers are given and get back, over public records in the present model."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fodp.clipping import maps
from fodp.clipping.batches import Batch, Keyed, batch_size, take
from fodp.clipping.engine import Engine
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.uses import Use
from fodp.clipping.maps import RANK, ROWS, WHOLE, Factor, Side, factors_of, whitening
from fodp.draws import Source, generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.noise import Streams
from fodp.options.made_up import zipf_chances
from fodp.options.scaling import Kronecker
from fodp.queries import Query
from fodp.support import checks

SameOnAllRanks = Callable[[Callable[[], Tensor], Callable[[], Tensor]], Tensor]
_AT_ONCE = 64  # records in one pass


class KroneckerScaling:
    """G^(-1/2)·(·)·A^(-1/2) of each layer, with second moments A of its inputs and G of its back-signals.

    Both are those of `sample(step)`, public records, in the model as it is at step 0 and at every `shape_every`-th step
    after it. The mean square of a map is that of the fan-in factor, which is its case of one number. A parameter whose
    gradients are no outer products, and no vector, keeps that number.
    """

    def __init__(self, shape: Kronecker, engine: Engine, sample: Callable[[int], Batch], same: SameOnAllRanks):
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
            with torch.no_grad(), generators_kept(), self._engine.exactly(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the loop, which the run's own engine speaks of
                sample = self._sample(step)
                count = batch_size(sample)
                for start in range(0, count, _AT_ONCE):
                    part = slice(start, min(start + _AT_ONCE, count))
                    keyed = Keyed(take(sample, part), torch.arange(part.start, part.stop), source)
                    for place, use in enumerate(self._engine.uses(keyed) or ()):
                        rows[place].append(_few(use, layout.parameters[place].shape))
                        tables[place] |= isinstance(use, Rows)
        finally:
            restore_foreign(foreign)
        if not any(rows):
            checks.warn(
                "shape='kronecker' cannot see what this model's layers are given and get back, and takes the shape "
                "fan-in: layers must keep the examples apart, in their first dimension"
            )
            return list(self._plain)
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
        wanted = self._shape.shape_sides
        outputs, inputs = (1, 0) if table else (0, 1)  # a table's rows are words, which it is given
        if wanted != "both":
            sides[outputs if wanted == "inputs" else inputs] = None
        left, right = sides
        if table and wanted != "outputs":  # words by how often they come
            relative = zipf_chances(shape[0]) * shape[0]
            gains = (relative + damping).rsqrt()
            gains = gains / gains.square().mean().sqrt()
            left = Side(gains.to(self._engine.layout.device, dtype))
        fits = all(
            side is None or side.basis is None or len(side.basis) == size
            for side, size in zip((left, right), shape, strict=False)
        )
        return maps.Kronecker(shape, left, right, b) if fits else b

    def _shared(self, factor: Factor) -> Factor:
        """The first rank's, for all: another processor rounds otherwise, and ranks must not drift apart."""
        if not isinstance(factor, maps.Kronecker):
            return factor
        same = self._same
        sides = []
        for side in (factor.left, factor.right):
            parts = [] if side is None else [same(lambda t=t: t, lambda t=t: t) for t in side.tensors()]  # type: ignore[misc]
            sides.append(None if side is None else Side(*parts))
        return maps.Kronecker(factor.shape, sides[0], sides[1], factor.factor)

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Nothing is learned from releases but by the model that they make."""

    def state_dict(self) -> dict[str, Any] | None:
        """The maps in force: of a model that has since moved on."""
        kept = [
            None
            if not isinstance(factor, maps.Kronecker)
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
            given = zip(state["sides"], shapes, self._plain, strict=True)
            self._factors = tuple(b if sides is None else _loaded(sides, shape, b) for sides, shape, b in given)


def _loaded(sides: Sequence[list[Tensor] | None], shape: tuple[int, ...], b: float) -> maps.Kronecker:
    left, right = (None if parts is None else Side(*parts) for parts in sides)
    return maps.Kronecker(shape, left, right, b)


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
