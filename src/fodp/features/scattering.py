"""The scattering transform (Mallat 2012; Oyallon and Mallat 2015) of images, of order two, in plain PyTorch.

Filters are Morlet wavelets with the parameters of Kymatio (Andreux et al. 2020), on whose features published private
models are trained. All filters are fixed numbers: nothing is learnt, and nothing depends on other images.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fodp.errors import ConfigurationError
from fodp.support import checks

_AROUND = 2  # copies of a filter to each side, when it is wrapped around the padded image


class Scattering(nn.Module):
    """Images (n, channels, height, width) to channels·K smoothed maps, of 1/2^scale of each side.

    K = 1 + L·J + L²·J(J-1)/2: the blurred image, the blurred moduli of its wavelet coefficients, and those of these
    moduli at coarser scales. For J = 2 scales and L = 8 angles K is 1 + 16 + 64 = 81.

    Guarantee: the features of an image depend on this image and on the public settings alone.

    Args:
        side: height and width of the images, or one number for both; each a multiple of 2^scales.
        scales: J. Features hardly change when an image moves by less than 2^J pixels.
        angles: L.

    Example:
        >>> Scattering(28)(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 81, 7, 7])
    """

    wavelets: Tensor
    blur_rows: Tensor
    blur_columns: Tensor

    def __init__(self, side: int | tuple[int, int], scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        sides = (side, side) if isinstance(side, int) else tuple(side)
        self.scales = checks.whole("scales", scales, maximum=6)
        self.angles = checks.whole("angles", angles, maximum=64)
        step = 2**scales
        for length in sides:
            if checks.whole("side", length) % step or length <= step:
                raise ConfigurationError(f"sides must be multiples of 2^scales = {step}, and above it; got {sides}")
        self.sides = sides
        wide = [length + 2 * step for length in sides]
        wavelets = [torch.stack([_morlet(wide, j, angle, angles) for angle in range(angles)]) for j in range(scales)]
        self.register_buffer("wavelets", torch.fft.fft2(torch.stack(wavelets)).to(torch.complex64))
        # The blur is separable, and only looked at every 2^J pixels: two small matrices.
        for name, length in (("blur_rows", wide[0]), ("blur_columns", wide[1])):
            self.register_buffer(name, _blur(length, scales))

    @property
    def maps(self) -> int:
        """K, the maps made of one channel."""
        first = self.angles * self.scales
        return 1 + first + self.angles * first * (self.scales - 1) // 2

    def extra_repr(self) -> str:
        """For `repr`."""
        return f"{self.sides}, scales={self.scales}, angles={self.angles}"

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, channels·K, height/2^J, width/2^J), the maps of a channel side by side."""
        if images.dim() != 4 or tuple(images.shape[2:]) != self.sides:
            raise ConfigurationError(
                f"images must be (n, channels, {self.sides[0]}, {self.sides[1]}), got {tuple(images.shape)}"
            )
        padded = F.pad(images, [2**self.scales] * 4, mode="reflect")
        found = [self._blurred(padded)]
        later: list[Tensor] = []
        spectrum = torch.fft.fft2(padded)
        for j, wavelets in enumerate(self.wavelets):
            for wavelet in wavelets:
                first = torch.fft.ifft2(spectrum * wavelet).abs()
                found.append(self._blurred(first))
                if j + 1 == self.scales:
                    continue
                coarser = self.wavelets[j + 1 :].flatten(0, 1)
                second = torch.fft.ifft2(torch.fft.fft2(first).unsqueeze(2) * coarser).abs()
                later += self._blurred(second).unbind(2)
        return torch.stack(found + later, 2).flatten(1, 2)

    def _blurred(self, maps: Tensor) -> Tensor:
        return self.blur_rows @ maps @ self.blur_columns.T


def _morlet(sides: list[int], j: int, angle: int, angles: int) -> Tensor:
    """A wavelet of scale 2^j and one of several angles, around the origin, as complex numbers with sum zero."""
    sigma, frequency, slant = 0.8 * 2**j, 3 * math.pi / 4 / 2**j, 4 / angles
    theta = (int(angles - angles / 2 - 1) - angle) * math.pi / angles
    envelope, wave = torch.zeros(sides, dtype=torch.float64), torch.zeros(sides, dtype=torch.complex128)
    copies = range(-_AROUND, _AROUND + 1)
    for down in copies:
        for right in copies:
            rows = torch.arange(sides[0], dtype=torch.float64)[:, None] + down * sides[0]
            columns = torch.arange(sides[1], dtype=torch.float64)[None] + right * sides[1]
            along = rows * math.cos(theta) + columns * math.sin(theta)
            across = columns * math.cos(theta) - rows * math.sin(theta)
            bump = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            envelope += bump
            wave += bump * torch.exp(1j * frequency * along)
    return (wave - wave.sum() / envelope.sum() * envelope) * slant / (2 * math.pi * sigma**2)


def _blur(length: int, scales: int) -> Tensor:
    """Rows of Gaussian weights around every 2^J-th place of a padded side; what lies in the padding is left out."""
    sigma, step = 0.8 * 2 ** (scales - 1), 2**scales
    centres = torch.arange(step, length - step, step, dtype=torch.float64)[:, None]
    places = torch.arange(length, dtype=torch.float64)[None]
    weights = sum(
        torch.exp(-((places - centres + copy * length) ** 2) / (2 * sigma**2)) for copy in range(-_AROUND, _AROUND + 1)
    )
    return (weights / math.sqrt(2 * math.pi) / sigma).float()
