"""Per-example ascent (sharpness-aware training with one example each): h_i = ∇ℓ_i(θ + ρ·g_i/‖g_i‖).

Each h_i depends on example i and θ alone, so clipping it bounds what that example can change. The points
differ by example, so these gradients are materialised, a chunk of examples at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fodp.clipping.batches import Batch, batch_size, examples_in, plain, sizes_of, take, take_examples
from fodp.clipping.engine import Engine
from fodp.clipping.layers.uses import HELD_ENTRIES


class _Losses(nn.Module):
    """The loss of one example as a module, so that its parameters can be replaced."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.model = engine.model
        self._engine = [engine]  # in a list: not a submodule

    def forward(self, batch: Batch) -> Tensor:
        """The one loss."""
        return self._engine[0].loss_fn(self.model, batch)[0]


def ascended_gradients(engine: Engine, batch: Batch, rho: float) -> Iterator[Tensor]:
    """Each example's flat gradient at its own ascent point; vectorised where PyTorch can."""
    rows = batch_size(batch)
    if sizes_of(batch) is not None:  # a point for each owner, with as many rows as they have
        yield from _one_by_one(engine, batch, rho)
        return
    chunk = max(1, HELD_ENTRIES // engine.layout.size)
    for start in range(0, rows, chunk):
        part = take(batch, slice(start, start + chunk))
        try:
            yield from _vectorised(engine, plain(part), rho)
        except (RuntimeError, ValueError, NotImplementedError):
            yield from _one_by_one(engine, part, rho)


def _vectorised(engine: Engine, batch: Batch, rho: float) -> Tensor:
    losses = _Losses(engine)
    values = {f"model.{n}": p.detach() for n, p in zip(engine.layout.names, engine.layout.parameters, strict=True)}

    def loss(point: dict[str, Tensor], row: Batch) -> Tensor:
        return functional_call(losses, point, (_unsqueezed(row),))

    def ascended(row: Batch) -> list[Tensor]:
        first = grad(loss)(values, row)
        norm = torch.stack([g.square().sum() for g in first.values()]).sum().sqrt()
        scale = rho / norm.clamp(min=_least(norm))
        second = grad(loss)({name: values[name] + scale * first[name] for name in values}, row)
        return [second[name].flatten() for name in values]

    with torch.no_grad():
        parts = vmap(ascended, randomness="error")(batch)
    return torch.cat(parts, 1).to(engine.layout.dtype)


def _one_by_one(engine: Engine, batch: Batch, rho: float) -> Iterator[Tensor]:
    for i in range(examples_in(batch)):
        row = take_examples(batch, torch.tensor([i]))
        (first,) = engine.example_gradients(row)
        norm = first.norm().clamp(min=_least(first))
        yield from engine.example_gradients(row, ((1.0, first * (rho / norm)),))


def _least(norm: Tensor) -> float:
    """Squares of smaller norms run out of exponent: the direction of such a gradient is not known."""
    return torch.finfo(norm.dtype).tiny ** 0.5


def _unsqueezed(row: Any) -> Any:
    if isinstance(row, Tensor):
        return row.unsqueeze(0)
    if isinstance(row, dict):
        return {name: _unsqueezed(part) for name, part in row.items()}
    return type(row)([_unsqueezed(part) for part in row])
