"""Statement, configuration, cards and ledger describe a run in the same sentences, written in one place."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.accounting.budget import Repetitions
from fodp.accounting.described import Described
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import card, summary
from fodp.methods import recipe
from fodp.tuning.search import Search, statement

KINDS = {
    "recipe": dict(method=recipe.METHOD, params={**recipe.PARAMS, "bands": 4}),
    "dp-sgd": dict(method="dp-sgd"),
    "exact": dict(method="dp-sgd", exact_noise=True),
    "person": dict(method="dp-sgd", unit="person", records_per_person=2),
    "two lots": dict(method="dp-sam"),
}


def plan(kind):
    base = dict(
        sampling_rate=0.1, steps=6, lot_size=4, clip_norm=1.0, noise_multiplier=6.0, delta=1e-5, accountant="rdp",
    )  # fmt: skip
    return fodp.Plan(**base, **KINDS[kind])


@pytest.mark.rule(32)
@pytest.mark.parametrize("kind", KINDS)
def test_all_papers_of_a_run_say_the_same(tmp_path, kind):
    the_plan = plan(kind)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    owners = [n // 2 for n in range(40)] if kind == "person" else None
    ledger = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(9.0, 1e-5))
    training = fodp.Trainer(
        nn.Linear(4, 2), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        TensorDataset(inputs, (inputs[:, 0] > 0).long()), the_plan, owners=owners, ledger=ledger,
    )  # fmt: skip
    training.fit()
    sentences = the_plan.described().sentences()
    assert len(sentences) == 4
    papers = [
        the_plan.statement(), the_plan.statement(steps=3), training.statement(), training.privacy_card()["statement"],
        card(summary(ledger)[0]),
    ]  # fmt: skip
    for paper in papers:
        lines = [line.strip() for line in paper.splitlines()]
        assert set(sentences) <= set(lines)
        about = [line for line in lines if line.startswith(("Sampling:", "Noise:", "Unit:"))]
        assert set(about) <= set(sentences)  # and nothing else is said about it
        assert "step's rate" not in paper


@pytest.mark.rule(32)
def test_the_configuration_and_the_ledger_of_a_command_line_run(tmp_path, capsys):
    """The default: the recipe, whose records take turns and whose noise is correlated."""
    out = tmp_path / "r"
    assert main(["train", "--epochs=2", "--target-epsilon=2", "--quiet", "--threads=1", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    the_plan = fodp.Plan(**config["plan"])
    assert the_plan.algorithm.turns > 1
    assert tuple(config["described"]) == the_plan.described().sentences()
    statement = (out / "privacy.txt").read_text().splitlines()
    capsys.readouterr()
    assert main(["ledger", "export", str(out / "ledger.sqlite"), "--dataset-name", _name(out)]) == 0
    exported = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for words in config["described"]:
        assert words in statement
        assert words in exported


def _name(out):
    (record,) = summary(Ledger(out / "ledger.sqlite"))
    return record["dataset"]


@pytest.mark.rule(32)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("recipe", ["take turns", "one of 4 groups", "probability 0.4 ", "correlated over 4 steps", "of the 3 steps"]),
        ("dp-sgd", ["in each step a lot is drawn", "probability 0.1 (6 lots)", "drawn afresh", "floating point"]),
        ("exact", ["exact, on a grid"]),
        ("person", ["each person is in it", "Of each person in a lot at most 2 of their records"]),
        ("two lots", ["2 lots are drawn", "each of them with probability 0.1 (12 lots)"]),
    ],
)
def test_the_sentences_tell_kinds_of_runs_apart(kind, said):
    text = "\n".join(plan(kind).described().sentences())
    assert [words for words in said if words not in text] == []
    assert ("independently of all other examples, lots and steps" in text) == (kind in ("dp-sgd", "exact", "two lots"))


def test_the_rates_that_are_said_are_those_that_are_accounted():
    """Not the plan's own, where records take turns: a record whose turn it is is drawn at so many times the rate."""
    recipes = plan("recipe")
    (phase,) = recipes.events()
    assert phase.events[0].sampling_rate == pytest.approx(0.4)
    assert "0.1" not in recipes.described().sampling()


def test_a_row_from_before_the_facts_were_written_down_takes_turns_for_bands():
    phases = plan("recipe").events()
    assert "correlated over 4 steps" in Described.of_run(phases, {"method": "fo-noise"}).noise()
    assert "drawn afresh" in Described.of_run(plan("dp-sgd").events(), {}).noise()


@pytest.mark.rule(32)
def test_a_sealed_search_and_the_calculator_say_them_too(capsys):
    recipes = plan("recipe")
    text = statement(Search(Repetitions(3.0), (recipes, recipes), 0)).splitlines()
    words = ["--noise-multiplier=6", "--sampling-rate=.1", "--steps=6", "--method=fo-noise", "--set=bands=4"]
    assert main(["epsilon", *words, "--accountant=rdp"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for said in (recipes.described().protected(), recipes.described().sampling(), recipes.described().noise()):
        assert said in text
        assert said in printed
