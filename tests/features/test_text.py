"""Hashed texts and random Fourier features: signs, norms, public settings, the kernel that they stand for."""

import pytest
import torch

from fodp.errors import ConfigurationError
from fodp.features import HashedText, RandomFourier


def test_norms_are_one_and_empty_texts_are_zeros():
    rows = HashedText(64)(["a b c", "", "b"])
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 0, 1])


def test_a_word_is_known_in_any_case_and_pairs_are_ordered():
    hashed = HashedText(4096)
    assert torch.equal(*hashed(["Good Film", "good film"]))
    assert not torch.equal(*hashed(["good film", "film good"]))
    assert torch.equal(*HashedText(4096, words=(1,))(["good film", "film good"]))


def test_an_n_gram_counts_once_or_each_time():
    once, twice = HashedText(4096, words=(1,)), HashedText(4096, words=(1,), repeats="count")
    assert torch.equal(*once(["good film", "good good film"]))
    assert twice(["good good film"]).abs().max() == pytest.approx(2 / 5**0.5)


def test_characters_see_parts_of_words_apart_from_words():
    hashed = HashedText(4096, words=(), characters=(3,))
    rows = hashed(["filming", "filmed", "queue"])
    assert rows[0] @ rows[1] > 0.3
    assert abs(rows[0] @ rows[2]) < 0.1
    assert hashed(["<fi"]).norm() > 0
    assert not torch.equal(hashed(["fil"]), HashedText(4096, words=(1,))(["fil"]))


def test_signs_are_fair_and_places_even():
    row = HashedText(64, words=(1,), repeats="count")([" ".join(f"word{n}" for n in range(20_000))])[0]
    counts = row / row.abs().max()
    assert abs(float(row.sum() / row.norm())) < 4 * 64**0.5  # sums of signs are near zero
    assert float(counts.std()) > 0.2
    # Inner products of hashed texts are unbiased: different words are on average at a right angle.
    rows = HashedText(256, words=(1,))([f"word{n}" for n in range(2000)])
    assert abs(float(rows.sum(0).pow(2).sum()) / 2000 - 1) < 0.5


def test_values_stay_what_they_are():
    """Recorded results rest on these numbers: another hash would be another feature."""
    row = HashedText(2048)(["A good film"])[0]
    assert row.nonzero().flatten().tolist() == [264, 668, 1367, 1660, 1724]
    assert row[row != 0].sign().tolist() == [1, 1, 1, 1, -1]


@pytest.mark.parametrize("words", [dict(width=0), dict(words=(0,)), dict(repeats="twice")], ids=str)
def test_odd_settings_are_refused(words):
    with pytest.raises(ConfigurationError):
        HashedText(**words)


def test_fourier_features_are_a_gaussian_kernel():
    rows = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = RandomFourier(4, 20_000, bandwidth=0.7, seed=3)(rows)
    kernel = torch.exp(-(torch.cdist(rows, rows) ** 2) / (2 * 0.7**2))
    assert torch.allclose(found @ found.T, kernel, atol=0.05)
    assert (found.norm(dim=1) < 2**0.5 + 1e-5).all()


def test_fourier_features_depend_on_the_public_seed_alone():
    rows = torch.zeros(1, 3)
    torch.manual_seed(5)
    first = RandomFourier(3, 8, seed=1)(rows)
    assert torch.equal(first, RandomFourier(3, 8, seed=1)(rows))
    assert not torch.equal(first, RandomFourier(3, 8, seed=2)(rows))
