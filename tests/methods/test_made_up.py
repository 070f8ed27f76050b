"""Made-up records: of the data only shapes and types are seen, and labels and words fit the model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import ConfigurationError
from fodp.clipping.maps import Kronecker
from fodp.data.models import build
from fodp.options.made_up import made_up, pink, zipf


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def forms(*columns):
    return [column[:0] for column in columns]


LABELS = torch.zeros(4, dtype=torch.int64)


def test_records_have_the_form_of_the_data_and_labels_of_the_model():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 6, 7))
    images, labels = made_up(forms(torch.zeros(4, 3, 8, 6), LABELS), model, losses, "auto", 0, 500)
    assert images.shape == (500, 3, 8, 6)
    assert labels.unique().tolist() == list(range(7))
    assert labels.dtype == torch.int64
    again = made_up(forms(torch.zeros(4, 3, 8, 6), LABELS), model, losses, "auto", 0, 500)
    other = made_up(forms(torch.zeros(4, 3, 8, 6), LABELS), model, losses, "auto", 1, 500)
    assert torch.equal(again[0], images)
    assert not torch.equal(other[0], images)


def test_pink_noise_has_unit_variance_long_waves_and_channels_that_agree():
    images = pink(400, (3, 16, 16), torch.Generator().manual_seed(0))
    assert images.square().mean().sqrt() == pytest.approx(1, abs=0.02)
    neighbours = (images[..., 1:] * images[..., :-1]).mean()
    far = (images[..., 8:] * images[..., :-8]).mean()
    assert 0.5 < neighbours < 1
    assert far < 0.2
    assert (images[:, 0] * images[:, 1]).mean() == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(
    ("shape", "kind", "is_image"),
    [((3072,), "auto", True), ((784,), "auto", True), ((9,), "auto", False), ((100,), "normal", False),
     ((64,), "pink", True), ((30,), "auto", False), ((5, 7), "auto", False), ((1, 8, 8), "normal", False)],
)  # fmt: skip
def test_flat_squares_are_images_unless_they_are_small(shape, kind, is_image):
    x, _ = made_up(forms(torch.zeros(2, *shape), torch.zeros(2)), nn.Linear(2, 2), losses, kind, 0, 400)
    flat = x.flatten(1)
    alike = (flat[:, 1:] * flat[:, :-1]).mean()
    assert (alike > 0.3) == is_image


def test_what_is_no_image_is_not_made_one():
    with pytest.raises(ConfigurationError, match="give public_sample"):
        made_up(forms(torch.zeros(2, 7), LABELS), nn.Linear(7, 2), losses, "pink", 0)


def test_words_are_those_of_the_largest_table_and_the_first_come_most():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(40, 6), nn.Embedding(5, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, tokens):
            return self.out((self.words(tokens) + self.places(torch.arange(5))).mean(1))

    model = Text()
    data = TensorDataset(torch.randint(0, 40, (30, 5)), torch.randint(0, 3, (30,)))
    tokens, labels = made_up(forms(*data.tensors), model, losses, "auto", 0)
    assert tokens.max() < 40
    assert tokens.dtype == torch.int64
    assert (tokens == 0).sum() > 4 * (tokens == 9).sum()
    assert labels.max() == 2
    plan = fodp.Plan(
        sampling_rate=0.5, steps=3, lot_size=15, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        method="dp-sgd", params=dict(shape="kronecker", shape_sides="both"),
    )  # fmt: skip
    trainer = fodp.Trainer(model, losses, data, plan)
    trainer.fit()
    factors = dict(zip(trainer.source.engine.layout.names, trainer.session.scaling.current, strict=True))
    words = factors["words.weight"]
    assert isinstance(words, Kronecker)
    assert words.left.is_diagonal
    assert words.left.diagonal[0] < 0.5 * words.left.diagonal[-1]  # words that come often count for less
    assert words.mean_square == pytest.approx(1)


def test_zipf_falls_as_one_over_the_rank():
    drawn = zipf((20000,), 10, torch.Generator().manual_seed(0)).bincount(minlength=10).double()
    assert drawn[0] / drawn[1] == pytest.approx(2, rel=0.1)
    assert drawn[0] / drawn[9] == pytest.approx(10, rel=0.15)


def test_masks_are_true_and_an_error_says_where_it_comes_from():
    mask, _ = made_up(forms(torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2)), nn.Linear(4, 2), losses, "auto", 0, 3)
    assert mask.all()
    with pytest.raises(RuntimeError) as raised:
        made_up(forms(torch.zeros(2, 9), LABELS), nn.Linear(4, 2), losses, "auto", 0)
    assert "made-up records" in raised.value.__notes__[0]


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_images_train_with_either_model(model):
    card = SimpleNamespace(shape=(3, 8, 8), features=192, classes=4)
    data = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(0, 4, (40,)))
    plan = fodp.Plan(
        sampling_rate=0.5, steps=3, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        method="dp-sgd", params=dict(shape="kronecker", shape_every=2, shape_sides="both"),
    )  # fmt: skip
    trainer = fodp.Trainer(build(model, card), losses, data, plan)
    trainer.fit()
    assert all(isinstance(factor, Kronecker) for factor in trainer.session.scaling.current)
