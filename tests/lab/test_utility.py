"""The utility comparison: its data and models, its rows and rounds, its goals and its page."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fodp.cli.main import main
from fodp.clipping import Clipper
from fodp.data import CARDS
from fodp.data.models import cross_entropy
from fodp.errors import DataError, PrivacyError
from fodp.methods import METHODS
from fodp_lab.judging.utility import MET, MISSED, UNKNOWN, Utility
from fodp_lab.paper import fair, models, text, utility
from fodp_lab.paper.code_version import code_of, code_version
from fodp_lab.paper.execute import execute
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import RunSpec
from fodp_lab.paper.variants import augmenting
from fodp_lab.report import utility as utility_page
from records_for_tests import record

ROOT = Path(__file__).parents[2]
DIGITS = utility.TRIALS[0]
BASELINE, FAN_IN, UNTUNED = "DP-SGD", "DP-SGD, fan-in", "DP-SGD, fan-in, untuned"
FOLLOWED, AVERAGED = "DP-SGD, fan-in, rate by transcript, untuned", "DP-SGD, fan-in, EMA, untuned"
HALVED = next(trial for trial in utility.TRIALS if trial.setting.sampling_rate == 0.008)


# ---- sentences ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sentences(tmp_path):
    """Two small files in the form of the real ones, and a card of their size."""
    lines = [f"{i % 2}\t{'good' if i % 2 else 'bad'} film number{i}" for i in range(30)]
    (tmp_path / "sst2-train.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    others = [f"{i % 2}\t{'good' if i % 2 else 'bad'} book number{i}" for i in range(6)]
    (tmp_path / "sst2-dev.tsv").write_text("\n".join(["label\tcontent", *others]) + "\n")
    return tmp_path, replace(text.SST2, train_size=20, test_size=5)


def test_words_are_public_numbers():
    first = text.numbered("A film , a film")
    assert len(first) == text.LENGTH
    assert first[0] == first[3]
    assert first[1] == first[4]
    assert first[5:] == [0] * (text.LENGTH - 5)
    assert first[0] == text.numbered("a")[0] == 1 + 0xE8B7BE43 % 4095  # CRC-32 of "a", on every machine
    assert text.numbered("") == [0] * text.LENGTH
    assert text.numbered("x " * 100) == text.numbered("x")[:1] * text.LENGTH
    assert all(1 <= n < text.BUCKETS for n in text.numbered(" ".join(map(str, range(24)))))


def test_sentences_are_split_in_order(sentences):
    splits = text.load(*sentences)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (20, 10, 5)
    assert splits.train[1][0].tolist() == text.numbered("good film number1")
    assert splits.validation[0][0].tolist() == text.numbered("bad film number20")
    assert [int(label) for _, label in splits.test] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: (folder / "sst2-dev.tsv").unlink(), "sst2-dev.tsv"),
        (lambda folder: (folder / "sst2-train.tsv").write_text("label\tsentence\n2\tgood\n"), "line 2"),
        (lambda folder: (folder / "sst2-train.tsv").write_text("label\tsentence\n1 good\n"), "line 2"),
        (lambda folder: (folder / "sst2-train.tsv").write_text("label\tsentence\n1\tgood\n"), "20 are needed"),
    ],
)
def test_wrong_files_are_refused(sentences, change, match):
    change(sentences[0])
    with pytest.raises(DataError, match=match):
        text.load(*sentences)


def test_the_librarys_cards_do_not_know_the_sentences():
    assert text.SST2.name not in CARDS  # records of all methods are known by those cards


# ---- models ------------------------------------------------------------------------------------------------------


def transformer():
    torch.manual_seed(0)
    return models.make("text-transformer", text.SST2)


def some_words(n=12):
    made = torch.randint(1, text.BUCKETS, (n, text.LENGTH), generator=torch.Generator().manual_seed(1))
    for row in range(n):
        made[row, 2 + 2 * row :] = 0
    return made


def test_padding_has_no_effect():
    model, words = transformer(), some_words()
    found = model(words)
    with torch.no_grad():
        model.embed.weight[0] = 7.0
    assert torch.equal(model(words), found)
    longer = words.clone()
    longer[0, 2] = 5  # a word where padding was
    assert not torch.allclose(model(longer)[0], found[0])
    model.positions = model.positions[:6]
    assert torch.allclose(model(words[:3, :6]), found[:3], atol=1e-6)


def test_a_sentence_without_words_has_scores():
    model = transformer()
    scores = model(torch.zeros(1, text.LENGTH, dtype=torch.long))
    scores.sum().backward()
    assert torch.isfinite(scores).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", ["text-transformer", "small-cnn"])
def test_models_take_the_fast_path_and_it_is_right(name):
    card = text.SST2 if name == "text-transformer" else CARDS["cifar10"]
    inputs = some_words() if name == "text-transformer" else torch.randn(12, 3, 32, 32, dtype=torch.float64)
    batch = inputs, torch.arange(12) % 2
    sums = {}
    for engine in ("auto", "loop"):
        torch.manual_seed(0)
        clipper = Clipper(models.make(name, card).double(), cross_entropy, engine=engine, seed=0)
        sums[engine] = clipper.clipped_sum(batch, 0.1)
        assert (clipper.path == "loop") == (engine == "loop")
    assert torch.allclose(sums["auto"], sums["loop"], atol=1e-9)


def test_digits_have_a_part_for_choosing():
    splits = models.splits(models.DIGITS, "mlp")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (1000, 437, 360)


# ---- what a record is known by -----------------------------------------------------------------------------------


def test_runs_of_the_fair_comparison_keep_their_keys():
    records = Records(ROOT / "results" / "fair.jsonl")
    comparison = fair.Comparison(fair.ROWS, records)
    for setting in fair.SETTINGS:
        assert len(comparison.accuracies(comparison.rows["DP-SGD"], setting)) == 10


def test_committed_records_are_of_this_code(monkeypatch):
    """What the runner asks: were it otherwise, it would compute 1,743 runs again."""
    from fodp_lab.paper import twin  # registers its method, which other tests must not see

    monkeypatch.setitem(METHODS, twin.Twin.name, twin.Twin)  # another test takes it out again
    known = {(r["algorithm"], r["code"]) for r in Records(ROOT / "results" / "fair.jsonl")}
    assert len(known) > 15
    outdated = {method for method, code in known if code != code_version(method)}
    assert outdated == {"dp-adam-ac"}  # it has changed since; its row is computed again when `fair` is


def test_code_is_told_by_words_and_not_by_numbers():
    def of(**params):
        return code_of(RunSpec(dataset="digits", method="dp-sgd", params=params))

    assert of() == of(lr=0.3) == code_version("dp-sgd")
    assert len({of(), of(clip="per-layer"), of(shape="fan-in"), of(shape="fan-in", lr="auto")}) == 4
    assert of(shape="fan-in", width=4.0) == of(shape="fan-in")


def test_a_run_has_the_plan_that_calibration_chose():
    """Not its noise alone: bands that were left to the plan had been one again, at a third of the ε."""
    row = next(row for row in HALVED.rows if row.method == utility.FRACTIONAL_NOISE)
    spec = row.spec(HALVED.setting, HALVED.steps, seed=3).with_(params=dict(lr=0.7))
    plan = spec.plan()
    assert plan.params["bands"] > 8
    assert 0.99 * HALVED.setting.epsilon < plan.epsilon() <= HALVED.setting.epsilon
    assert (plan.seed, plan.params["lr"]) == (3, 0.7)
    assert spec.with_(params=dict(lr="auto")).plan().noise_multiplier == plan.noise_multiplier


def test_every_recorded_row_has_spent_its_epsilon_and_no_more():
    """Of the runs that a comparison uses: some lines of the file are of another plan, as results/README.md says."""
    folder = ROOT / "results"
    suite = utility.Suite(Records(folder / "utility.jsonl", beside=utility.taken_over(folder)))
    used = [
        found
        for trial, comparison in suite.comparisons.items()
        for row in comparison.rows.values()
        for spec in comparison.final(row, trial.setting)
        if (found := suite.records.get(spec.key)) is not None and spec.target_epsilon is not None
    ]
    assert len(used) > 500
    wrong = [r["key"] for r in used if not 0.98 <= r["final_epsilon"] / r["run"]["target_epsilon"] <= 1]
    assert wrong == []


def test_records_beside_a_file_are_found_and_not_listed(tmp_path):
    mine, other = {"key": "a", "code": "new"}, [{"key": "a", "code": "old"}, {"key": "b", "code": "old"}]
    records = Records(tmp_path / "r.jsonl", beside=other)
    assert records.get("a", "old") == other[0]
    assert records.get("a", "new") is None
    assert len(records) == 0
    records.append(mine)
    assert records.get("a") == records.get("a", "new") == mine
    assert records.get("a", "old") == other[0]
    assert records.get("b") == other[1]
    assert list(records) == [mine]


def test_runs_of_the_fair_comparison_are_taken_over():
    known = {record["key"] for record in utility.taken_over(ROOT / "results")}
    trial = next(t for t in utility.TRIALS if t.setting == fair.Setting("cifar10", 8.0))
    baseline = next(row for row in trial.rows if row.label == fair.BASELINE)
    comparison = utility.Comparison([baseline], Records(ROOT / "results" / "fair.jsonl"), trial.protocol())
    assert {spec.key for spec in comparison.final(baseline, trial.setting)} <= known


# ---- rows and rounds ---------------------------------------------------------------------------------------------


def suite(tmp_path, **words):
    return utility.Suite(Records(tmp_path / "none.jsonl"), **words)


def test_rows_that_this_code_does_not_know_are_left_out_with_a_note(tmp_path, monkeypatch):
    odd = (fair.Row("odd", "dp-sgd", dict(shape="round")), fair.Row("odder", "dp-odd"), fair.Row(BASELINE, "dp-sgd"))
    monkeypatch.setattr(utility, "TRIALS", (replace(DIGITS, rows=odd),))
    made = suite(tmp_path)
    assert [list(c.rows) for c in made.comparisons.values()] == [[BASELINE]]
    assert len(made.left_out_notes()) == 2
    assert "shape must be one of" in made.left_out_notes()[0]


def test_fractional_noise_takes_part_where_accounting_promises_something(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "TRIALS", (DIGITS, HALVED))
    labels = [set(c.rows) for c in suite(tmp_path).comparisons.values()]
    assert DIGITS.promise() == pytest.approx(1.0)
    assert HALVED.promise() < 0.5
    assert not any(label.startswith("fractional noise") for label in labels[0])
    assert sum(label.startswith("fractional noise") for label in labels[1]) == 5


def test_an_untuned_row_has_no_search_but_a_score_on_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "TRIALS", (DIGITS,))
    comparison = suite(tmp_path).comparisons[DIGITS]
    row = comparison.rows[UNTUNED]
    assert comparison.search(row, DIGITS.setting, 1) == comparison.search(row, DIGITS.setting, 3) == []
    (scored,) = comparison.search(row, DIGITS.setting, 2)
    assert (scored.scored_on, scored.seed, scored.steps) == ("validation", fair.SEARCH_SEED, DIGITS.steps)
    assert math.isnan(comparison.choice(row, DIGITS.setting).validation)
    final = comparison.final(row, DIGITS.setting)
    assert [spec.seed for spec in final] == list(range(1, 11))
    assert {spec.scored_on for spec in final} == {"test"}
    assert final[0].params == dict(shape="fan-in", lr="auto")
    assert (final[0].sampling_rate, final[0].lot_size, final[0].plan_steps) == (0.1, 100.0, 400)


def test_every_trial_has_the_baseline_the_recipe_and_a_ceiling_and_the_cheapest_come_first():
    for trial in utility.TRIALS:
        assert {BASELINE, "the recipe", "not private"} <= {row.label for row in trial.rows}
    assert len({trial.name for trial in utility.TRIALS}) == len(utility.TRIALS)
    seconds = [trial.steps * trial.seconds for trial in utility.TRIALS]
    assert seconds[0] == min(seconds)
    assert max(seconds) <= 12


def test_augmented_views_are_another_run_of_the_recipe():
    trial = next(trial for trial in utility.TRIALS if trial.setting.model == "small-cnn")
    rows = {row.label: row for row in trial.rows}
    plain, views = (
        rows[label].spec(trial.setting, trial.steps) for label in ("the recipe", "the recipe, 4 augmented views")
    )
    assert views.to_dict() == {**plain.to_dict(), "variant": "4 augmented views"}
    card = CARDS[trial.setting.dataset]
    assert augmenting(plain.variant, card) == {}
    words = augmenting(views.variant, card)
    assert (words["copies"], words["augment"].flip) == (4, True)
    assert not augmenting(views.variant, CARDS["svhn"])["augment"].flip  # a mirrored 2 is no 2


def test_an_estimate_goes_by_what_recorded_runs_took(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "TRIALS", (replace(DIGITS, rows=(fair.Row(BASELINE, "dp-sgd"),)),))
    made = suite(tmp_path)
    (trial,) = made.comparisons
    steps = 8 * 100 + 400 * (3 + 10)
    assert made.estimate()[trial] == pytest.approx(steps * trial.seconds)
    spec = trial.rows[0].spec(trial.setting, trial.steps)
    made.records.append(record(spec, 0.5, np.random.default_rng(0)))  # 30 seconds
    assert made.estimate()[trial] == pytest.approx(steps * 30 / 400)
    assert "minutes with 2 processes" in made.estimated(2)[-1]


def test_without_final_runs_the_test_set_is_not_touched(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, lambda label: 0.5, seeds=2)
    made = utility.Suite(Records(tmp_path / "utility.jsonl"))
    specs = [spec for _, specs in made.rounds(only_search=True) for spec in specs]
    assert specs
    assert {spec.scored_on for spec in specs} == {"validation"}


# ---- goals and page ----------------------------------------------------------------------------------------------


def write(folder, monkeypatch, tops, seeds=10):
    """Records of two trials; `tops(label)` is where a row ends in both."""
    keep = {BASELINE, FAN_IN, UNTUNED, FOLLOWED, AVERAGED, "the recipe", "not private", "fractional noise",
            "fractional noise, fan-in", "fractional noise, fan-in, untuned"}  # fmt: skip
    trials = tuple(replace(t, rows=tuple(r for r in t.rows if r.label in keep)) for t in (DIGITS, HALVED))
    monkeypatch.setattr(utility, "TRIALS", trials)
    records, rng = Records(folder / "utility.jsonl"), np.random.default_rng(1)
    for comparison in utility.Suite(records, seeds=seeds).comparisons.values():
        labels = {(row.method, tuple(sorted(row.params))): label for label, row in comparison.rows.items()}
        for _, specs in comparison.rounds():
            for spec in specs:
                label = labels.get((spec.method, tuple(sorted(spec.params)))) or labels.get(
                    (spec.method, tuple(sorted(set(spec.params) - {"lr", "width"})))
                )
                if records.get(spec.key) is None:
                    top = tops(label) + 0.01 * np.sin(spec.seed) + rng.normal(0, 0.001)
                    records.append(record(spec, top, rng))


GOOD = {UNTUNED: 0.545, FOLLOWED: 0.545, AVERAGED: 0.53, "the recipe": 0.545, FAN_IN: 0.55,
        "fractional noise": 0.56, "not private": 0.7, "fractional noise, fan-in": 0.6,
        "fractional noise, fan-in, untuned": 0.6}  # fmt: skip


def test_goals_that_are_met(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, lambda label: GOOD.get(label, 0.5))
    assert [goal.status for goal in Utility(tmp_path).goals()] == [MET] * 4


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({UNTUNED: 0.525}, 0),  # 2.5 points below the searched row
        ({FOLLOWED: 0.525}, 1),
        ({"the recipe": 0.485, AVERAGED: 0.47}, 2),  # 1.5 points below flat DP-SGD
        ({"the recipe": 0.5, AVERAGED: 0.48}, 2),  # no worse, and no better
        ({"fractional noise": 0.5}, 3),
        ({AVERAGED: 0.56}, 3),  # the recipe without fractional noise is better
    ],
)
def test_goals_that_are_missed(tmp_path, monkeypatch, changes, missed):
    write(tmp_path, monkeypatch, lambda label: {**GOOD, **changes}.get(label, 0.5))
    goals = Utility(tmp_path).goals()
    assert [number for number, goal in enumerate(goals) if goal.status == MISSED] == [missed]
    assert "points [" in "".join(goals[missed].evidence)


def test_a_page_of_some_records_says_so(tmp_path, monkeypatch, capsys):
    write(tmp_path, monkeypatch, lambda label: GOOD.get(label, 0.5), seeds=3)
    assert main(["report", "--utility", "--out", str(tmp_path), "--figures", str(tmp_path / "images")]) == 0
    page = capsys.readouterr().out
    assert "(3 of 10 seeds)" in page
    assert "![" in page
    assert (tmp_path / "images" / "utility.png").exists()
    assert "searched: lr=" in page
    assert "untuned: shape=fan-in, lr=auto" in page
    lines = (tmp_path / "utility.jsonl").read_text().splitlines()
    (tmp_path / "utility.jsonl").write_text(lines[0] + "\n")
    found = Utility(tmp_path)
    assert [goal.status for goal in found.goals()] == [UNKNOWN] * 4
    assert "No row has been compared yet" in utility_page.page(found)


def test_a_figure_belongs_to_the_page(tmp_path, capsys):
    (tmp_path / "utility.jsonl").write_text("")
    assert main(["report", "--out", str(tmp_path), "--figures", "there"]) != 0
    assert "--figures belongs to --utility" in capsys.readouterr().err


def test_the_page_in_the_docs_is_that_of_the_records():
    assert (ROOT / "docs" / "utility.md").read_text(encoding="utf-8") == utility_page.page(Utility(ROOT / "results"))


# ---- the command -------------------------------------------------------------------------------------------------


def test_quick_runs_every_row_and_nothing_twice(tmp_path, monkeypatch, capsys):
    untuned = fair.Row(UNTUNED, "dp-sgd", dict(shape="fan-in", lr="auto"), rates=())
    rows = (fair.Row(BASELINE, "dp-sgd"), untuned, replace(untuned, label="the recipe"), fair.Row("odd", "dp-odd"))
    monkeypatch.setattr(utility, "TRIALS", (replace(DIGITS, rows=rows),))
    command = ["reproduce", "utility", "--quick", "--jobs", "1", "--quiet", "--json", "--out", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "left out: odd" in said.err
    assert "together about" in said.err
    done = json.loads(said.out.splitlines()[-1])
    assert (
        done["runs"] == 3 + 2 + 2
    )  # a search of two and a score; two seeds of two rows, for the recipe is one of them
    before = (tmp_path / "utility.jsonl").read_text()
    assert main(command) == 0
    assert (tmp_path / "utility.jsonl").read_text() == before
    assert Utility(tmp_path).quick


@pytest.mark.parametrize("words", [["--only", "window"], ["--challenge", "dp-sgd"], ["--lr", "1"]])
def test_options_of_others_are_refused(tmp_path, words, capsys):
    assert main(["reproduce", "utility", "--out", str(tmp_path), *words]) != 0
    assert not (tmp_path / "utility.jsonl").exists()


def test_a_run_on_sentences(sentences, monkeypatch):
    folder, card = sentences
    monkeypatch.setenv("FODP_DATA", str(folder))
    monkeypatch.setattr(text.load, "__defaults__", (None, card))
    spec = RunSpec(dataset="sst2", model="text-transformer", method="dp-sgd", params=dict(lr=0.1), plan_steps=3,
                   steps=3, sampling_rate=0.5, lot_size=10.0)  # fmt: skip
    for scored_on in ("test", "validation"):
        assert 0 <= execute(spec.with_(scored_on=scored_on))["final_accuracy"] <= 1
    with pytest.raises(PrivacyError, match="scored_on"):
        spec.with_(scored_on="train")
