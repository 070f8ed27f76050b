"""Every public feature is a transform of one record by itself: alone, in a batch, and beside other records."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import fodp.features
from fodp.data import adult
from fodp.features import Grouped, HashedText, PerExample, Prepared, RandomFourier, Scattering
from fodp.features.efficientnet_lite import network
from lite_weights_for_tests import made_up_weights

MODULES = [name for _, name, _ in pkgutil.iter_modules(fodp.features.__path__, "fodp.features.")]
IMAGES = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TEXTS = ["A good film.", "", "A bad, bad film!", "films", "good good"]
ROWS = {name: ["?"] * 5 for name in adult.NAMES} | {
    "age": ["30", "70", "999", "-4", "16"],
    "capital-gain": ["0", "5", "99999", "1", "2"],
    "capital-loss": ["0"] * 5,
    "education-num": ["1", "2", "3", "16", "5"],
    "hours-per-week": ["40", "1", "99", "12", "60"],
    "sex": ["Male", "Female", "Male", "Female", "?"],
    "income": ["<=50K", ">50K"] * 2 + ["<=50K"],
}


def table(rows):
    return adult.encoded({name: [cells[row] for row in rows] for name, cells in ROWS.items()}).tensors[0]


TRANSFORMS = {
    "scattering": (Scattering(16), IMAGES),
    "scattering, grouped": (nn.Sequential(Scattering(16), Grouped(27)), IMAGES),
    "per example": (PerExample(), IMAGES),
    "fourier": (RandomFourier(768, 32), IMAGES),
    "lite0": (Prepared(network(made_up_weights()), mean=[0.5], std=[0.5], side=32), IMAGES),
}


@pytest.mark.rule(30)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_by_themselves(name):
    transform, records = TRANSFORMS[name]
    with torch.no_grad():
        together = transform(records)
        others = transform(torch.cat([records[:1], 100 * torch.ones_like(records[1:])]))
        tolerance = 1e-5 * float(together.abs().max())
        assert torch.allclose(others[0], together[0], rtol=0, atol=tolerance)
        for place in range(len(records)):
            alone = transform(records[place : place + 1])[0]
            assert torch.allclose(alone, together[place], rtol=0, atol=tolerance)


@pytest.mark.rule(30)
@pytest.mark.parametrize("words", [{}, dict(characters=(3,)), dict(repeats="count")], ids=str)
def test_texts_by_themselves(words):
    transform = HashedText(32, **words)
    together = transform(TEXTS)
    for place, text in enumerate(TEXTS):
        assert torch.equal(transform([text])[0], together[place])


@pytest.mark.rule(30)
def test_rows_of_a_table_by_themselves():
    together = table(range(5))
    for row in range(5):
        assert torch.equal(table([row])[0], together[row])


@pytest.mark.parametrize("name", ["fodp.features", *MODULES])
def test_examples_run(name):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
