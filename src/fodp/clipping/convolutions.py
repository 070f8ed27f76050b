"""The per-example gradients of a convolution's weight."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from fodp.clipping.rounding import gram
from fodp.clipping.uses import Dense, Outer, chunks, mask, square_sums, wide

_WORTH_A_PRODUCT = 16  # channels: with fewer, many small products cost more than unfolding


class Convolution(Outer):
    """A convolution's weight: an outer product over unfolded patches, unfolded chunk by chunk.

    `images` is padded already, [B, channels, height, width]; `back` is the gradient of the output.
    """

    def __init__(
        self,
        images: Tensor,
        back: Tensor,
        groups: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        dilation: tuple[int, int],
    ):
        self._images = wide(images)
        self._back_image = wide(back)
        self._groups, self._kernel, self._stride, self._dilation = groups, kernel, stride, dilation
        self.back = self._back_image.flatten(2).unflatten(1, (groups, -1)).mT
        self._held = None
        self.slack = None

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Unfolded patches, [b, groups, positions, fan_in]."""
        patches: Tensor = F.unfold(self._images[start:stop], self._kernel, self._dilation, 0, self._stride)
        by_group: Tensor = patches.unflatten(1, (self._groups, -1))
        return by_group.mT

    def gram(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """From products of pixels, each of which belongs to many patches: fewer of them, and nothing is unfolded."""
        (rows, columns), (height, width) = self._back_image.shape[2:], self._images.shape[2:]
        if (height * width) ** 2 > math.prod(self._kernel) * (rows * columns) ** 2:  # large strides leave pixels out
            return super().gram(start, stop, dtype)
        pixels = self._images[start:stop].to(dtype).flatten(2).unflatten(1, (self._groups, -1))
        by_pixel, terms = gram(pixels.mT)
        products = by_pixel.unflatten(3, (height, width)).unflatten(2, (height, width))
        total: Tensor | None = None
        for place in itertools.product(*map(range, self._kernel)):
            down, across = (
                slice(at * hole, at * hole + (count - 1) * step + 1, step)
                for at, hole, count, step in zip(place, self._dilation, (rows, columns), self._stride, strict=True)
            )
            part = products[:, :, down, across, down, across]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total.flatten(4, 5).flatten(2, 3), terms + math.prod(self._kernel) - 1

    @property
    def fan_in(self) -> int:
        """Channels of a group times kernel size."""
        return self._images.shape[1] // self._groups * self._kernel[0] * self._kernel[1]

    def _held_norms(self, entries: int) -> Tensor:
        """Place by place in the kernel, where every row of pixels is a slice of the image: nothing is unfolded."""
        count, channels, height, width = self._images.shape
        fan_out, rows, columns = self._back_image.shape[1:]
        if self._groups > 1 or self._stride != (1, 1) or channels < _WORTH_A_PRODUCT:
            return super()._held_norms(entries)
        length = (rows - 1) * width + columns  # of back-signals in rows as long as the image's
        pixels = self._images.reshape(count, channels, height * width)
        self._held = held = self.back.new_empty(count, *self._kernel, fan_out, channels)
        for start, stop in chunks(count, entries):
            spread = self.back.new_zeros(stop - start, fan_out, rows, width)
            spread[..., :columns] = self._back_image[start:stop]
            back = spread.flatten(2)[..., :length]
            for down, across in itertools.product(*map(range, self._kernel)):
                first = down * self._dilation[0] * width + across * self._dilation[1]
                seen = pixels[start:stop, :, first : first + length]
                torch.bmm(back, seen.mT, out=held[start:stop, down, across])
        return square_sums(held)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """The library's own weight gradient, of re-weighted back-signals: no unfolding."""
        if self._held is not None and self._held.dim() == 5:  # by place in the kernel
            total = out.new_empty(self._held.shape[1:])
            Dense(self._held).add_weighted(total, weights, False)
            _give(out, total.permute(2, 3, 0, 1), accumulate)
            return
        if self._held is not None:
            Dense(self._held).add_weighted(out, weights, accumulate)
            return
        shape = (
            self.back.shape[1] * self.back.shape[3],
            self._images.shape[1] // self._groups,
            *self._kernel,
        )
        weighted = self._back_image * weights[:, None, None, None].to(self._back_image.dtype)
        total = conv2d_weight(
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
        images, back = mask(self._images, keep), mask(self._back_image, keep)
        zeroed = Convolution(images, back, self._groups, self._kernel, self._stride, self._dilation)
        zeroed._held = None if self._held is None else mask(self._held, keep)
        return zeroed


def _give(out: Tensor, total: Tensor, accumulate: bool) -> None:
    total = total.reshape(out.shape)
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)
