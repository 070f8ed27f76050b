"""Adaptive quantile clipping: the pair costs what the sum alone would, and C goes where it should."""

import math

import pytest
import torch

import fodp
from fodp.accounting import joint
from fodp.options.quantile import AdaptiveClip, Quantile


def clip(start=1.0, lot_size=200, multipliers=(1.0,), **changes) -> AdaptiveClip:
    settings = dict(quantile=0.5, count_noise=10.0, clip_rate=0.2, clip_min=1e-3, clip_max=1e3)
    return AdaptiveClip(Quantile(**{**settings, **changes}), start, lot_size, multipliers)


@pytest.mark.rule(7)
@pytest.mark.parametrize("z", [0.3, 1.0, 1.1, 5.0, 19.9])
def test_sum_and_count_together_cost_what_the_sum_would_have(z):
    adaptive = clip()
    rest = adaptive.rest(z)
    assert rest > z
    assert joint(rest, adaptive.count_noise / 0.5) == pytest.approx(z, rel=1e-12)  # a count's sensitivity is ½


def test_the_published_numbers():
    """BASELINES.md 7: z = 1.1 and σ_b = L/20 = 10 leave z_D = 1.1017 for the sum."""
    assert clip().rest(1.1) == pytest.approx(1.1017, abs=5e-5)


@pytest.mark.rule(14)
def test_a_count_that_takes_everything_is_refused():
    with pytest.raises(fodp.PrivacyError, match=r"count_noise 10 leaves nothing .* raise it above 10"):
        clip().rest(20.0)
    with pytest.raises(fodp.PrivacyError, match=r"count_noise 10 leaves nothing .* raise it above 10"):
        clip(multipliers=(1.0, 20.0))  # before the first step, if any of the plan's phases is such


@pytest.mark.parametrize(
    ("count", "fraction"), [(0, 0.5), (100, 1.0), (-100, 0.0), (50, 0.75), (1e9, 1.0), (-1e9, 0.0)]
)
def test_the_fraction_is_the_centred_count_over_the_public_lot_size(count, fraction):
    assert clip().fraction_of(count) == fraction


def test_one_move_is_the_published_geometric_one():
    adaptive = clip(quantile=0.3)
    adaptive.move(40.0)  # a fraction of 0.7
    assert adaptive.clip_norm == pytest.approx(math.exp(-0.2 * (0.7 - 0.3)))


def test_the_clip_norm_stays_within_its_public_range():
    adaptive = clip(clip_min=0.9, clip_max=1.1)
    for count, end in ((1e6, 0.9), (-1e6, 1.1)):
        for _ in range(20):
            adaptive.move(count)
        assert adaptive.clip_norm == end


@pytest.mark.parametrize("start", [0.05, 30.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_it_finds_the_quantile_of_the_norms(start, quantile):
    generator = torch.Generator().manual_seed(0)
    norms = torch.randn(2000, generator=generator).exp()
    adaptive = clip(start=start, quantile=quantile)
    path = []
    for _ in range(300):
        lot = norms[torch.rand(len(norms), generator=generator) < 0.1]
        count = ((lot <= adaptive.clip_norm).double() - 0.5).sum() + 10 * torch.randn((), generator=generator)
        adaptive.move(count.item())
        path.append(adaptive.clip_norm)
    reached = torch.tensor(path[-100:]).median()
    assert (norms <= reached).double().mean().item() == pytest.approx(quantile, abs=0.06)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(quantile=0.0), "quantile"),
        (dict(quantile=1.0), "quantile"),
        (dict(count_noise=0.0), "count_noise"),
        (dict(clip_rate=0.0), "clip_rate"),
        (dict(clip_min=0.0), "clip_min"),
        (dict(clip_max=-1.0), "clip_max"),
        (dict(clip_min=2.0, clip_max=1.0), "clip_min must not exceed clip_max"),
        (dict(start=1e4), "between clip_min 0.001 and clip_max 1000"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, message):
    with pytest.raises(fodp.PrivacyError, match=message):
        clip(**changes)


@pytest.mark.rule(14)
def test_extreme_numbers_end_at_the_bounds_or_in_a_refusal():
    extreme = clip(lot_size=10.0, count_noise=1.0, clip_rate=1e6, clip_min=0.1, clip_max=10.0)
    extreme.move(-1e9)
    assert extreme.clip_norm == 10.0
    extreme.move(1e9)
    assert extreme.clip_norm == 0.1
    with pytest.raises(fodp.PrivacyError, match="count_noise"):
        clip(count_noise=1e-200)
