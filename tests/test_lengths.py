"""Lengths that only a device knows: their ratios are floats, and never those of two origins."""

import pytest
import torch

from fodp import PrivacyError
from fodp._lengths import LengthOnDevice, at_least_zero, clip_norm, in_tensors, ratio, read
from fodp.noise import Streams
from fodp.queries import Query


def length(value=0.3, least=0.1, most=10.0):
    return LengthOnDevice(torch.tensor(value, dtype=torch.float64), least, most)


def test_factors_are_kept_as_floats():
    C = length()
    assert ratio(1.1 * C, 0.9 * C) == 1.1 / 0.9
    assert ratio(C * 3 / 4 + C / 4, C) == pytest.approx(1.0, rel=1e-15)
    assert float(2 * C) == pytest.approx(0.6)
    assert float(in_tensors(2 * C)) == pytest.approx(0.6)
    assert read(0.5) == in_tensors(0.5) == 0.5
    assert (2 * C).ends == (0.2, 20.0)
    assert 2 * C == C * 2 != C != length()
    assert not 0 * C
    release = torch.tensor([1.0, -2.0])
    assert torch.equal(release.sign() * 2.0 * C, torch.tensor([0.6, -0.6]))
    assert (release * C).dtype == torch.float32


@pytest.mark.rule(14)
def test_lengths_of_two_origins_have_no_public_ratio():
    C = length()
    for other in (length(), 0.3, 1):
        for pair in ((C, other), (other, C)):
            with pytest.raises(PrivacyError, match="not public"):
                ratio(*pair)
            with pytest.raises(PrivacyError, match="not public"):
                _ = pair[0] + pair[1]
    query = Query(torch.zeros(3), C)
    assert (0.5 * query).noise_multiplier(2 * C) == 4.0
    with pytest.raises(PrivacyError, match="not public"):
        query.noise_multiplier(1.0)
    with pytest.raises(PrivacyError, match="not public"):
        Query(torch.zeros(3), 1.0).noise_multiplier(C)


def test_checks_look_at_both_ends():
    C = length()
    assert clip_norm("C", C) is C
    for wrong in (length(least=1e-30), length(most=1e40), length() * -1):
        with pytest.raises(PrivacyError):
            clip_norm("C", wrong)
    with pytest.raises(PrivacyError):
        at_least_zero("the bound", length() * -1)
    with pytest.raises(PrivacyError, match="only a device knows"):
        Streams.seeded(0).normal_(torch.empty(3), length(), 0, "noise")
    with pytest.raises(PrivacyError, match="finite number"):
        _ = length() * float("nan")
