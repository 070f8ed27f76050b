"""Poisson lots: every record independently at the declared rate, empty lots included.

The statistical tests are functions from a matrix of masks (steps x records) to a p-value. They accept the
sampler and reject what is often passed off as Poisson: lots of a fixed size, a shuffled pass through the
data, records drawn in pairs, a rate that is off by 5%. Seeds are fixed, so the tests are deterministic.
"""

from collections import namedtuple
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fodp.errors import PrivacyError
from fodp.lots.batch_sampler import PoissonBatchSampler
from fodp.lots.poisson import PoissonSampler, poisson_indices
from fodp.lots.reading import Fetcher, LotCollate, collate_lot
from fodp.lots.records import record_count
from fodp.noise import Streams
from fodp.sampling import Lot

ACCEPT, REJECT = 1e-3, 1e-9
STEPS, SIZE, RATE = 4000, 100, 0.1


# ---- samplers, right and wrong ---------------------------------------------------------------------------


def as_mask(lots: list[np.ndarray]) -> np.ndarray:
    mask = np.zeros((len(lots), SIZE))
    for row, lot in zip(mask, lots, strict=True):
        row[lot] = 1
    return mask


def poisson(rate: float = RATE, seed: int = 1) -> np.ndarray:
    sampler = PoissonSampler(SIZE, rate, Streams.seeded(seed))
    return as_mask([sampler.draw(step).indices.numpy() for step in range(STEPS)])


def through_loader() -> np.ndarray:
    return as_mask(list(PoissonBatchSampler(range(SIZE), RATE, STEPS, Streams.seeded(2))))


def secure() -> np.ndarray:
    sampler = PoissonSampler(SIZE, RATE, Streams.secure())
    return as_mask([sampler.draw(step).indices.numpy() for step in range(STEPS)])


def fixed_size() -> np.ndarray:
    rng, lot = np.random.default_rng(0), round(RATE * SIZE)
    return as_mask([rng.choice(SIZE, lot, replace=False) for _ in range(STEPS)])


def shuffled() -> np.ndarray:
    rng, lots = np.random.default_rng(0), round(1 / RATE)
    return as_mask([lot for _ in range(STEPS // lots) for lot in np.split(rng.permutation(SIZE), lots)])


def in_pairs() -> np.ndarray:
    return np.repeat(np.random.default_rng(0).random((STEPS, SIZE // 2)) < RATE, 2, axis=1).astype(float)


def favouring() -> np.ndarray:
    """The right rate on average, but the first ten records come half again as often."""
    rates = np.full(SIZE, RATE * (SIZE - 15) / (SIZE - 10))
    rates[:10] = RATE * 1.5
    return (np.random.default_rng(0).random((STEPS, SIZE)) < rates).astype(float)


def every_lot_twice() -> np.ndarray:
    return np.repeat(np.random.default_rng(0).random((STEPS // 2, SIZE)) < RATE, 2, axis=0).astype(float)


def rate_off() -> np.ndarray:
    return poisson(RATE * 1.05)


# ---- p-values --------------------------------------------------------------------------------------------

VARIANCE = RATE * (1 - RATE)


def two_sided(probability_below: float) -> float:
    return 2 * min(probability_below, 1 - probability_below)


def total_p(mask: np.ndarray) -> float:
    """All inclusions together: the declared rate."""
    return float(stats.binomtest(int(mask.sum()), mask.size, RATE).pvalue)


def frequency_p(mask: np.ndarray) -> float:
    """How often each record came: spread as for independent draws of the rate, neither more nor less."""
    counts = mask.sum(axis=0)
    return two_sided(stats.chi2.cdf(np.sum((counts - STEPS * RATE) ** 2) / (STEPS * VARIANCE), SIZE))


def lot_size_p(mask: np.ndarray) -> float:
    """The lot sizes vary as a binomial number does."""
    sizes = mask.sum(axis=1)
    return two_sided(stats.chi2.cdf(np.sum((sizes - SIZE * RATE) ** 2) / (SIZE * VARIANCE), STEPS))


def pairs_p(mask: np.ndarray) -> float:
    """No two records come together more or less often than chance: the sum of z² over all pairs."""
    centred = (mask - RATE) / np.sqrt(VARIANCE)
    z_squared = (centred.T @ centred / np.sqrt(STEPS))[np.triu_indices(SIZE, 1)] ** 2
    kurtosis = (1 - 3 * VARIANCE) / VARIANCE
    variance = z_squared.size * (2 + (kurtosis**2 - 3) / STEPS)
    variance += SIZE * (SIZE - 1) * (SIZE - 2) * (kurtosis - 1) / STEPS  # pairs that share a record
    return two_sided(stats.norm.cdf((z_squared.sum() - z_squared.size) / np.sqrt(variance)))


def successive_p(mask: np.ndarray) -> float:
    """Having come in one lot says nothing about the next."""
    centred = (mask - RATE) / np.sqrt(VARIANCE)
    products = centred[:-1] * centred[1:]
    return two_sided(stats.norm.cdf(products.sum() / np.sqrt(products.size)))


CHECKS = [total_p, frequency_p, lot_size_p, pairs_p, successive_p]


@pytest.mark.rule(8)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sampler", [poisson, through_loader])
def test_poisson_lots_are_accepted(sampler, check):
    assert check(sampler()) > ACCEPT


@pytest.mark.rule(8)
@pytest.mark.rule(13)
def test_secure_lots_are_accepted():
    mask = secure()  # not a fixed seed, hence the lower level
    assert min(check(mask) for check in CHECKS) > 1e-7


@pytest.mark.rule(8)
@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (fixed_size, lot_size_p),
        (shuffled, lot_size_p),
        (shuffled, frequency_p),
        (shuffled, successive_p),
        (in_pairs, pairs_p),
        (in_pairs, lot_size_p),
        (favouring, frequency_p),
        (every_lot_twice, successive_p),
        (rate_off, total_p),
    ],
)
def test_wrong_samplers_are_rejected(wrong, check):
    assert check(wrong()) < REJECT


def test_the_pair_test_keeps_its_level():
    """Over many seeds its p-values are not crowded at zero: the variance of the sum of z² is right."""
    p_values = [pairs_p(poisson(seed=seed)) for seed in range(10, 22)]
    assert stats.kstest(p_values, "uniform").pvalue > ACCEPT


def test_lots_of_different_names_are_independent():
    sampler = PoissonSampler(200_000, 0.3, Streams.seeded(3))
    first, second = (set(sampler.draw(0, name).indices.tolist()) for name in ("mask", "mask1"))
    both = len(first & second)
    assert stats.binomtest(both, 200_000, 0.09).pvalue > ACCEPT


# ---- the threshold ---------------------------------------------------------------------------------------


@given(st.floats(min_value=0, max_value=1, exclude_min=True))
def test_the_threshold_is_exact(rate):
    """The share of words that are taken is the largest multiple of 2⁻⁶⁴ that does not exceed the rate."""
    bound = int(Fraction(rate) * 2**64)  # exact, rounded down
    assert Fraction(bound, 2**64) <= Fraction(rate)
    near = [word for word in (bound - 2, bound - 1, bound, bound + 1) if 0 <= word < 2**64]
    taken = poisson_indices(np.array(near, dtype=np.uint64), rate)
    assert [near[i] for i in taken] == [word for word in near if word < bound]


def test_rate_one_takes_everything():
    ends = np.array([0, 2**63, 2**64 - 1], dtype=np.uint64)
    assert poisson_indices(ends, 1.0).tolist() == [0, 1, 2]
    assert poisson_indices(ends, 1).tolist() == [0, 1, 2]
    assert poisson_indices(ends, np.nextafter(1.0, 0).item()).tolist() == [0, 1]
    assert torch.equal(PoissonSampler(7, 1.0, Streams.seeded(0)).draw(0).indices, torch.arange(7))


def test_tiny_rates():
    words = np.array([0, 1, 2], dtype=np.uint64)
    assert poisson_indices(words, 2.0**-64).tolist() == [0]
    assert poisson_indices(words, 2.0**-63).tolist() == [0, 1]
    assert poisson_indices(words, 1e-300).size == 0  # below what 64 bits can tell: never, so never too often
    assert PoissonSampler(1000, 1e-9, Streams.seeded(0)).draw(0).indices.numel() == 0


@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.0000001, float("nan"), "0.1", None, True])
def test_bad_rates_are_refused(rate):
    with pytest.raises(PrivacyError, match="rate"):
        PoissonSampler(10, rate, Streams.seeded(0))
    if rate is not None:
        with pytest.raises(PrivacyError, match="rate"):
            PoissonSampler(10, 0.1, Streams.seeded(0)).draw(0, rate=rate)


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_bad_sizes_are_refused(size):
    with pytest.raises(PrivacyError, match="size"):
        PoissonSampler(size, 0.1, Streams.seeded(0))


# ---- lots ------------------------------------------------------------------------------------------------


@pytest.mark.rule(12)
def test_a_lot_shows_only_public_numbers():
    lot = PoissonSampler(50, 0.5, Streams.seeded(0)).draw(3)
    assert repr(lot) == str(lot) == "Lot(step=3, rate=0.5, name='mask')"
    assert lot.indices.dtype == torch.int64
    with pytest.raises(AttributeError):
        lot.step = 4


def test_a_lot_can_have_a_rate_of_its_own():
    sampler = PoissonSampler(10_000, 0.01, Streams.seeded(0))
    assert sampler.draw(0).rate == 0.01
    larger = sampler.draw(0, rate=0.5)
    assert larger.rate == 0.5
    assert larger.indices.numel() > 4000


def test_indices_increase_and_depend_on_step_and_name_only():
    first, second = (PoissonSampler(1000, 0.3, Streams.seeded(5)) for _ in range(2))
    second.draw(8)
    lot = first.draw(2)
    assert torch.equal(lot.indices, second.draw(2).indices)
    assert (lot.indices.diff() > 0).all()
    assert not torch.equal(lot.indices, first.draw(3).indices)
    assert not torch.equal(lot.indices, first.draw(2, "other").indices)


@pytest.mark.rule(2)
def test_empty_lots_occur_as_often_as_they_should():
    sampler = PoissonSampler(5, 0.2, Streams.seeded(0))
    empty = sum(sampler.draw(step).indices.numel() == 0 for step in range(5000))
    assert stats.binomtest(empty, 5000, 0.8**5).pvalue > ACCEPT


@pytest.mark.rule(11)
def test_a_secure_lot_is_drawn_once():
    sampler = PoissonSampler(10, 0.5, Streams.secure())
    sampler.draw(0)
    with pytest.raises(PrivacyError, match="already drawn"):
        sampler.draw(0)


# ---- batch sampler ---------------------------------------------------------------------------------------


class Squares(Dataset):
    """A map-style data set that is not made of tensors."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return {"x": torch.full((2, 3), float(index)), "y": index * index, "text": f"record {index}"}


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 5

    def __iter__(self):
        return iter(range(5))


@pytest.mark.rule(2)
def test_batch_sampler_yields_every_step_empty_lots_included():
    lots = list(PoissonBatchSampler(Squares(5), 0.2, 200, Streams.seeded(1)))
    assert len(lots) == 200
    assert 30 < sum(not lot for lot in lots) < 110  # 0.8^5 of them: 66
    direct = PoissonSampler(5, 0.2, Streams.seeded(1))
    assert lots == [direct.draw(step).indices.tolist() for step in range(200)]


@pytest.mark.rule(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_serves_empty_lots(workers):
    data = Squares(5)
    lots = PoissonBatchSampler(data, 0.2, 40, Streams.seeded(1))
    loader = DataLoader(data, batch_sampler=lots, collate_fn=LotCollate(data), num_workers=workers)
    assert len(loader) == 40
    batches = list(loader)
    expected = list(PoissonBatchSampler(data, 0.2, 40, Streams.seeded(1)))
    assert [batch["y"].tolist() for batch in batches] == [[i * i for i in lot] for lot in expected]
    assert {tuple(batch["x"].shape[1:]) for batch in batches} == {(2, 3)}
    assert any(len(batch["x"]) == 0 for batch in batches)


@pytest.mark.rule(1)
def test_length_is_the_declared_number_of_steps():
    assert len(PoissonBatchSampler(Squares(5), 0.2, 123, Streams.seeded(1))) == 123


@pytest.mark.rule(8)
@pytest.mark.parametrize("streams", [Streams.seeded(1), Streams.secure()])
def test_the_same_lots_are_not_served_twice(streams):
    lots = PoissonBatchSampler(Squares(5), 0.2, 10, streams)
    list(lots)
    with pytest.raises(PrivacyError, match="start=10"):
        list(lots)
    more = list(PoissonBatchSampler(Squares(5), 0.2, 10, streams, start=10))
    assert len(more) == 10


def test_starting_later_goes_on_with_the_same_lots():
    whole = list(PoissonBatchSampler(Squares(50), 0.2, 20, Streams.seeded(1)))
    assert whole[12:] == list(PoissonBatchSampler(Squares(50), 0.2, 8, Streams.seeded(1), start=12))


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (Stream(), "map-style Dataset"),
        (iter([1, 2]), "__getitem__"),
        (Dataset(), "__len__"),
        ({"x": torch.zeros(3)}, "TensorDataset"),
        (None, "wrap it"),
        (TensorDataset(torch.zeros(0, 3)), "no records"),
        ([], "no records"),
        ((torch.zeros(3), torch.zeros(4)), "leading dimension"),
        ((torch.zeros(()),), "leading dimension"),
    ],
)
@pytest.mark.parametrize("use", [record_count, Fetcher, LotCollate, lambda data: collate_lot(data, torch.tensor([0]))])
def test_what_cannot_be_sampled_is_refused(use, data, fix):
    with pytest.raises(PrivacyError, match=fix):
        use(data)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (Stream(), "map-style Dataset"),
        (iter([1, 2]), "__getitem__"),
        (TensorDataset(torch.zeros(0)), "no records"),
        ((torch.zeros(3), torch.zeros(3)), "TensorDataset"),
    ],
)
def test_the_batch_sampler_refuses_too(data, fix):
    with pytest.raises(PrivacyError, match=fix):
        PoissonBatchSampler(data, 0.1, 5, Streams.seeded(0))


@pytest.mark.parametrize(("steps", "start"), [(0, 0), (-1, 0), (2.0, 0), (5, -1), (None, 0)])
def test_bad_step_numbers_are_refused(steps, start):
    with pytest.raises(PrivacyError, match=r"steps|start"):
        PoissonBatchSampler(Squares(5), 0.1, steps, Streams.seeded(0), start)


# ---- fetching --------------------------------------------------------------------------------------------

X, Y = torch.arange(60.0).reshape(10, 2, 3), torch.arange(10)


@pytest.mark.parametrize("data", [(X, Y), TensorDataset(X, Y)])
@pytest.mark.parametrize("indices", [[], [4], [0, 3, 9]])
def test_tensors_are_gathered_column_by_column(data, indices):
    indices = torch.tensor(indices, dtype=torch.int64)
    fetcher = Fetcher(data)
    assert fetcher.size == record_count(data) == 10
    for batch in (collate_lot(data, indices), fetcher.fetch(indices)):
        assert isinstance(batch, tuple)
        assert torch.equal(batch[0], X[indices])
        assert torch.equal(batch[1], Y[indices])


def test_batches_do_not_share_memory():
    fetcher = Fetcher((X, Y))
    first = fetcher.fetch(torch.tensor([0, 1]))
    fetcher.fetch(torch.tensor([2, 3]))
    assert torch.equal(first[0], X[:2])
    first[0].zero_()
    assert X[0].sum() > 0


@pytest.mark.rule(2)
def test_records_are_collated_and_empty_lots_keep_their_structure():
    full = collate_lot(Squares(10), torch.tensor([1, 3]))
    assert full["x"].shape == (2, 2, 3)
    assert full["y"].tolist() == [1, 9]
    empty = collate_lot(Squares(10), torch.tensor([], dtype=torch.int64))
    assert empty["x"].shape == (0, 2, 3)
    assert empty["x"].dtype == full["x"].dtype
    assert empty["y"].shape == (0,)
    assert empty["y"].dtype == full["y"].dtype
    assert empty["text"] == []


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.rule(2)
@pytest.mark.parametrize(
    "collate_fn",
    [
        None,
        lambda records: Pair(torch.stack([r[0] for r in records]), torch.stack([r[1] for r in records])),
        lambda records: [torch.stack([r[0] for r in records]), None],
        lambda records: {"in": {"x": np.stack([r[0].numpy() for r in records])}},
        lambda records: torch.stack([r[0] for r in records]),
    ],
)
def test_empty_lots_look_like_other_lots(collate_fn):
    def outline(batch):
        """Types, dtypes and all dimensions but the first."""
        if isinstance(batch, torch.Tensor | np.ndarray):
            return type(batch), batch.dtype, tuple(batch.shape[1:])
        if isinstance(batch, dict):
            return {key: outline(value) for key, value in batch.items()}
        return None if batch is None else (type(batch), [outline(item) for item in batch])

    def lengths(batch):
        if isinstance(batch, torch.Tensor | np.ndarray):
            return {len(batch)}
        items = batch.values() if isinstance(batch, dict) else batch or ()
        return set().union(*map(lengths, items))

    data = Subset(TensorDataset(X, Y), range(10))
    full, empty = (collate_lot(data, torch.arange(n), collate_fn) for n in (1, 0))
    assert outline(full) == outline(empty)
    assert lengths(full) == {1}
    assert lengths(empty) == {0}


@pytest.mark.parametrize("result", [3, torch.tensor(1.0), object()])
def test_batches_without_a_leading_dimension_are_refused_when_empty(result):
    with pytest.raises(PrivacyError, match="dimension 0"):
        collate_lot(Squares(3), torch.tensor([], dtype=torch.int64), lambda records: result)


def test_a_collate_fn_sees_records_also_of_a_tuple_of_tensors():
    def collate(records: list) -> torch.Tensor:
        return torch.stack([x.sum() + y for x, y in records])

    expected = (X.sum(dim=(1, 2)) + Y)[[2, 5]]
    for data in ((X, Y), TensorDataset(X, Y)):
        assert torch.equal(collate_lot(data, torch.tensor([2, 5]), collate), expected)
        assert collate_lot(data, torch.tensor([], dtype=torch.int64), collate).shape == (0,)


def test_a_changed_tensor_data_set_is_read_record_by_record():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * column for column in super().__getitem__(index))

    batch = collate_lot(Doubled(X, Y), torch.tensor([1, 2]))
    assert torch.equal(batch[0], 2 * X[1:3])


def test_lots_feed_the_fetcher():
    sampler: Callable[..., Lot] = PoissonSampler(10, 0.5, Streams.seeded(0)).draw
    lot = sampler(0)
    assert torch.equal(Fetcher((X, Y)).fetch(lot.indices)[1], lot.indices)


class TestRepeatedRecords:
    """A record at two places of a data set is drawn and clipped twice: its person has half the privacy."""

    DATA = TensorDataset(torch.arange(10.0).view(10, 1))
    OTHER = TensorDataset(torch.arange(5.0).view(5, 1))

    @pytest.mark.rule(14)
    @pytest.mark.parametrize(
        "repeated",
        [
            Subset(DATA, [0, 1, 1]),
            Subset(DATA, torch.tensor([3, 3])),
            Subset(DATA, np.array([9, -1])),
            Subset(Subset(DATA, [5, 6, 7]), [0, 2, 0]),
            Subset(Subset(DATA, [5, 6, 5]), [0, 1, 2]),
            ConcatDataset([DATA, DATA]),
            ConcatDataset([OTHER, Subset(DATA, [1, 2]), Subset(DATA, [2, 3])]),
            Subset(ConcatDataset([DATA, OTHER, DATA]), [4, 24 - 5]),
        ],
    )
    @pytest.mark.parametrize("use", [record_count, Fetcher, LotCollate])
    def test_are_refused(self, repeated, use):
        with pytest.raises(PrivacyError, match=r"a second time.*take each index once"):
            use(repeated)

    @pytest.mark.parametrize(
        ("single", "count"),
        [
            (Subset(DATA, [3, 1, 2]), 3),
            (Subset(Subset(DATA, [5, 6, 5]), [0, 1]), 2),  # the second view leaves the repeated one out
            (ConcatDataset([DATA, OTHER]), 15),
            (ConcatDataset([Subset(DATA, range(5)), Subset(DATA, range(5, 10))]), 10),
            (Subset(ConcatDataset([DATA, DATA]), range(10)), 10),
        ],
    )
    def test_single_ones_are_taken(self, single, count):
        assert record_count(single) == count

    @pytest.mark.parametrize(("indices", "message"), [([0, 10], "does not have"), ([0.5], "whole numbers")])
    def test_indices_that_are_none_are_refused(self, indices, message):
        with pytest.raises(PrivacyError, match=message):
            record_count(Subset(self.DATA, indices))
