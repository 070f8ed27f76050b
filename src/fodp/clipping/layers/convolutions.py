"""The per-example gradients of a convolution's weight."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight, conv3d_weight

from fodp.clipping.layers.rounding import gram
from fodp.clipping.layers.uses import Dense, Outer, chunks, mask, side_by_side, square_sums, wide

_WORTH_A_PRODUCT = 16  # channels: with fewer, many small products cost more than unfolding


class Convolution(Outer):
    """A convolution's weight: an outer product over unfolded patches, unfolded chunk by chunk.

    `images` is padded already, [B, channels, *pixels] with two or three dimensions of pixels; `back` is the gradient of
    the output.
    """

    def __init__(
        self,
        images: Tensor,
        back: Tensor,
        groups: int,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
    ):
        self._images = wide(images)
        self._back_image = wide(back)
        self._groups, self._kernel, self._stride, self._dilation = groups, kernel, stride, dilation
        self.back = self._back_image.flatten(2).unflatten(1, (groups, -1)).mT
        self._held = None
        self.slack = None

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Unfolded patches, [b, groups, positions, fan_in]."""
        images = self._images[start:stop]
        if len(self._kernel) == 2:
            patches = F.unfold(images, self._kernel, self._dilation, 0, self._stride)
        else:
            patches = self._unfolded(images)
        by_group: Tensor = patches.unflatten(1, (self._groups, -1))
        return by_group.mT

    def _unfolded(self, images: Tensor) -> Tensor:
        """As F.unfold, in any number of dimensions: [b, channels times kernel, positions]."""
        images = images.contiguous()
        steps = images.stride()[2:]
        within = [hole * step for hole, step in zip(self._dilation, steps, strict=True)]
        between = [stride * step for stride, step in zip(self._stride, steps, strict=True)]
        shape = (*images.shape[:2], *self._kernel, *self._back_image.shape[2:])
        seen = images.as_strided(shape, (*images.stride()[:2], *within, *between), images.storage_offset())
        return seen.reshape(len(images), self._groups * self.fan_in, -1)

    def gram(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """From products of pixels, each of which belongs to many patches: fewer of them, and nothing is unfolded."""
        positions, pixels = self._back_image.shape[2:], self._images.shape[2:]
        if pixels.numel() ** 2 > math.prod(self._kernel) * positions.numel() ** 2:  # large strides leave pixels out
            return super().gram(start, stop, dtype)
        images = self._images[start:stop].to(dtype).flatten(2).unflatten(1, (self._groups, -1))
        by_pixel, terms = gram(images.mT)
        products = by_pixel.unflatten(3, pixels).unflatten(2, pixels)
        total: Tensor | None = None
        for place in itertools.product(*map(range, self._kernel)):
            seen = tuple(
                slice(at * hole, at * hole + (count - 1) * step + 1, step)
                for at, hole, count, step in zip(place, self._dilation, positions, self._stride, strict=True)
            )
            part = products[(slice(None), slice(None), *seen, *seen)]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total.flatten(2 + len(pixels)).flatten(2, 1 + len(pixels)), terms + math.prod(self._kernel) - 1

    @property
    def fan_in(self) -> int:
        """Channels of a group times kernel size."""
        return self._images.shape[1] // self._groups * math.prod(self._kernel)

    def _held_norms(self, entries: int) -> Tensor:
        """Place by place in the kernel, where every row of pixels is a slice of the image: nothing is unfolded."""
        count, channels, *pixels = self._images.shape
        fan_out, *positions = self._back_image.shape[1:]
        if self._groups > 1 or set(self._stride) != {1} or channels < _WORTH_A_PRODUCT:
            return super()._held_norms(entries)
        # Back-signals in rows as long as the image's, up to the last of them.
        steps = [math.prod(pixels[dim + 1 :]) for dim in range(len(pixels))]
        length = 1 + sum((each - 1) * step for each, step in zip(positions, steps, strict=True))
        flat = self._images.reshape(count, channels, -1)
        self._held = held = self._to_hold(count, *self._kernel, fan_out, channels)
        for start, stop in chunks(count, entries):
            spread = held.new_zeros(stop - start, fan_out, positions[0], *pixels[1:])
            inside: list[Any] = [slice(each) for each in positions[1:]]
            spread[(..., slice(None), *inside)] = self._back_image[start:stop]
            back = spread.flatten(2)[..., :length]
            for place in itertools.product(*map(range, self._kernel)):
                first = sum(at * hole * step for at, hole, step in zip(place, self._dilation, steps, strict=True))
                seen = flat[start:stop, :, first : first + length].to(held.dtype)
                chosen: tuple[Any, ...] = (slice(start, stop), *place)
                torch.bmm(back, seen.mT, out=held[chosen])
        return square_sums(held)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """The library's own weight gradient, of re-weighted back-signals: no unfolding."""
        dims = len(self._kernel)
        if self._held is not None and self._held.dim() == 3 + dims:  # by place in the kernel
            total = out.new_empty(self._held.shape[1:])
            Dense(self._held).add_weighted(total, weights, False)
            _give(out, total.movedim((-2, -1), (0, 1)), accumulate)
            return
        if self._held is not None:
            Dense(self._held).add_weighted(out, weights, accumulate)
            return
        shape = (
            self.back.shape[1] * self.back.shape[3],
            self._images.shape[1] // self._groups,
            *self._kernel,
        )
        weighted = self._back_image * weights.view(-1, *[1] * (1 + dims)).to(self._back_image.dtype)
        of_library: Any = conv2d_weight if dims == 2 else conv3d_weight
        total = of_library(
            self._images.to(out.dtype),
            shape,
            weighted.to(out.dtype),
            self._stride,
            0,
            self._dilation,
            self._groups,
        )
        _give(out, total, accumulate)

    def masked(self, keep: Tensor) -> "Convolution":
        """Zero both factors, and what is held of them: it is summed as it was measured."""
        zeroed = self.with_rows(lambda images: mask(images, keep), lambda back: mask(back, keep))
        zeroed._held = None if self._held is None else mask(self._held, keep)
        return zeroed

    def with_rows(self, images: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> "Convolution":
        """The same with other examples, made of the images and the back-signals of these."""
        return Convolution(
            images(self._images), back(self._back_image), self._groups, self._kernel, self._stride, self._dilation
        )

    def images(self) -> tuple[Tensor, Tensor]:
        """Back-signals and inputs, with their channels in the second dimension."""
        return self._back_image, self._images

    def grouped(self, copies: int) -> "Outer":
        """Copies of one example lie side by side as further positions; still unfolded chunk by chunk."""
        return Grouped(self, copies)


class Grouped(Outer):
    """A convolution over several images of each example."""

    def __init__(self, of: Convolution, copies: int):
        self.of, self.copies = of, copies
        self.back = side_by_side(of.back, copies) / copies
        self._held = None
        self.slack = None

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Unfolded patches of all images of some examples."""
        last = None if stop is None else stop * self.copies
        return side_by_side(self.of.inputs(start * self.copies, last), self.copies)

    @property
    def fan_in(self) -> int:
        """As of one image."""
        return self.of.fan_in

    def masked(self, keep: Tensor) -> "Grouped":
        """Zero both factors, and what is held of them: it is summed as it was measured."""
        zeroed = Grouped(self.of.masked(keep.repeat_interleave(self.copies)), self.copies)
        zeroed._held = None if self._held is None else mask(self._held, keep)
        return zeroed


def _give(out: Tensor, total: Tensor, accumulate: bool) -> None:
    total = total.reshape(out.shape)
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)
