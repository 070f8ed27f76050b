"""A method's step on a made-up example: whether its lots may come in parts is known before any lot is drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fodp.gradients import HERE, Gradients, Points
from fodp.queries import Query
from fodp.sampling import Lot
from fodp.session import Session
from fodp.sources.parts import GatheredChunk
from fodp.step import Step


def refuse_other_sums(session: Session) -> None:
    """Raise for a method that asks for more than the clipped sum of its lot: parts are summed before it asks."""
    method, plan = session.method, session.plan
    method.step(TrialStep(session, 0), method.init(plan, session.source.layout.size))


class TrialStep(Step):
    """A step without a lot. It draws nothing, adds no noise, and leaves no trace in the session."""

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """An empty lot."""
        nobody = torch.arange(0)
        lot = Lot(self.number, self._session.lots.rate if rate is None else rate, f"mask{name}", nobody, nobody)
        self.lots.append(lot)
        self.spent.append(None)
        return lot

    def gradients(self, lot: Lot, at: Points = HERE) -> Gradients:
        """Those of an example twice as long as the clip norm, held as a part is held."""
        session = self._session
        layout, rule = session.source.layout, session.rule
        held = GatheredChunk(rule, session.clip_norm, layout, layout.dtype)
        held.add(Gradients([_Example(2 * session.clip_norm, layout.dtype, layout.device)], layout, lot, rule))
        return Gradients([held], layout, lot, rule)

    def release(self, query: Query, std: float) -> Tensor:
        """Zeros."""
        return query.empty(query.dtype).zero_()

    def noised(self, query: Query, std: float, name: str) -> Tensor:
        """Zeros: of the count that adapts the clip norm."""
        return query.empty(query.dtype).zero_()

    def uniform(self, count: int, name: str) -> Tensor:
        """Zeros."""
        return torch.zeros(count)


class _Example:
    """A chunk of one example, whose gradient is as long as given and is never added."""

    def __init__(self, norm: float, dtype: torch.dtype, device: torch.device):
        self.norms = torch.full((1,), norm, dtype=dtype, device=device)

    def finite(self, values: Tensor) -> Tensor:
        return values

    def layer_norms(self, places: Sequence[int]) -> Tensor:
        return self.norms

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        out.zero_()

    def add_weighted_layer(self, out: Tensor, weights: Tensor, places: Sequence[int]) -> None:
        pass
