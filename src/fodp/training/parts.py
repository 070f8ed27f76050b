"""A lot in parts, for a loop of one's own: as many backward passes as it has parts, one step, one release."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fodp._checks import ConfigurationError
from fodp.clipping.gathering import Gathered
from fodp.queries import Query
from fodp.sampling import Lot
from fodp.training.recorder import TRAINER

if TYPE_CHECKING:
    from fodp.training.loop import _LoopRun

PARTS = "go through all parts of the lot, one forward pass and one loss.backward() for each, then step once"


class LotParts:
    """One Poisson lot in batches of at most `microbatch` records; an empty lot is one empty batch.

        for lot in loader:
            for inputs, labels in lot:
                loader.backward(loss_fn(model(inputs), labels))  # one loss per example
            optimizer.step()

    A loss that you reduce yourself is reduced over its part, as declared; do not divide it by the number of parts.
    Every example's gradient is clipped before it is added to those of earlier parts. How many parts there are is
    private.
    """

    def __init__(self, run: "_LoopRun", lot: Lot, at_once: int, blocks: tuple[float, ...] | None):
        self._run, self._lot = run, lot
        self._places = list(torch.arange(len(lot.indices)).split(at_once)) or [torch.arange(0)]
        self._given, self._part = 0, None  # type: int, Lot | None
        self._blocks = blocks
        self._gathered = Gathered(run.engine, (lot.indices,), lot=lot, bound=run.clip_norm)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._run.holds(self):
            raise ConfigurationError("this lot was stepped, and is over: take the next one from the loader")
        self._gather()
        if self._given == len(self._places):
            raise StopIteration
        places = self._places[self._given]
        self._given += 1
        self._part = Lot(
            self._lot.step, self._lot.rate, self._lot.name, self._lot.indices[places], self._lot.records[places]
        )
        return self._run.hand_out_part(self._lot, self._part, places)

    def finish(self) -> None:
        """Raise unless every part was handed out and had its backward pass."""
        if self._given < len(self._places):
            raise ConfigurationError(f"optimizer.step() before the lot's last part: {PARTS}")
        self._gather()

    def gradients(self, blocks: Sequence[float] | None) -> Gathered:
        """What was gathered, for the method's questions."""
        if (None if blocks is None else tuple(blocks)) != self._blocks:
            raise ConfigurationError(f"the method asks for other gradients than in its first step: {TRAINER}")
        return self._gathered

    def _gather(self) -> None:
        """Clip and sum the part that is out, and forget its passes."""
        if self._part is None:
            return
        engine = self._run.engine
        with engine.unheard():
            engine.refuse_incomplete()
            part, self._part = self._part, None
            try:
                self._gathered.add(self._run.part_gradients(part, self._lot, self._blocks))
            except BaseException:  # perhaps half of it is in the sum, and it must not get there twice
                self._run.abandon_lot()
                raise
            engine.start_between_parts()


def blocks_of(run: "_LoopRun") -> tuple[float, ...] | None:
    """The public factors that the method scales gradients with, asked in a step on nothing; refuses what has no parts.

    A lot in parts is summed before the method asks, so it must ask for the clipped sum of its one lot.
    """
    found: list[tuple[float, ...] | None] = []
    size, lot, refusal = (
        run.engine.layout.size,
        object(),
        f"{run.plan.method} asks for more than a clipped sum of its lot",
    )

    def clipped_sum(bound: float) -> Query:
        if bound != run.clip_norm:
            raise ConfigurationError(f"{refusal}, which cannot be had in parts: leave microbatch out, or {TRAINER}")
        return Query(torch.zeros(size), bound, lot)

    def other(*_: Any, **__: Any) -> Any:
        raise ConfigurationError(f"{refusal}, which cannot be had in parts: leave microbatch out, or {TRAINER}")

    def gradients(_: object, at: Any = None, blocks: Sequence[float] | None = None) -> Any:
        if at is not None:
            other()
        found.append(None if blocks is None else tuple(blocks))
        return SimpleNamespace(clipped_sum=clipped_sum, sum=other, norm_sum=other, count=other, scaled=other, lot=lot)

    def zeros(*_: Any, **__: Any) -> Tensor:
        return torch.zeros(size)

    context = SimpleNamespace(
        plan=run.plan, step=0, clip_norm=run.clip_norm, shapes=run.shapes, draw=lambda *_, **__: lot,
        gradients=gradients, adapt_clip=lambda _gradients, _query, std: std, release=zeros, parameters=zeros,
        noise_variance=lambda: 0.0, unclipped_fraction=lambda: 0.5, uniform=lambda count, _name: torch.zeros(count),
        public_score=lambda: 0.0,
    )  # fmt: skip
    run.method.step(context, run.method.init(run.plan, size))
    if len(found) != 1:
        other()
    return found[0]
