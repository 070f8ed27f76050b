"""Packed rows taken apart: each text is a record, clipped with all others of its owner."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from fodp import PrivacyError
from fodp.data import unpack
from models_for_tests import clipped
from sessions_for_tests import session

TOKENS = torch.tensor([[5, 6, 7, 1, 0, 0], [8, 9, 9, 9, 4, 3], [2, 2, 5, 0, 0, 0]])
TEXTS = torch.tensor([[0, 0, 1, 1, -1, -1], [3, 3, 3, 3, 2, 2], [-1, 4, 4, -1, -1, -1]])
OWNERS = ["ann", "bob", "bob", "ann", "cat"]
EXPECTED = [[5, 6], [7, 1], [4, 3], [8, 9, 9, 9], [2, 5]]


class Model(nn.Module):
    """Attention over the texts' own tokens, and a guess of the next one."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10)

    def forward(self, tokens, mask):
        x = self.table(tokens)
        scores = (self.mix(x) @ x.mT).masked_fill(~mask[:, None], -1e9)
        return self.out(scores.softmax(-1) @ x)


def loss_fn(model, batch):
    tokens, mask = batch
    logits = model(tokens, mask)[:, :-1]
    each = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    return (each * mask[:, 1:]).sum(1)


def test_each_text_is_a_record_with_its_owner():
    data, owners = unpack(TOKENS, TEXTS, OWNERS)
    rows, mask = data.tensors
    assert owners == OWNERS
    assert [row[there].tolist() for row, there in zip(rows, mask, strict=True)] == EXPECTED
    assert (rows[~mask] == 0).all()


@pytest.mark.rule(4)
def test_the_sum_is_that_of_owners_clipped_one_by_one():
    torch.manual_seed(0)
    model = Model().double()
    data, owners = unpack(TOKENS, TEXTS, OWNERS)
    truth = []
    for name in dict.fromkeys(OWNERS):
        parts = []
        for text, owner in zip(EXPECTED, OWNERS, strict=True):
            if owner == name:
                row = torch.tensor([text])  # alone, without padding
                loss = loss_fn(model, (row, torch.ones_like(row, dtype=torch.bool))).sum()
                parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        truth.append(torch.stack(parts).mean(0))
    plan = fodp.Plan(
        sampling_rate=1.0, steps=1, lot_size=3, clip_norm=0.5, noise_multiplier=1e-9, delta=1e-5, method="dp-sgd",
        accountant="rdp", seed=0, unit="person", records_per_person=4,
    )  # fmt: skip
    found = session(model, loss_fn, data, plan, owners=owners).take_step()
    assert torch.allclose(found, clipped(torch.stack(truth), 0.5).sum(0), atol=1e-7)


@pytest.mark.parametrize(
    ("texts", "owners", "message"),
    [
        (TEXTS[:, :5], OWNERS, "must both have the shape"),
        (TEXTS, OWNERS[:4], "text 4 has no owner"),
        (TEXTS, [*OWNERS, "dan"], "each text must have tokens"),
        (torch.tensor([[0, 1, 0, -1, -1, -1]] * 3), ["ann", "bob"], "side by side"),
    ],
)
def test_texts_that_are_no_texts_are_refused(texts, owners, message):
    with pytest.raises(PrivacyError, match=message):
        unpack(TOKENS, texts, owners)
