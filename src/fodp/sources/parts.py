"""A lot in parts, for a loop of one's own: as many backward passes as it has parts, one step, one release."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.gradients import Chunk, ClipRule, Gradients
from fodp.layout import Layout
from fodp.sampling import Lot

PARTS = "go through all parts of the lot, one forward pass and one loss.backward() for each, then step once"


class GatheredChunk:
    """A lot whose parts were clipped and summed one after another: norms and one sum, never unclipped gradients.

    It is a chunk (`fodp.gradients.Chunk`) whose sum can be had with the very weights that the parts were given.
    """

    def __init__(self, rule: ClipRule, bound: float, layout: Layout, dtype: torch.dtype):
        self._rule, self._bound = rule, bound
        self._sum = torch.zeros(layout.size, dtype=dtype, device=layout.device)
        self._like = torch.zeros(0, dtype=layout.dtype, device=layout.device)
        self._parts: list[_Weighed] = []

    def add(self, gradients: Gradients) -> None:
        """Clip another part and add it to the sum; its passes may then be forgotten."""
        with torch.no_grad():
            for chunk in gradients.chunks:
                weighed, part = _Weighed(chunk), torch.empty_like(self._sum)
                self._rule.add(weighed, part, self._bound, False)
                self._sum.add_(part)
                self._parts.append(weighed.forgotten())

    @property
    def norms(self) -> Tensor:
        """Of all examples so far."""
        return torch.cat([self._like, *(part.norms for part in self._parts)])

    def finite(self, values: Tensor) -> Tensor:
        """The values, zero for every example whose gradient is not finite."""
        shares = values.split([len(part.norms) for part in self._parts]) if self._parts else []
        return torch.cat([values[:0], *(part.finite(own) for part, own in zip(self._parts, shares, strict=True))])

    def layer_norms(self, places: Sequence[int]) -> Tensor:
        """The norms of a layer's part, as far as clipping has asked for them."""
        return torch.cat([self._like, *(part.layer_norms(places) for part in self._parts)])

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """The sum, if these are the weights that were given."""
        self._refuse_others(None, weights)
        out.copy_(out + self._sum if accumulate else self._sum)

    def add_weighted_layer(self, out: Tensor, weights: Tensor, places: Sequence[int]) -> None:
        """With the last layer the sum of all of them, if these are the weights that were given."""
        self._refuse_others(tuple(places), weights)
        if self._parts and list(self._parts[0].weights)[-1] == tuple(places):
            out.add_(self._sum)

    def _refuse_others(self, places: tuple[int, ...] | None, weights: Tensor) -> None:
        given = [part.weights.get(places) for part in self._parts]
        if any(part is None for part in given):
            self._refuse()
        known = torch.cat([self._like, *(part for part in given if part is not None)])
        if not torch.equal(known, weights):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"a lot in parts is clipped to {self._bound:g} as it comes, and this method asks for another sum of it: "
            "leave microbatch out, or use fodp.Trainer"
        )


class _Weighed:
    """A chunk that notes which weights it was given."""

    def __init__(self, chunk: Chunk):
        self._chunk: Chunk | None = chunk
        self.norms = chunk.norms
        self.weights: dict[tuple[int, ...] | None, Tensor] = {}
        self._layers: dict[tuple[int, ...], Tensor] = {}
        self._ones = chunk.finite(torch.ones_like(chunk.norms))

    def finite(self, values: Tensor) -> Tensor:
        return values.where(self._ones > 0, values.new_zeros(()))

    def layer_norms(self, places: Sequence[int]) -> Tensor:
        if tuple(places) not in self._layers and self._chunk is not None:
            self._layers[tuple(places)] = self._chunk.layer_norms(places)
        return self._layers[tuple(places)]

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        assert self._chunk is not None
        self.weights[None] = weights
        self._chunk.add_weighted(out, weights, accumulate)

    def add_weighted_layer(self, out: Tensor, weights: Tensor, places: Sequence[int]) -> None:
        assert self._chunk is not None
        self.weights[tuple(places)] = weights
        self._chunk.add_weighted_layer(out, weights, places)

    def forgotten(self) -> "_Weighed":
        """Without the chunk itself."""
        self._chunk = None
        return self


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

    def __init__(
        self,
        lot: Lot,
        at_once: int,
        hand_out: Callable[[Lot, Tensor], Any],
        refuse_incomplete: Callable[[], None],
        take_in: Callable[[Lot], None],
    ):
        self._lot, self._hand_out, self._refuse_incomplete, self._take_in = lot, hand_out, refuse_incomplete, take_in
        self._places = list(torch.arange(len(lot.indices)).split(at_once)) or [torch.arange(0)]
        self._given, self._part = 0, None  # type: int, Lot | None
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise ConfigurationError("this lot was stepped, and is over: take the next one from the loader")
        self._gather()
        if self._given == len(self._places):
            raise StopIteration
        places = self._places[self._given]
        self._given += 1
        lot = self._lot
        self._part = Lot(lot.step, lot.rate, lot.name, lot.indices[places], lot.records[places])
        return self._hand_out(self._part, places)

    def finish(self) -> None:
        """Raise unless every part was handed out and had its backward pass."""
        if self._given < len(self._places):
            raise ConfigurationError(f"optimizer.step() before the lot's last part: {PARTS}")
        self._gather()

    def end(self) -> None:
        """The lot is over."""
        self._over = True

    def _gather(self) -> None:
        """Clip and sum the part that is out."""
        if self._part is not None:
            self._refuse_incomplete()
            part, self._part = self._part, None
            self._take_in(part)
