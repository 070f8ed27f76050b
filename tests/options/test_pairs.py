"""Every option with every option, and with every method: three steps, or a refusal by the table of conflicts."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.methods import METHODS
from fodp.options import KINDS, OPTIONS, conflicts
from fodp.options.conflicts import CONFLICTS, refuse
from fodp.options.table import words_of

ROOT = Path(__file__).parents[2]
DATA = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2)
# A flat spelling for every choice that is no word; other numbers of an option are left at their defaults.
VALUES = {
    "quantile": [0.5],
    "shape": [(0.5, 1.0)],
    "noise_schedule": [((0, 1.0), (1, 2.0))],
    "clip_schedule": [((0, 1.0), (1, 2.0))],
    "lr": [0.1],
}
CHOICES = [
    *((kind.name, word) for name, kind in KINDS.items() for word in words_of(name) if word != kind.usual),
    *((name, value) for name, values in VALUES.items() for value in values),
    ("lr_schedule", "linear"),
    ("rate_rule", "transcript"),
    ("exact_noise", True),  # of the plan
]
DOORS = {"own loop"}  # words of doors: who tries them are the tests of that door
BANDS = {"fo-noise": dict(bands=3)}  # with one band it is DP-SGD


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def refused_by_the_table(method, *choices):
    """Three steps of them together; whether the table has refused them."""
    fields = {name: value for name, value in choices if name == "exact_noise"}
    params = {**BANDS.get(method, {}), **{name: value for name, value in choices if name not in fields}}
    sizes = dict(public_size=20, batch=6, steps=3, noise_multiplier=1.0, seed=0)
    try:
        plan = fodp.Plan(**sizes, method=method, params=params, **fields)
    except fodp.ConfigurationError as refusal:
        said = str(refusal)
    else:
        said = ""
    if said:
        assert any(f"do not go together: {c.because}; {c.instead}" in said for c in CONFLICTS), said
        return True
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    training = fodp.Trainer(model, losses, DATA, plan, public_score=lambda: 0.0)
    for _ in range(3):
        training.take_step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return False


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")
def test_every_pair_of_options_trains_or_is_refused_by_the_table():
    pairs = [pair for pair in combinations(CHOICES, 2) if pair[0][0] != pair[1][0]]
    refused = [pair for pair in pairs if refused_by_the_table("dp-sgd", *pair)]
    assert 0 < len(refused) < len(pairs) / 10


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")
def test_every_option_with_every_method_trains_or_is_refused_by_the_table():
    pairs = [(method, choice) for method in METHODS for choice in CHOICES]
    refused = [pair for pair in pairs if refused_by_the_table(*pair)]
    assert 0 < len(refused) < len(pairs) / 10


def test_every_row_of_the_table_of_options_is_tried():
    tried = {KINDS[row.kind].name for row in OPTIONS if row.word is None}
    assert tried == VALUES.keys()


def test_a_conflict_names_both_the_reason_and_the_way_out():
    for conflict in CONFLICTS:
        refuse({conflict.one: "x"})
        refuse({conflict.other: "y"})
        with pytest.raises(fodp.ConfigurationError) as raised:
            refuse({conflict.one: "the one", conflict.other: "the other"})
        assert str(raised.value) == (
            f"the one and the other do not go together: {conflict.because}; {conflict.instead}"
        )


def test_every_word_of_the_table_is_somebodys_feature():
    """A word that nobody says would refuse nothing."""
    given = [{name: value} for name, value in CHOICES if name != "exact_noise"]
    methods = [METHODS["dp-sgd"].from_dict(params) for params in (*given, dict(filter="doppler", update="adambc"))]
    methods += [method.from_dict(BANDS.get(name, {})) for name, method in METHODS.items()]
    exact = fodp.Plan(public_size=20, batch=6, steps=3, noise_multiplier=1.0, exact_noise=True)
    said = {word for source in (*methods, exact) for word in source.features} | DOORS
    assert {word for conflict in CONFLICTS for word in (conflict.one, conflict.other)} <= said


def test_the_page_is_generated_from_the_table():
    page = (ROOT / "docs/conflicts.md").read_text(encoding="utf-8")
    assert page == conflicts.markdown()
    printed = subprocess.run(
        [sys.executable, "-m", "fodp.options.conflicts"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == page
