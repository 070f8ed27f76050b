"""Exact noise: whole cells of one grid, exactly rounded, and low bits that say nothing about the data."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import fodp
from fodp.clipping import Engine
from fodp.clipping.chunks import Chunks
from fodp.data.models import cross_entropy
from fodp.gradients import Gradients
from fodp.layout import Layout
from fodp.noise import Streams, exact
from fodp.noise.exact import CELLS, SUM_ALLOWANCE, decide, raised, rounded_normals
from fodp.queries import Query
from fodp.release import release
from statistics_for_tests import ACCEPT, REJECT, exceedance_p, variance_p

SEEDED = Streams.seeded(5)


class LeadingZeros:
    """Words whose radius half begins with zero bits, so that far tails are common; its "more" bits are plain."""

    def __init__(self, zero_bits: int):
        self._zero_bits, self._streams = zero_bits, Streams.seeded(zero_bits)

    def words(self, count: int, step: int, name: str) -> np.ndarray:
        words = self._streams.words(count, step, name).copy()
        if not name.endswith("more"):
            words[: count // 2] >>= np.uint64(self._zero_bits)
        return words


# ---- the distribution ----------------------------------------------------------------------------------------


def test_cells_are_whole_and_of_the_right_scale():
    cells = rounded_normals(100_001, SEEDED, 0, "noise")
    assert cells.shape == (100_001,)
    assert np.array_equal(cells, np.rint(cells))
    assert variance_p(cells, CELLS) > ACCEPT
    assert variance_p(cells, 1.03 * CELLS) < REJECT
    assert stats.kstest(cells / CELLS, "norm").pvalue > ACCEPT
    assert len(np.unique(cells % 1024)) == 1024  # the low bits are all in use
    counts = np.bincount((cells % 64).astype(int), minlength=64)
    assert stats.chisquare(counts).pvalue > ACCEPT


@pytest.mark.parametrize(("sigmas", "zero_bits"), [(6.0, 25), (8.0, 45), (9.4, 63)])
def test_tails_beyond_six_sigma_occur_as_they_should(sigmas, zero_bits):
    """With 63 zero bits nearly the whole radius comes from the further bits; 64 bits alone would end at 9.4."""
    count = 4000
    cells = rounded_normals(count, LeadingZeros(zero_bits), 0, "noise")
    share = float(2 * stats.norm.sf(sigmas)) * 2.0**zero_bits
    assert 0.001 < share < 0.2
    assert exceedance_p(int((np.abs(cells) > sigmas * CELLS).sum()), count, share) > ACCEPT
    assert exceedance_p(int((np.abs(cells) > 1.1 * sigmas * CELLS).sum()), count, share) < REJECT


def test_the_slow_way_and_the_fast_way_agree(monkeypatch):
    """Where float64 is sure it is right: a thousand times wider margin sends more to 100 digits, to no effect."""
    fast = rounded_normals(40_000, SEEDED, 1, "noise")
    monkeypatch.setattr(exact, "_MARGIN", 2.0**-9)
    calls = []
    monkeypatch.setattr(exact, "decide", lambda *bits: calls.append(bits) or decide(*bits))
    assert np.array_equal(rounded_normals(40_000, SEEDED, 1, "noise"), fast)
    assert len(calls) > 100


def test_the_slow_way_decides_where_float64_cannot(monkeypatch):
    """Without the margin, float64 rounds some of many words to the wrong side; with it, never."""
    found = 0
    monkeypatch.setattr(exact, "_MARGIN", 2.0**-14)
    original = decide

    def compare(radius_word: int, angle_word: int, more: int) -> tuple[int, int]:
        nonlocal found
        found += 1
        pair = original(radius_word, angle_word, more)
        radius = CELLS * math.sqrt(-2 * math.log((radius_word + 0.5) / 2**64))
        angle = np.int64(np.uint64(angle_word)) * (math.pi / 2**63)
        for whole, value in zip(pair, (radius * math.cos(angle), radius * math.sin(angle)), strict=True):
            assert abs(whole - value) < 0.5 + 2.0**-19  # nowhere is float64 off by more than the real margin
        return pair

    monkeypatch.setattr(exact, "decide", compare)
    rounded_normals(1_000_000, SEEDED, 2, "noise")
    assert found > 50


def test_extreme_words_are_finite():
    for radius_word in (0, 1, 2**44, 2**64 - 1):
        for angle_word in (0, 2**62, 2**63, 2**64 - 1):
            pair = decide(radius_word, angle_word, 2**384 - 1)
            assert math.hypot(*pair) < 19 * CELLS  # 256 bits reach 18.8 σ


# ---- the release ---------------------------------------------------------------------------------------------


def test_the_low_bits_of_a_release_do_not_depend_on_the_data():
    """Shifting the sum by whole cells shifts the release by as much and changes nothing else: k + round(N)."""
    size, std = 1000, 1.1
    grid = raised(std, 1.0, size) / CELLS
    base = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = torch.randint(-(10**6), 10**6, (size,), generator=torch.Generator().manual_seed(1)).double()
    cells = (base / grid).round()

    def released(value):
        return exact.release(Query(value * grid, 1.0), std, SEEDED, 0, "noise") / grid

    first, second = released(cells).round(), released(cells + shift).round()
    assert torch.equal(second - first, shift)


def near_zero(release, total: float) -> torch.Tensor:
    """Released coordinates near zero, of a sum that is `total` in every coordinate."""
    query = Query(torch.full((1_000_000,), total), 1.0)
    values = release(query, 1.0, Streams.seeded(0), 0, "noise").double()
    return values[values.abs() < 2.0**-6]


def share_off_the_grid(values: torch.Tensor, grid: float) -> float:
    return float(((values / grid).round() * grid != values).double().mean())


def test_the_attack_on_low_bits_works_on_floats():
    """Mironov's attack in its simplest form. Near zero 1 + noise is a multiple of 2^-25, for 1 - ε is; 0 + noise is
    any float. So one look at the low bits of one coordinate near zero tells a sum of 0 from a sum of 1 for sure."""
    assert share_off_the_grid(near_zero(release, 1.0), 2.0**-25) == 0
    assert share_off_the_grid(near_zero(release, 0.0), 2.0**-25) > 0.9


@pytest.mark.parametrize("total", [0.0, 1.0, -0.3])
def test_the_attack_on_low_bits_finds_nothing_in_exact_releases(total):
    """Whatever the sum, releases are the same whole multiples of the same public grid (rounded to float32)."""
    values = near_zero(exact.release, total)
    grid = raised(1.0, 1.0, 1_000_000) / CELLS
    cells = (values / grid).round()
    assert torch.equal((cells * grid).float().double(), values)
    assert len(values) > 1000
    assert stats.chisquare(np.bincount((cells.numpy() % 16).astype(int), minlength=16)).pvalue > ACCEPT


@pytest.mark.rule(3)
@pytest.mark.parametrize(("std", "bound", "size"), [(1.1, 0.9, 199_082), (0.5, 2.0, 1000), (50.0, 1.0, 10_000)])
def test_raised_noise_pays_for_rounding(std, bound, size):
    more = raised(std, bound, size)
    grid = more / CELLS
    assert more / (bound * (1 + SUM_ALLOWANCE) + grid * math.sqrt(size)) >= std / bound * (1 - 1e-9)
    assert more < 1.03 * std
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):  # rounded neighbours are no farther apart than that
        one = torch.randn(size, dtype=torch.float64, generator=generator)
        step = torch.randn(size, dtype=torch.float64, generator=generator)
        two = one + bound * step / step.norm()
        apart = ((one / grid).round() - (two / grid).round()).norm() * grid
        assert apart <= bound + grid * math.sqrt(size)


@pytest.mark.rule(19)
@pytest.mark.parametrize("exactly", [True, False])
def test_the_allowance_covers_what_rounding_does(exactly):
    """Removing an example changes the sum by its own gradient, and by rounding of all others' far below."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 10))
    images, labels = torch.randn(400, 300), torch.randint(10, (400,))

    def total(rows):
        def loss(m, batch):
            return functional.cross_entropy(m(batch[0]), batch[1], reduction="none")

        chunks = Chunks(Engine(model, loss), (images[rows], labels[rows]), exact=exactly)
        query = Gradients(chunks, Layout(model), exact=exactly).clipped_sum(1.0)
        return sum(factor * term.double() for factor, term in query._terms)

    worst = 0.0
    for count in (2, 17, 64, 399, 400):
        rows = torch.arange(count)
        worst = max(worst, float((total(rows) - total(rows[:-1]) - total(rows[-1:])).norm()))
    assert 0 < worst < SUM_ALLOWANCE / 10


def test_an_exact_sum_is_released_with_what_float32_leaves_of_it():
    """Two neighbours that float32 cannot tell apart: the grid of small noise can, once 64 is taken from both."""
    model = nn.Linear(1, 1, bias=False)

    def cells(*rows):
        batch = (torch.tensor(rows).view(-1, 1),)
        engine = Engine(model, lambda m, b: m(b[0]).squeeze(1), "loop")
        query = Gradients(Chunks(engine, batch, exact=True), Layout(model), exact=True).clipped_sum(1.0)
        released = exact.release(query + torch.tensor([-64.0]), 1e-4, SEEDED, 0, "noise")
        return float(released) / (raised(1e-4, 1.0, 1) / CELLS)

    whole, part = cells(*[1.0] * 64, 2.0**-20), cells(*[1.0] * 64)
    assert whole - part == pytest.approx(2.0**-20 * CELLS / 1e-4, rel=0.01)


def test_sums_and_models_beyond_the_grid_are_refused():
    with pytest.raises(fodp.PrivacyError, match="too large for exact noise"):
        raised(100.0, 1.0, 10**9)
    with pytest.raises(fodp.PrivacyError, match="too large for exact noise"):
        exact.release(Query(torch.full((3,), 1e12), 1.0), 1e-3, SEEDED, 0, "noise")
    with pytest.raises(fodp.PrivacyError, match="too large for exact noise"):
        exact.release(Query(torch.full((3,), torch.nan), 1.0), 1.0, SEEDED, 0, "noise")


# ---- in a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [dict(beta=0.8), dict(beta=0.8, quantile=0.5)])
def test_a_run_with_exact_noise_learns_and_costs_the_same(params):
    torch.manual_seed(0)
    images, labels = torch.randn(200, 5), torch.randint(2, (200,))
    images[:, 0] += 4.0 * labels
    plans = [
        fodp.Plan(
            sampling_rate=0.2, steps=40, lot_size=40, clip_norm=1.0, noise_multiplier=0.8, delta=1e-5,
            accountant="rdp", params=dict(lr=0.5, **params), seed=1, exact_noise=on, method="fo-dp-sgd",
        )
        for on in (True, False)
    ]  # fmt: skip
    assert plans[0].epsilon() == plans[1].epsilon()
    assert "the noise itself is exact" in plans[0].statement()
    assert "floating-point and timing attacks" in plans[1].statement()

    def train(plan):
        torch.manual_seed(0)
        model = nn.Linear(5, 2)
        fodp.Trainer(model, cross_entropy, TensorDataset(images, labels), plan).fit()
        return model

    model = train(plans[0])
    assert (model(images).argmax(1) == labels).float().mean() > 0.85
    assert torch.equal(model.weight, train(plans[0]).weight)  # seeded runs repeat


def test_secure_exact_noise_is_never_drawn_twice():
    streams = Streams.secure()
    query = Query(torch.zeros(10), 1.0)
    exact.release(query, 1.0, streams, 0, "noise")
    with pytest.raises(fodp.PrivacyError, match="already drawn"):
        exact.release(query, 1.0, streams, 0, "noise")


def test_a_switch_must_be_a_switch():
    with pytest.raises(fodp.PrivacyError, match="exact_noise must be True or False"):
        fodp.Plan(
            sampling_rate=0.2,
            steps=1,
            lot_size=1,
            clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-5,
            exact_noise=1,
            method="fo-dp-sgd",
        )
