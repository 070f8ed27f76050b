"""Lots by skips: the distribution of masks, exactly, at the cost of the lot."""

import math
import tracemalloc

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fodp.lots import skips
from fodp.lots.poisson import PoissonSampler, poisson_indices
from fodp.noise import Streams

LARGE = skips.LEAST_RECORDS


def bound_of(rate):
    return int(math.ldexp(rate, 64))


def never(count):
    raise AssertionError("more bits were asked for")


def drawn(size, rate, step=0, seed=0):
    return skips.skipped_indices(Streams.seeded(seed), size, bound_of(rate), step, "mask")


class Fixed:
    """Words that a test chooses, by the end of their stream's name."""

    def __init__(self, **words):
        self._words = words

    def words(self, count, step, name):
        given = self._words.get(name.rpartition(".")[2], [0])
        return np.resize(np.array(given, dtype=np.uint64), count)


@given(
    word=st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 2000), st.integers(2**64 - 2000, 2**64 - 1)),
    rate=st.floats(1e-12, 1 / 16),
    more=st.integers(0, 2**192 - 1),
)
def test_every_skip_is_that_of_exact_arithmetic(word, rate, more):
    extra = np.frombuffer(more.to_bytes(24, "little"), dtype="<u8")
    found = skips.gaps(np.array([word], dtype=np.uint64), bound_of(rate), 2**60, lambda count: extra)
    assert found[0] == min(skips.decide(word, more, bound_of(rate)), 2**60)


@given(rate=st.floats(1e-9, 1 / 16), skip=st.integers(1, 10**6), offset=st.integers(-2, 2))
def test_words_at_a_boundary_are_decided_by_more_bits(rate, skip, offset):
    """The word in which U = (1-p)^skip lies leaves two answers; float64 alone would take one of them."""
    with mpmath.workdps(100):
        survival = (1 - mpmath.mpf(bound_of(rate)) / 2**64) ** skip
        word = int(survival * 2**64) + offset
    if not 1024 <= word < 2**64:
        return
    zeros, ones = np.zeros(3, np.uint64), np.full(3, 2**64 - 1, np.uint64)
    longest, shortest = (
        skips.gaps(np.array([word], dtype=np.uint64), bound_of(rate), 2**60, lambda count, bits=bits: bits)[0]
        for bits in (zeros, ones)
    )
    with mpmath.workdps(100):  # P(skip ≥ g) = (1-p)^g: U below it skips at least g
        p = mpmath.mpf(bound_of(rate)) / 2**64
        for bits, found in ((0, longest), (2**192 - 1, shortest)):
            uniform = mpmath.mpf(2 * ((word << 192) + bits) + 1) / 2**257
            assert (1 - p) ** (int(found) + 1) <= uniform <= (1 - p) ** int(found)


def test_the_ends_of_the_words():
    rate = 1e-3
    bound = bound_of(rate)
    largest, smallest = np.array([2**64 - 1, 0], dtype=np.uint64)
    half = lambda count: np.full(count, 2**63, np.uint64)  # noqa: E731
    assert skips.gaps(np.array([largest]), bound, 10**9, half)[0] == 0  # the very next record
    assert skips.gaps(np.array([smallest]), bound, 10**9, half)[0] == int(65 * math.log(2) / -math.log1p(-rate))
    assert skips.gaps(np.array([smallest]), bound, 40_000, never)[0] == 40_000  # beyond the end: nothing to decide


def test_rates_near_zero_and_the_largest_that_skips():
    assert len(drawn(10**8, 2.0**-65)) == 0  # ⌊q·2⁶⁴⌋ = 0: as with masks, nobody
    assert len(drawn(10**8, 1e-18)) == 0
    found = drawn(LARGE, math.nextafter(skips.MOST_RATE, 0))
    expected = LARGE * skips.MOST_RATE
    assert abs(len(found) - expected) < 6 * math.sqrt(expected)
    assert not skips.applies(LARGE, skips.MOST_RATE)
    assert not skips.applies(LARGE - 1, 1e-6)
    assert len(PoissonSampler(LARGE, 1.0, Streams.seeded(0)).draw(0).indices) == LARGE


def test_first_and_last_record_and_a_block_that_ends_too_early():
    size, bound = 1000, bound_of(1 / 64)
    everyone = skips.skipped_indices(Fixed(skips0=[2**64 - 1], skips1=[2**64 - 1]), size, bound, 0, "mask")
    blocks = {f"skips{i}": [2**64 - 1] for i in range(200)}
    everyone = skips.skipped_indices(Fixed(**blocks), size, bound, 0, "mask")
    assert everyone.tolist() == list(range(size))  # many blocks, without a gap or a repetition between them
    with mpmath.workdps(50):
        word = int((1 - mpmath.mpf(bound) / 2**64) ** mpmath.mpf(999.5) * 2**64)  # skips 999 records
    assert skips.skipped_indices(Fixed(skips0=[word]), size, bound, 0, "mask").tolist() == [999]
    assert skips.skipped_indices(Fixed(skips0=[word]), size - 1, bound, 0, "mask").tolist() == []


@pytest.mark.parametrize("rate", [1 / 17, 0.01])
def test_gaps_are_geometric_and_records_join_alike_and_independently(rate):
    lots, size = 3000, 60
    joined = np.zeros((lots, size), dtype=bool)
    for step in range(lots):
        joined[step, drawn(size, rate, step)] = True
    # Every record as often, the first and the last too.
    counts = joined.sum(0)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert abs(counts.sum() - lots * size * rate) < 5 * math.sqrt(lots * size * rate)
    assert all(abs(count - lots * rate) < 5 * math.sqrt(lots * rate) for count in counts[[0, 1, -2, -1]])
    # Sizes of lots are binomial.
    sizes = np.bincount(joined.sum(1), minlength=size + 1)
    expected = lots * stats.binom.pmf(np.arange(size + 1), size, rate)
    common = expected > 5
    observed = [*sizes[common], lots - sizes[common].sum()]
    assert stats.chisquare(observed, [*expected[common], lots - expected[common].sum()]).pvalue > 1e-4
    # Neighbours say nothing about each other.
    both = (joined[:, :-1] & joined[:, 1:]).sum()
    assert abs(both - lots * (size - 1) * rate**2) < 5 * math.sqrt(lots * size) * rate + 5
    words = Streams.seeded(1).words(40_000, 0, "gaps")
    found = skips.gaps(words, bound_of(rate), 10**9, lambda count: np.zeros(count, np.uint64))
    assert stats.kstest(found + np.random.default_rng(0).random(len(found)), _smoothed(rate)).pvalue > 1e-4


def _smoothed(rate):
    """The distribution of a geometric number plus a uniform one, which is continuous."""

    def cdf(x):
        whole = np.floor(x)
        below = 1 - (1 - rate) ** whole
        return below + (x - whole) * rate * (1 - rate) ** whole

    return cdf


def test_a_record_less_leaves_the_others_distribution():
    """Of data without record 7, the others join as they did, also those whose words have become other ones."""
    lots, size, rate, gone = 4000, 30, 1 / 17, 7
    whole, less = np.zeros(size), np.zeros(size - 1)
    pairs = [0, 0]  # how often the records on both sides of the gap join together
    for step in range(lots):
        lot = np.setdiff1d(drawn(size, rate, step), [gone])
        whole[lot] += 1
        other = drawn(size - 1, rate, step, seed=1)
        less[other] += 1
        pairs[0] += gone - 1 in lot and gone + 1 in lot
        pairs[1] += gone - 1 in other and gone in other
    table = np.array([np.delete(whole, gone), less])
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert all(abs(pair - lots * rate**2) < 5 * math.sqrt(lots) * rate for pair in pairs)


def test_ten_and_a_hundred_million_records_cost_what_the_lot_costs(monkeypatch):
    words, original = [], Streams.words
    monkeypatch.setattr(Streams, "words", lambda self, count, *of: (words.append(count), original(self, count, *of))[1])

    def cost(size, lot):
        sampler = PoissonSampler(size, lot / size, Streams.secure())
        sampler.draw(0)
        tracemalloc.start()
        words.clear()
        found = [len(sampler.draw(step).indices) for step in range(1, 6)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert abs(sum(found) - 5 * lot) < 6 * math.sqrt(5 * lot)
        return sum(words), peak

    (small, little), (large, much) = cost(10**7, 1000), cost(10**8, 1000)
    assert much < 1.5 * little < 500_000  # bytes; a mask of a hundred million takes 800 MB
    assert small <= large < 2 * small < 40_000  # words drawn for lots of 5,000 in all


def test_runs_of_today_keep_their_lots():
    streams = Streams.seeded(5)
    sampler = PoissonSampler(50_000, 0.01, streams)
    assert sampler.draw(3).indices.tolist() == poisson_indices(streams.words(50_000, 3, "mask"), 0.01).tolist()


def test_a_secure_lot_is_drawn_once():
    sampler = PoissonSampler(LARGE, 1e-5, Streams.secure())
    sampler.draw(2)
    with pytest.raises(ValueError, match="already drawn"):
        sampler.draw(2)
    sampler.draw(2, "maskascent")
    sampler.draw(3)
