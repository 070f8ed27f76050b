"""How wide unpacked texts are: a public number, whatever the longest text of anybody is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from fodp import DataError, PrivacyError
from fodp.data import packing
from sessions_for_tests import session

TOKENS = torch.tensor([[5, 6, 7, 1, 0, 0], [8, 9, 9, 9, 4, 3]])
TEXTS = torch.tensor([[0, 0, 1, 1, -1, -1], [3, 3, 3, 3, 2, 2]])
OWNERS = ["ann", "bob", "bob", "cat"]


class Reader(nn.Module):
    """A mean over all positions: harmless where their number is public."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(10, 6), nn.Linear(6, 2)

    def forward(self, words):
        return self.head(self.words(words).mean(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), torch.ones(len(batch[0]), dtype=torch.long), reduction="none")


def released(tokens, texts, owners):
    """The sum over people, with next to no noise."""
    data, names = packing.unpack(tokens, texts, owners)
    plan = fodp.Plan(
        sampling_rate=1.0, steps=1, lot_size=3, clip_norm=0.5, noise_multiplier=1e-9, delta=1e-5, method="dp-sgd",
        accountant="rdp", seed=0, unit="person", records_per_person=4,
    )  # fmt: skip
    return session(Reader(), loss_fn, data, plan, owners=names).take_step()


@pytest.mark.rule(33)
def test_one_person_more_changes_no_record_of_the_others():
    """One text that fills its row is added: the others are what they were, and the sum moves by at most C."""
    more = torch.cat([TOKENS, torch.tensor([[1, 2, 3, 4, 5, 6]])]), torch.cat([TEXTS, torch.full((1, 6), 4)])
    before, _ = packing.unpack(TOKENS, TEXTS, OWNERS)
    after, _ = packing.unpack(*more, [*OWNERS, "dan"])
    assert all(torch.equal(a, b[:4]) for a, b in zip(before.tensors, after.tensors, strict=True))
    moved = released(*more, [*OWNERS, "dan"]) - released(TOKENS, TEXTS, OWNERS)
    assert float(moved.norm()) <= 0.5 * (1 + 1e-4)


@pytest.mark.rule(33)
def test_a_declared_length_is_the_width():
    for length in (4, 9):
        data, _ = packing.unpack(TOKENS, TEXTS, OWNERS, length=length)
        assert [column.shape for column in data.tensors] == [(4, length)] * 2
    with pytest.raises(DataError, match=r"text 3 has more tokens than length=3: cut texts"):
        packing.unpack(TOKENS, TEXTS, OWNERS, length=3)
    with pytest.raises(PrivacyError, match="length"):
        packing.unpack(TOKENS, TEXTS, OWNERS, length=0)


def test_no_texts_are_as_wide_as_the_rows():
    data, owners = packing.unpack(TOKENS, torch.full_like(TEXTS, -1), [])
    assert [column.shape for column in data.tensors] == [(0, 6)] * 2
    assert owners == []
