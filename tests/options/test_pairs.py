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
from fodp.options.conflicts import CONFLICTS, DOORS, refuse
from fodp.options.table import words_of
from ranks_for_tests import in_ranks

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
FIELDS = ("exact_noise", "unit")  # of the plan
PEOPLE = ("unit", "person")
BANDS = {"fo-noise": dict(bands=3)}  # with one band it is DP-SGD


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_trainer(model, plan):
    """Three steps of the Trainer."""
    training = fodp.Trainer(model, losses, DATA, plan, public_score=lambda: 0.0)
    for _ in range(3):
        training.take_step()


def by_own_loop(model, plan):
    """Three steps of a loop of one's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(model, optimizer, DATA, plan)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loader.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
        optimizer.step()


def refused_by_the_table(method, *choices, train=by_trainer):
    """Whether the table has refused a plan of these choices; if not, three steps are trained."""
    fields = {name: value for name, value in choices if name in FIELDS}
    fields |= dict(records_per_person=2) if "unit" in fields else {}
    params = {**BANDS.get(method, {}), **{name: value for name, value in choices if name not in fields}}
    sizes = dict(public_size=20, batch=6, steps=3, noise_multiplier=1.0, seed=0)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    try:
        plan = fodp.Plan(**sizes, method=method, params=params, **fields)
        train(model, plan)
    except fodp.ConfigurationError as refusal:
        said = str(refusal)
        assert any(f" do not go together: {c.because}; {c.instead}" in said for c in CONFLICTS), said
        return True
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return False


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")  # of odd pairs; refusals are what is asked
def test_every_pair_of_options_trains_or_is_refused_by_the_table():
    pairs = [pair for pair in combinations(CHOICES, 2) if pair[0][0] != pair[1][0]]
    refused = [pair for pair in pairs if refused_by_the_table("dp-sgd", *pair)]
    assert 0 < len(refused) < len(pairs) / 10


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")  # of odd pairs; refusals are what is asked
def test_every_option_with_every_method_trains_or_is_refused_by_the_table():
    pairs = [(method, choice) for method in METHODS for choice in CHOICES]
    refused = [pair for pair in pairs if refused_by_the_table(*pair)]
    assert 0 < len(refused) < len(pairs) / 10


ALONE = [*((method,) for method in METHODS), *(("dp-sgd", choice) for choice in (*CHOICES, PEOPLE))]


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")  # of odd pairs; refusals are what is asked
def test_a_loop_of_ones_own_with_every_option_and_method_trains_or_is_refused_by_the_table():
    refused = [chosen for chosen in ALONE if refused_by_the_table(*chosen, train=by_own_loop)]
    assert ("dp-sgd", PEOPLE) in refused
    assert len(refused) < len(ALONE) / 2


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")  # of odd pairs; refusals are what is asked
def test_several_processes_with_every_option_and_method_train_or_are_refused_by_the_table():
    """On both ranks alike."""

    def of_rank(_):
        return [chosen for chosen in ALONE if refused_by_the_table(*chosen)]

    first, second = in_ranks(2, of_rank)
    assert first == second == [("dp-sgd", PEOPLE)]  # without owners


def own():
    """An optimizer of the user's for the model of `by_trainer`."""
    return lambda model: {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def of(**given):
    """These arguments of the Trainer, whatever the model."""
    return lambda model: given


SCHEDULER = of(scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
GIVEN = [  # a plan, what the Trainer is given beside it, and the two that the refusal names
    ("dp-sgd", dict(unit="person", records_per_person=2), of(), "unit='person'", "a run without owners"),
    ("dp-sgd", {}, of(owners=list(range(20))), "unit='record'", "owners"),
    ("sa-dpsgd", {}, of(), "sa-dpsgd, which scores its proposals on public data,", "a run without public_score"),
    ("dp-adam", {}, own(), "dp-adam with its own update", "an optimizer of yours"),
    ("dp-sgd", dict(params=dict(lr=5.0)), own(), "lr=5.0 in params", "an optimizer of yours"),
    ("dp-sgd", dict(params=dict(auto_ratio=1.0)), own(), "auto_ratio=1.0 in params", "an optimizer of yours"),
    ("dp-sgd", dict(params=dict(lr_schedule="linear")), own(), "lr_schedule='linear' in params", "an optimizer"),
    ("dp-sgd", dict(params=dict(rate_rule="transcript")), own(), "rate_rule='transcript' in params", "an optimizer"),
    ("dp-sgd", dict(params=dict(lr_schedule="linear")), SCHEDULER, "lr_schedule in params", "a scheduler"),
    ("dp-sgd", dict(params=dict(rate_rule="transcript")), SCHEDULER, "rate_rule in params", "a scheduler"),
]


@pytest.mark.rule(14)
@pytest.mark.filterwarnings("ignore")  # of odd pairs; refusals are what is asked
@pytest.mark.parametrize(("method", "fields", "given", "one", "other"), GIVEN)
def test_what_the_trainer_was_given_is_refused_by_the_table_before_anything_is_charged(
    tmp_path, method, fields, given, one, other
):
    ledger = fodp.Ledger(tmp_path / "ledger.sqlite", dataset="d", budget=(10.0, 1e-3))
    model = nn.Linear(3, 2)
    plan = fodp.Plan(public_size=20, batch=6, steps=3, noise_multiplier=1.0, method=method, **fields)
    with pytest.raises(fodp.ConfigurationError) as refused:
        fodp.Trainer(model, losses, DATA, plan, ledger=ledger, **given(model))
    assert str(refused.value).startswith(f"{one} and {other}")
    assert ledger.left("d") == 1.0
    plain = fodp.Plan(public_size=20, batch=6, steps=3, noise_multiplier=1.0, method="dp-sgd")
    if "owners" not in given(model):
        fodp.Trainer(model, losses, DATA, plain, **given(model))  # goes with a plain plan


def test_every_row_of_the_table_of_options_is_tried():
    tried = {KINDS[row.kind].name for row in OPTIONS if row.word is None}
    assert tried == VALUES.keys()


def test_a_conflict_names_both_the_reason_and_the_way_out():
    for conflict in CONFLICTS:
        assert conflict.one != conflict.other
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
    sizes = dict(public_size=20, batch=6, steps=3, noise_multiplier=1.0)
    plans = [fodp.Plan(**sizes, exact_noise=True), fodp.Plan(**sizes, unit="person", records_per_person=2)]
    plans += [fodp.Plan(**sizes, method=name) for name in METHODS]
    said = {word for source in (*methods, *plans) for word in source.features} | DOORS.keys()
    assert {word for conflict in CONFLICTS for word in (conflict.one, conflict.other)} <= said


def test_every_word_of_a_door_has_a_row_and_is_said_by_a_door():
    doors = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "src/fodp").rglob("*.py") if file.stem != "conflicts"
    )
    assert [word for word in DOORS if f'"{word}": ' not in doors] == []
    assert DOORS.keys() <= {word for conflict in CONFLICTS for word in (conflict.one, conflict.other)}


def test_the_page_is_generated_from_the_table():
    page = (ROOT / "docs/conflicts.md").read_text(encoding="utf-8")
    assert page == conflicts.markdown()
    printed = subprocess.run(
        [sys.executable, "-m", "fodp.options.conflicts"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == page
