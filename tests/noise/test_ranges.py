"""Ranges of a draw: whoever holds a part of a vector draws what the whole draw has there, to the last bit."""

import itertools

import pytest
import torch

from fodp import PrivacyError, kernels
from fodp.noise import Streams
from fodp.noise.keystream import Keystream
from fodp.noise.ranges import RangedStreams, Ranges
from fodp.noise.streams import PAIRS

BLOCK = 2 * PAIRS
# Odd sizes, one block, exactly one, several, and a last block of a single number.
SIZES = (1, 2, 7, 1001, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4099, 3 * BLOCK + 1)


def cuts(size):
    """Ranges that begin and end anywhere: within a half of a block, across halves, across blocks, empty ones."""
    edges = sorted({0, 1, 3, size // 3, size // 2, PAIRS - 1, PAIRS + 5, BLOCK - 1, BLOCK + 2, size - 1, size})
    edges = [edge for edge in edges if 0 <= edge <= size]
    spans = list(itertools.pairwise(edges))
    yield spans
    yield spans[::2]
    yield [(edges[-1] // 2, edges[-1] // 2), *spans[1::2][-2:]]
    yield [(0, size)]
    yield []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_ranges_are_what_the_whole_draw_has_there(monkeypatch, size, compiled, dtype):
    if not compiled:
        monkeypatch.setattr(kernels, "library", lambda: None)
    streams = Streams.seeded(5)
    whole = streams.normal_(torch.empty(size, dtype=dtype), 1.7, 3, "noise")
    for spans in cuts(size):
        if any(b < a for (_, a), (b, _) in itertools.pairwise(spans)):
            continue
        ranges = Ranges(size, tuple(spans))
        found = streams.normal_ranges_(torch.empty(ranges.count, dtype=dtype), 1.7, 3, "noise", ranges)
        expected = torch.cat([whole[begin:end] for begin, end in spans]) if spans else whole[:0]
        assert torch.equal(found, expected)


def test_without_noise_there_is_none():
    ranges = Ranges(9, ((2, 5),))
    assert not Streams.seeded(1).normal_ranges_(torch.ones(3), 0.0, 0, "noise", ranges).any()


def test_a_number_is_drawn_whole():
    streams = Streams.seeded(1)
    one = RangedStreams(streams, Ranges(9, ((2, 5),))).normal_(torch.empty((), dtype=torch.float64), 2.0, 0, "count")
    assert one == streams.normal_(torch.empty((), dtype=torch.float64), 2.0, 0, "count")


def test_secure_ranges_are_drawn_once():
    streams, ranges = Streams.secure(), Ranges(9, ((2, 5),))
    streams.normal_ranges_(torch.empty(3), 1.0, 4, "noise", ranges)
    with pytest.raises(PrivacyError, match="already drawn"):
        streams.normal_ranges_(torch.empty(3), 1.0, 4, "noise", ranges)
    with pytest.raises(PrivacyError, match="already drawn"):  # nor whole, where it would show the same noise
        streams.normal_(torch.empty(9), 1.0, 4, "noise")


@pytest.mark.parametrize("spans", [((3, 2),), ((0, 4), (3, 6)), ((5, 10),), ((-1, 2),)])
def test_ranges_that_are_none_are_refused(spans):
    with pytest.raises(PrivacyError, match="in order, apart"):
        Ranges(9, spans)


def test_other_sizes_are_refused():
    with pytest.raises(PrivacyError, match="3 entries"):
        Streams.seeded(1).normal_ranges_(torch.empty(4), 1.0, 0, "noise", Ranges(9, ((2, 5),)))


def test_a_keystream_can_be_entered_at_any_block():
    import numpy as np

    whole, part = np.empty(160 + 16, np.uint8), np.empty(96 + 16, np.uint8)
    Keystream(bytes(32)).fill(whole, 160)
    Keystream(bytes(32), 64).fill(part, 96)
    assert (whole[64:160] == part[:96]).all()
    with pytest.raises(ValueError, match="whole block"):
        Keystream(bytes(32), 8)
