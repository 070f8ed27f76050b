"""Scattering: channels, a direct convolution, and what is published of it: stability, energy, non-expansion."""

import math

import pytest
import torch
from torch.nn import functional as F

from fodp.errors import ConfigurationError
from fodp.features import Scattering


def spatial_wavelet(j, angle, angles, reach):
    """A Morlet wavelet on the plane, by the formula of Kymatio's `gabor_2d` with its matrix of curvature."""
    sigma, xi, slant = 0.8 * 2**j, 3 / 4 * math.pi / 2**j, 4 / angles
    theta = (int(angles - angles / 2 - 1) - angle) * math.pi / angles
    turn = torch.tensor([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]], dtype=torch.float64)
    curvature = turn @ torch.diag(torch.tensor([1.0, slant**2], dtype=torch.float64)) @ turn.T / (2 * sigma**2)
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    at = torch.stack(torch.meshgrid(place, place, indexing="ij"))
    bump = torch.exp(-torch.einsum("aij,ab,bij->ij", at, curvature, at))
    wave = bump * torch.exp(1j * xi * (at[0] * math.cos(theta) + at[1] * math.sin(theta)))
    norm = 2 * math.pi * sigma**2 / slant
    return (wave - wave.sum() / bump.sum() * bump) / norm


def spatial_blur(scales, reach):
    sigma = 0.8 * 2 ** (scales - 1)
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    bump = torch.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * sigma**2))
    return bump / (2 * math.pi * sigma**2)


def convolved(image, kernel, reach):
    """Convolution on the torus, by sums over space."""
    times = -(-reach // len(image))
    wide = image.repeat(2 * times + 1, 2 * times + 1)
    start = times * len(image) - reach
    wide = wide[start : start + len(image) + 2 * reach, start : start + len(image) + 2 * reach]
    windows = wide.unfold(0, 2 * reach + 1, 1).unfold(1, 2 * reach + 1, 1)
    flipped = kernel.flip(0, 1)
    if not kernel.is_complex():
        return torch.einsum("ijab,ab->ij", windows, flipped)
    return torch.complex(*(torch.einsum("ijab,ab->ij", windows, part) for part in (flipped.real, flipped.imag)))


def direct(image, scales, angles, reach=16):
    """The transform of one image by convolutions in space, in float64."""
    step = 2**scales
    padded = F.pad(image[None, None], [step] * 4, mode="reflect")[0, 0]

    def low(u):
        return convolved(u, spatial_blur(scales, reach), reach)[step:-step:step, step:-step:step]

    found, later = [low(padded)], []
    for j in range(scales):
        for angle in range(angles):
            first = convolved(padded, spatial_wavelet(j, angle, angles, reach), reach).abs()
            found.append(low(first))
            for coarser in range(j + 1, scales):
                for second_angle in range(angles):
                    wavelet = spatial_wavelet(coarser, second_angle, angles, reach)
                    later.append(low(convolved(first, wavelet, reach).abs()))
    return torch.stack(found + later)


@pytest.mark.parametrize(("scales", "angles"), [(1, 8), (2, 4)])
def test_it_is_a_convolution_in_space(scales, angles):
    image = torch.rand(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Scattering(12, scales, angles)(image[None, None].float())[0]
    assert torch.allclose(found.double(), direct(image, scales, angles), atol=2e-6)


def test_channels_of_the_published_setting():
    assert Scattering(32).maps == 81  # 1 + 2*8 + 8*8
    assert Scattering(28)(torch.zeros(1, 1, 28, 28)).shape == (1, 81, 7, 7)
    assert Scattering(32)(torch.zeros(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert Scattering((16, 8), scales=1, angles=4)(torch.zeros(1, 1, 16, 8)).shape == (1, 5, 8, 4)


def test_wavelets_and_blur_keep_energy_but_never_add_to_it():
    """Littlewood-Paley: |φ|² and half of both mirror images of |ψ|² add to at most 1, so this is a contraction."""
    scattering = Scattering(32)
    power = scattering.wavelets.abs().pow(2).sum((0, 1))
    mirrored = power.flip(0, 1).roll((1, 1), (0, 1))
    place = torch.arange(40.0)
    line = torch.exp(-(torch.minimum(place, 40 - place) ** 2) / (2 * 1.6**2)) / math.sqrt(2 * math.pi) / 1.6
    blur = torch.fft.fft(line).abs()
    total = torch.outer(blur, blur) ** 2 + (power + mirrored) / 2
    assert total.max() < 1 + 1e-3
    assert total[:14, :14].min() > 0.1  # and no frequency below three quarters of the highest is lost


def test_it_does_not_move_images_apart():
    one, other = torch.rand(2, 6, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    scattering = Scattering(32)
    apart = (scattering(one) - scattering(other)).flatten(1).norm(dim=1) * 4  # every fourth place of each side is kept
    assert (apart <= 1.1 * F.pad(one - other, [4] * 4, mode="reflect").flatten(1).norm(dim=1)).all()


def test_small_shifts_change_little():
    """A shift by a pixel changes the features by much less than the image itself."""
    image = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(2))
    one, other = image[..., 4:36, 4:36], image[..., 4:36, 5:37]
    scattering = Scattering(32)
    here, there = scattering(one), scattering(other)
    moved = (here - there).norm() / (here - here.mean()).norm()
    assert moved < 0.25 * (one - other).norm() / (one - one.mean()).norm()


def test_constant_images_have_no_wavelet_coefficients():
    found = Scattering(16)(torch.full((1, 1, 16, 16), 3.0))[0]
    assert torch.allclose(found[0], torch.tensor(3.0), atol=1e-3)
    assert found[1:].abs().max() < 1e-4


@pytest.mark.parametrize("side", [30, 4, (32, 30)])
def test_sides_that_do_not_divide_are_refused(side):
    with pytest.raises(ConfigurationError, match=r"multiples of 2\^scales = 4"):
        Scattering(side)


def test_images_of_another_size_are_refused():
    with pytest.raises(ConfigurationError, match=r"images must be \(n, channels, 16, 16\)"):
        Scattering(16)(torch.zeros(1, 1, 32, 32))
