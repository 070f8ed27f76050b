"""Losses per example: equal to what each example has alone, whatever the others' lengths."""

import pytest
import torch
from torch.nn import functional as F

import fodp
from fodp import PrivacyError, losses


def text(rows=4, length=7, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(vocabulary, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, length - row :] = losses.IGNORED
    return torch.randn(rows, length, vocabulary, generator=generator, dtype=torch.float64).float(), labels


@pytest.mark.rule(20)
@pytest.mark.parametrize("shift", [0, 1])
def test_a_records_loss_is_the_mean_over_its_own_tokens(shift):
    logits, labels = text()
    found = (losses.causal_lm if shift else losses.tokens)(logits, labels)
    for row in range(len(labels)):
        mine = logits[row, : logits.shape[1] - shift], labels[row, shift:]
        assert found[row].item() == pytest.approx(F.cross_entropy(*mine).item(), rel=1e-5)


def test_a_record_without_tokens_has_no_loss_and_no_gradient():
    logits, labels = text()
    labels[2] = losses.IGNORED
    logits.requires_grad_()
    found = losses.causal_lm(logits, labels)
    found.sum().backward()
    assert found[2] == 0
    assert torch.equal(logits.grad[2], torch.zeros_like(logits[2]))
    assert logits.grad.isfinite().all()


def test_one_label_per_example():
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(fodp.losses.classes(logits, labels), F.cross_entropy(logits, labels, reduction="none"))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(PrivacyError, match="examples, positions, classes"):
        losses.tokens(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
