"""Warnings point at the user's line, whoever calls whom in between; numbers that nobody means are warned of."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp.support import checks

PUBLIC = dict(sampling_rate=0.1, steps=10, lot_size=20, clip_norm=1.0, delta=1e-5, method="dp-sgd")
PLAN = PUBLIC | dict(noise_multiplier=1.0)


def heard(work):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    return [(str(w.message), w.filename) for w in said]


def test_no_module_of_the_library_counts_levels_by_hand():
    folder = Path(fodp.__file__).parent
    found = [p for p in folder.rglob("*.py") if re.search(r"warnings\.warn\(", p.read_text()) and p.name != "checks.py"]
    assert found == []


class Mixed(nn.Module):
    """Its layers do not keep the examples apart in a way that rules know: the loop is taken, with a warning."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, inputs):
        return self.layer(inputs[:, None].transpose(0, 1))[0][0].sum(1)


def test_a_warning_points_at_the_line_that_called_the_library():
    def work():
        data = TensorDataset(torch.randn(20, 4))
        plan = fodp.Plan(**PLAN | dict(sampling_rate=0.5, steps=1))
        fodp.Trainer(nn.Linear(4, 1), lambda model, batch: mixed(model, batch[0]), data, plan).fit()

    def mixed(model, inputs):
        scores = model(inputs).flatten()
        return scores + scores.mean()

    said = [(text, file) for text, file in heard(work) if "one example at a time" in text]
    assert said
    assert {file for _, file in said} == {__file__}


def test_a_warning_from_nowhere_is_still_one():
    code = "from fodp.support import checks\nchecks.warn('hello')"
    said = heard(lambda: exec(compile(code, "x", "exec"), {"__name__": "fodp.somewhere"}))
    assert said[0][0] == "hello"
    assert said[0][1] == __file__


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fodp.Plan(**PLAN | dict(delta=0.5)), "delta 0.5 is above 0.001"),
        (lambda: fodp.Plan(**PLAN | dict(delta=1e-4, lot_size=1e5)), "delta 0.0001 is above 1e-06"),
        (lambda: fodp.Plan(**PLAN, params=dict(lr=1e9)), "lr 1e.09 moves weights by noise alone"),
        (lambda: fodp.Plan.calibrated(target_epsilon=1000, accountant="rdp", **PUBLIC), "promises next to nothing"),
        (lambda: fodp.Plan.calibrated(target_epsilon=0.0001, accountant="rdp", **PUBLIC), "hardly anything is learnt"),
    ],
)
def test_numbers_that_nobody_means_are_warned_of_once(make, words):
    said = heard(make)
    assert len(said) == 1
    assert re.search(words, said[0][0])
    assert said[0][1] == __file__


def test_usual_numbers_are_not_warned_of():
    def work():
        for delta in (1e-3, 1e-5, 1e-7):
            plan = fodp.Plan(**PLAN | dict(delta=delta))
        fodp.Plan(**plan.to_dict() | dict(params=dict(lr=100)))
        for target in (0.1, 1, 10, 50):
            fodp.Plan.calibrated(target_epsilon=target, accountant="rdp", **PUBLIC)

    assert heard(work) == []


def test_all_problems_are_listed_only_where_there_are_several():
    assert checks.listed(["one"]) == "one"
    assert checks.listed(["one", "two"]) == "2 things to mend: (1) one; (2) two"
