"""Audits accuse every planted mistake and no correct method; their bounds are bounds."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset

import fodp
from fodp import audit
from fodp.audit import bounds, sampling
from fodp.audit.plot import plot_report
from fodp.audit.tape import event_faults, record
from fodp.cli.main import main
from fodp.methods import METHODS
from methods_for_tests import StopAfter, trainer
from methods_for_tests import plan as small_plan
from mutants_for_tests import (
    DROPOUT,
    MUTANTS,
    PAGE,
    SEED,
    UNSEEN,
    UnclippedParameter,
    attacks,
    jitter,
    losses,
    named_row,
    plan,
    problem,
    registered,
    row,
    table_on_page,
)

# --- the whole table: no false alarm, no mistake missed ------------------------------------------------------


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_correct_method_is_accused(method):
    for finding in attacks(plan(method)):
        assert finding.consistent, finding.faults[:3]
        assert finding.epsilon_lower is None or finding.epsilon_lower <= finding.epsilon_claimed


@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
def test_exact_noise_is_not_accused_and_its_bound_is_as_tight(method):
    exact = dataclasses.replace(plan(method), exact_noise=True)
    findings = list(attacks(exact))
    assert all(finding.consistent for finding in findings), [finding.faults[:3] for finding in findings]
    ordinary = next(f for f in attacks(plan(method)) if f.attack == "mechanism")
    found = next(f for f in findings if f.attack == "mechanism")
    assert found.epsilon_lower == pytest.approx(ordinary.epsilon_lower, rel=0.25)  # few trials


@pytest.mark.rule(2)
@pytest.mark.rule(3)
@pytest.mark.rule(8)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mistake_is_caught_as_the_docs_say(mutant):
    findings = mutant.findings()
    assert not all(finding.consistent for finding in findings)
    assert row(mutant, findings) in table_on_page(), "run python tests/mutants_for_tests.py"


def test_the_docs_list_these_mistakes_and_no_others():
    listed = [line.split(" | ")[0].removeprefix("| ") for line in table_on_page()[2:]]
    assert listed == [m.mistake for m in (*MUTANTS, *UNSEEN)]
    assert table_on_page()[-len(UNSEEN) :] == [named_row(m) for m in UNSEEN], "run python tests/mutants_for_tests.py"


# --- bounds --------------------------------------------------------------------------------------------------


def test_the_one_run_bound_is_the_published_one():
    """The value printed in appendix D of Steinke, Nasr & Jagielski."""
    assert bounds.one_run_epsilon(1000, 100, 75, 1e-4, 0.05) == pytest.approx(0.673, abs=5e-4)


def test_the_one_run_p_value_without_delta_is_binomial():
    found = bounds.one_run_p_value(200, 100, 80, 1.0, 0.0)
    assert found == pytest.approx(stats.binom.sf(79, 100, 1 / (1 + np.exp(-1))))
    assert bounds.one_run_p_value(200, 100, 80, 1.0, 1e-5) > found
    with pytest.raises(fodp.PrivacyError, match="order"):
        bounds.one_run_p_value(10, 20, 5, 1.0, 0.0)


def test_the_one_run_bound_holds_for_randomized_response():
    """The exact ε of the mechanism is exceeded no more often than the level says, and often nearly reached."""
    rng = np.random.default_rng(0)
    right = rng.binomial(2000, 1 / (1 + np.exp(-1.0)), 400)
    found = np.array([bounds.one_run_epsilon(2000, 2000, int(v), 0.0, 0.05) for v in right])
    assert (found > 1.0).mean() <= 0.09
    assert np.median(found) > 0.85


def test_the_exposure_is_a_bound_and_close():
    rng = np.random.default_rng(0)
    signals = [0.5, 1.0] * 5000
    mean = np.mean(stats.norm.cdf(np.array(signals) / 2))
    found = np.array([bounds.exposure_lower(int(n), signals, 0.05) for n in rng.binomial(10_000, mean, 400)])
    assert (found > 1).mean() <= 0.09
    assert 0.93 < np.median(found) < 1
    assert bounds.exposure_lower(5000, signals, 0.05) == 0
    assert bounds.exposure_lower(10_000, signals, 0.05) > 5


def test_the_bound_on_the_mechanism_is_tight():
    """With enough guesses the lower bound comes near to ε, at one false alarm in a million."""
    finding = audit.attack_mechanism(replace(plan("dp-sgd"), noise_multiplier=0.6), trials=40_000)
    assert 0.85 * finding.epsilon_claimed < finding.epsilon_lower < finding.epsilon_claimed


def test_lot_sizes_of_a_binomial_are_not_accused_and_others_are():
    rng = np.random.default_rng(0)
    p_values = np.array([sampling._spread_p(rng.binomial(400, 0.05, 200), 400, 0.05) for _ in range(2000)])
    for level in (0.01, 0.1, 0.5):
        assert (p_values < level).mean() == pytest.approx(level, rel=0.3)
    assert sampling._spread_p(rng.binomial(40, 0.5, 200), 400, 0.05) < 1e-6  # half the variance


# --- the parts -----------------------------------------------------------------------------------------------


def test_a_refusal_of_the_run_is_a_finding():
    class Silent(METHODS["dp-sgd"]):
        name = "silent"

        def step(self, step, state):
            return step.parameters()

    with registered(Silent):
        for finding in attacks(plan("silent", dict(lr=0.1))):
            assert "refused" in finding.faults[0]


def augmenting(model, loss_fn, dataset, the_plan):
    """A pipeline with an augmentation for (inputs, labels)."""
    score = (lambda: 0.0) if the_plan.algorithm.has_acceptance_test else None
    return fodp.Trainer(model, loss_fn, dataset, the_plan, augment=jitter, public_score=score)


@pytest.mark.rule(18)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_dropout_and_augmentation_are_no_false_alarm_in_either_mode(method):
    """Every method, with all that draws switched on: points, two lots of a step and lots of all records included."""
    model, dataset, _ = problem(*DROPOUT)
    finding = audit.replay_neighbours(plan(method), model, losses, dataset, augmenting)
    assert finding.consistent, finding.faults[:3]
    assert 0.5 < finding.numbers["worst_ratio"] <= 1 + 1e-5


@pytest.mark.rule(18)
@pytest.mark.parametrize("secure", [True, False])
def test_a_whole_audit_with_dropout_and_augmentation(secure):
    model, dataset, canaries = problem(*DROPOUT)
    the_plan = replace(plan("fo-dp-sgd"), seed=None if secure else 7)
    made = []

    def make(*parts):
        made.append(augmenting(*parts))
        return made[-1]

    report = audit.audit(the_plan, model, losses, dataset, canaries, make, trials=1000)
    assert report.consistent, [finding.faults[:3] for finding in report.findings]
    own_mode = [trainer.plan.seed is None for trainer in made]
    assert (not all(own_mode), any(own_mode)) == (True, True)  # the replay is made in both modes
    assert (made[0].plan.seed is None, made[-1].plan.seed is None) == (secure, secure)
    again = audit.audit(the_plan, model, losses, dataset, canaries, augmenting, attacks=["one-run"])
    assert again.findings[0].to_dict() == report.findings[-1].to_dict()
    with pytest.raises(fodp.PrivacyError, match="cannot be copied"):
        copy.copy(next(trainer for trainer in made if trainer.plan.seed is None).session.streams)


@pytest.mark.parametrize("secure", [True, False])
def test_a_replay_in_one_mode_is_in_that_mode_only(secure):
    model, dataset, _ = problem()
    seeds = set()

    def make(model, loss_fn, dataset, the_plan):
        seeds.add(the_plan.seed is None)
        return audit.plain_trainer(model, loss_fn, dataset, the_plan)

    assert audit.replay_neighbours(plan("dp-sgd"), model, losses, dataset, make, secure=secure).consistent
    assert seeds == {secure}


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 20), (0.9, None), (0.002, 300)])
def test_sampling_at_the_ends_of_the_range(rate, steps):
    assert audit.check_sampling(replace(plan("dp-sam"), sampling_rate=rate), steps=steps).consistent


def test_a_tape_ends_in_order():
    """Half a tape would accuse."""
    stopped = trainer(small_plan("dp-sgd"))
    stopped.callbacks.append(StopAfter(2))
    with pytest.raises(KeyboardInterrupt):
        record(stopped)
    short = record(trainer(small_plan("dp-sgd")), steps=3)
    assert event_faults(small_plan("dp-sgd"), short, 3) == []
    assert event_faults(small_plan("dp-sgd"), short) == ["3 events were emitted, 8 promised"]


def test_data_that_is_not_tensors_is_refused():
    model, _, canaries = problem()
    with pytest.raises(fodp.PrivacyError, match="TensorDataset"):
        audit.replay_neighbours(plan("dp-sgd"), model, losses, [1, 2, 3])
    with pytest.raises(fodp.PrivacyError, match="attack must be one of"):
        audit.audit(plan("dp-sgd"), model, losses, canaries, canaries, attacks=["magic"])


def test_canaries_keep_shape_and_type_and_follow_the_seed():
    images = TensorDataset(torch.rand(20, 3, 4, 4), torch.arange(20))
    inputs, labels = audit.random_canaries(images, 50, classes=7, loudness=1.0).tensors
    assert inputs.shape == (50, 3, 4, 4)
    assert inputs.max() <= 1
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(7))
    assert torch.equal(inputs, audit.random_canaries(images, 50, classes=7, loudness=1.0).tensors[0])
    assert not torch.equal(inputs, audit.random_canaries(images, 50, classes=7, loudness=1.0, seed=1).tensors[0])


# --- report, plot, command line, docs ------------------------------------------------------------------------


def test_a_report_says_what_was_found(tmp_path):
    model, dataset, canaries = problem()
    told = set()
    with registered(UnclippedParameter):
        report = audit.audit(
            plan("unclipped-parameter"), model, losses, dataset, canaries, trials=1000, seed=SEED,
            progress=lambda attack, done: told.add((attack, round(done, 6))),
        )  # fmt: skip
        plot_report(report, tmp_path / "audit.png")
        said = json.loads(json.dumps(report.to_dict()))
    assert (report.consistent, report.exit_code) == (False, 1)
    assert {(attack, 1.0) for attack in audit.ATTACKS} <= told
    assert [each["attack"] for each in said["attacks"]] == list(audit.ATTACKS)
    assert said["epsilon_lower"] == report.findings[0].epsilon_lower > said["epsilon_claimed"]
    assert (tmp_path / "audit.png").stat().st_size > 10_000


def test_the_command_line_exits_with_the_verdict(tmp_path, capsys):
    quick = ["audit", "--method", "dp-sgd", "--attack", "replay", "--quiet", "--json", "--epochs", "1"]
    assert main([*quick, "--out", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["consistent"] is True
    assert said == json.loads((tmp_path / "audit.json").read_text())
    assert (tmp_path / "audit.png").exists()
    with registered(UnclippedParameter):
        assert main([*(word.replace("dp-sgd", "unclipped-parameter") for word in quick), "--lr", "0.1"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["attacks"][0]["fault_count"] > 0
    assert "VIOLATION" in captured.err
    assert main(["audit", "--attack", "magic"]) == 2
    assert main(["audit", "--run", str(tmp_path / "nothing")]) == 2
    assert main(["audit", "--confidence", "2", "--quiet"]) == 2


@pytest.mark.parametrize("noise", [("--noise-multiplier", "2.5"), ("--target-epsilon", "2")])
def test_a_run_folder_is_audited_as_it_was_trained(tmp_path, capsys, monkeypatch, noise):
    folder = str(tmp_path / "run")
    words = ["--method", "dp-sgd", *noise, "--seed", "3", "--epochs", "1", "--quiet", "--json"]
    assert main(["train", *words, "--out", folder]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr("fodp.accounting.calibrate_scale", lambda *_: 7.0)  # what another accountant might find
    assert main(["audit", "--run", folder, "--attack", "sampling", "--quiet", "--json"]) == 0
    audited = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert audited["epsilon_claimed"] == pytest.approx(trained["epsilon"])


def test_help_does_not_wait_for_torch():
    code = "import sys, fodp.cli.main as m\ntry: m.main(['audit', '--help'])\nfinally: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0
    assert "--canaries" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "False"


def test_the_example_of_the_docs_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    torch.manual_seed(0)
    exec(compile(blocks[0], "docs/audit.md", "exec"), {})
