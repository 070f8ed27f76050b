"""One flat vector over the trainable parameters, in `model.parameters()` order."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn

from fodp.errors import ConfigurationError


class Layout:
    """Where each trainable parameter lies in the flat vector.

    Releases, offsets and memories are all laid out like this; frozen parameters have no place in it.
    """

    def __init__(self, model: nn.Module):
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ConfigurationError(
                "the model has no trainable parameter: set requires_grad=True on what should be trained"
            )
        uninitialised = [name for name, p in trainable.items() if isinstance(p, nn.UninitializedParameter)]
        if uninitialised:
            raise ConfigurationError(f"{uninitialised[0]} is a lazy parameter: run the model once on dummy input first")
        self.names = tuple(trainable)
        self.parameters = tuple(trainable.values())
        self.size = sum(p.numel() for p in self.parameters)
        self.device = self.parameters[0].device
        # Half-precision parameters still get float32 releases: norms and noise need the range.
        is_double = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype = torch.float64 if is_double else torch.float32
        counts = [p.numel() for p in self.parameters]
        starts = accumulate([0, *counts[:-1]])
        self._places = [(p.shape, _strides(p.shape), at) for p, at in zip(self.parameters, starts, strict=True)]

    @contextmanager
    def in_double(self) -> Iterator[None]:
        """Vectors are float64 here, as for a model that is float64 for a while."""
        before, self.dtype = self.dtype, torch.float64
        try:
            yield
        finally:
            self.dtype = before

    def empty(self) -> Tensor:
        """A fresh flat vector, not filled."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        """A fresh flat vector of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The flat vector seen as one tensor per parameter; writing to them writes to it."""
        if flat.shape != (self.size,):
            raise ConfigurationError(f"expected a flat vector of {self.size} entries, got shape {tuple(flat.shape)}")
        if flat.stride(0) != 1 and self.size > 1:
            raise ConfigurationError("a flat vector must be contiguous")
        begin = flat.storage_offset()
        return [flat.as_strided(shape, strides, begin + at) for shape, strides, at in self._places]

    def read(self) -> Tensor:
        """A copy of the parameters as one flat vector."""
        return torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self.parameters])

    def write(self, flat: Tensor) -> None:
        """Set the parameters from one flat vector."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views(flat), strict=True):
                parameter.copy_(view)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class GradientBuffer:
    """The `.grad` of every parameter, in one buffer of its own.

    Never aliased with a release: people clip and zero gradients in place.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._buffer = layout.zeros()
        self._views = layout.views(self._buffer)
        self._places = [view.data_ptr() for view in self._views]

    def set(self, release: Tensor, divisor: float) -> None:
        """Give every parameter its part of release / divisor."""
        torch.mul(release, 1 / divisor, out=self._buffer)
        for view, place in zip(self._views, self._places, strict=True):
            if view.data_ptr() != place:
                # model.to(...) moves gradients too, and leaves the same tensors with the last step's numbers elsewhere.
                self._views = self._layout.views(self._buffer)
                break
        for parameter, view in zip(self._layout.parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
