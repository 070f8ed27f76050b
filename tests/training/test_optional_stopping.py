"""A run that is stopped because of what was seen: one ε, the plan's, wherever it is stated.

The ε of the first steps holds for a run that was to end there before it began. Where a run stopped tells something
about what it saw, so a stop that was not fixed beforehand has the ε of all planned steps, or that of a budget, whose
filter holds whatever makes a run stop.
"""

import json
import os
import re
import signal

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.accounting import rounded_up
from fodp.accounting.budget import RenyiBudget
from fodp.callbacks import Callback, Evaluate
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import card, summary
from fodp.runs.export import privacy_card
from fodp.state.published import stated_epsilon
from fodp.trainer import Trainer


def plan(**changes):
    base = dict(
        sampling_rate=0.25, steps=24, lot_size=20, clip_norm=1.0, noise_multiplier=4.0, delta=1e-5, seed=0,
        accountant="rdp", method="dp-sgd",
    )  # fmt: skip
    return fodp.Plan(**{**base, **changes})


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(80, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainer(the_plan=None, **options):
    torch.manual_seed(3)
    return Trainer(nn.Linear(6, 2), losses, data(), the_plan or plan(), **options)


class StopAt(Callback):
    """Somebody who has seen enough: Ctrl-C after a given step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.rule(10)
@pytest.mark.rule(23)
class TestResult:
    @pytest.mark.fault(
        "a run that is stopped because of what was seen",
        happens="its result and its statement say one ε, that of the whole plan",
        lost="nothing",
        costs="the ε of the whole plan",
    )
    def test_a_stopped_run_has_the_plans_epsilon(self):
        stopped = trainer(callbacks=[StopAt(7)])
        outcome = stopped.fit()
        assert (outcome.reason, outcome.steps) == ("interrupted", 7)
        assert outcome.epsilon == stopped.stated_epsilon() == plan().epsilon() > plan().epsilon(steps=7)
        assert stopped.epsilon() < outcome.epsilon  # the running display is of the steps so far
        assert f"({rounded_up(outcome.epsilon)}, 1e-05)-diff" in stopped.statement()

    @pytest.mark.fault(
        "a run that stops at its target ε",
        happens="result, statement, card and export say one ε, that of the steps up to the target",
        lost="nothing",
        costs="nothing",
    )
    def test_a_run_with_a_target_had_its_end_fixed(self):
        target = plan().epsilon(steps=10) + 1e-6
        for stop, reason in ((24, "target reached"), (4, "interrupted")):
            limited = trainer(target_epsilon=target, callbacks=[StopAt(stop)])
            outcome = limited.fit()
            assert (outcome.reason, outcome.epsilon) == (reason, plan().epsilon(steps=10))
            assert "dp-sgd, 10 steps" in limited.statement()

    def test_going_on_to_the_end_is_no_early_stop(self):
        stopped = trainer(callbacks=[StopAt(7)])
        stopped.fit()
        assert stopped.fit().epsilon == plan().epsilon()

    @pytest.mark.parametrize("end", [7, 9, 20])
    def test_an_end_that_is_moved_on_the_way_was_not_fixed_beforehand(self, end):
        moved = trainer(target_epsilon=plan().epsilon(steps=12) + 1e-6, callbacks=[StopAt(7)])
        moved.fit()
        moved.course.last_step = end
        assert moved.fit().epsilon == plan().epsilon()

    @pytest.mark.parametrize("steps", [9, 15])
    def test_a_resumed_run_remembers_its_end(self, tmp_path, steps):
        first = trainer(target_epsilon=plan().epsilon(steps=12) + 1e-6, callbacks=[StopAt(7)])
        first.fit()
        first.save(tmp_path / "c.pt")
        same = trainer(target_epsilon=plan().epsilon(steps=12) + 1e-6)
        same.resume(tmp_path / "c.pt")
        assert same.fit().epsilon == plan().epsilon(steps=12)
        other = trainer(target_epsilon=plan().epsilon(steps=steps) + 1e-6)
        other.resume(tmp_path / "c.pt")
        assert other.fit().epsilon == plan().epsilon()

    def test_divergence_is_a_stop_too(self, monkeypatch):
        monkeypatch.setattr("fodp.runs.scores.accuracy", lambda model, data: (0.5, float("nan")))
        with pytest.raises(fodp.PrivacyError, match=re.escape(rounded_up(plan().epsilon()))):
            trainer(callbacks=[Evaluate(data(seed=1))]).fit()


@pytest.mark.rule(23)
class TestBudget:
    def ledger(self, tmp_path, budget):
        return Ledger(tmp_path / "l.sqlite", dataset="people", budget=budget)

    def test_a_filter_covers_every_stop(self, tmp_path):
        epsilon = 1.5 * plan().epsilon()
        outcome = trainer(ledger=self.ledger(tmp_path, (epsilon, 1e-5)), callbacks=[StopAt(7)]).fit()
        assert outcome.epsilon == plan().epsilon()  # which is the smaller one

    def test_of_two_the_smaller_one_is_stated(self):
        budget = RenyiBudget.suited_to(plan().events(), 0.5, 1e-6)
        assert plan().epsilon() > 0.5
        assert stated_epsilon(plan(), 3, 24, budget) == 0.5
        assert stated_epsilon(plan(delta=1e-7), 3, 24, budget) == plan(delta=1e-7).epsilon()  # at another delta
        assert stated_epsilon(plan(), 24, 24, budget) == plan().epsilon()

    def test_a_run_that_others_left_no_budget_for(self, tmp_path, monkeypatch):
        for name in ("_AHEAD", "_WRITES"):  # steps are reserved one by one
            monkeypatch.setattr(f"fodp.ledger.account.{name}", 0.0)

        class Others(Callback):
            """Another run takes what is left, after this one was taken for dead."""

            def on_step(self, trainer):
                if trainer.step == 5:
                    trainer.ledger.release(trainer.run_id)
                    store, account = trainer.ledger.store, trainer.course.account
                    with store.writing():
                        store.append("run", "people", "other", steps=1, rdp=0.99 * account.budget.capacity)

        budget = (1.05 * plan().epsilon(), 1e-5)
        cut = trainer(ledger=self.ledger(tmp_path, budget), callbacks=[Others()])
        outcome = cut.fit()
        assert outcome.reason == "budget spent"
        assert outcome.epsilon == plan().epsilon()
        assert cut.course.planned_steps == 24
        assert cut.fit().reason == "budget spent"

    def test_the_ledger_charges_the_steps_and_knows_who_stopped_early(self, tmp_path):
        ledger = Ledger(tmp_path / "l.sqlite", dataset="people")
        trainer(ledger=ledger, callbacks=[StopAt(7)]).fit()
        trainer(plan(seed=1), ledger=ledger).fit()
        record = summary(ledger)[0]
        early, whole = record["runs"]
        assert (early["steps"], early["stopped_early"], whole["stopped_early"]) == (7, True, False)
        assert early["epsilon"] == whole["epsilon"] == pytest.approx(plan(accountant="pld").epsilon())
        both = fodp.accounting.epsilon_of(plan(steps=48).events(), 1e-5)
        assert record["epsilons"][1e-5] == pytest.approx(both)
        assert card(record).count("stopped early without a budget") == 1

    def test_with_a_budget_the_ledger_needs_no_such_word(self, tmp_path):
        ledger = self.ledger(tmp_path, (3.0, 1e-5))
        trainer(ledger=ledger, callbacks=[StopAt(7)]).fit()
        record = summary(ledger)[0]
        assert not record["runs"][0]["stopped_early"]
        assert record["budget"]["spent"] < 0.5  # seven steps are charged
        assert "stopped early" not in card(record)


@pytest.mark.rule(23)
class TestFiles:
    """Whatever is published of a run says the same ε."""

    WORDS = ("--epochs", "60", "--noise-multiplier", "6", "--accountant", "rdp", "--quiet", "--threads", "1")

    def claims(self, text):
        return set(re.findall(r"\(([0-9.e+-]+), 1e-05\)-differentially private", text))

    def test_an_interrupted_run_and_its_export(self, tmp_path, capsys, monkeypatch):
        step = Trainer.take_step

        def stopped(self):
            step(self)
            if self.step == 30:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(Trainer, "take_step", stopped)
        assert main(["train", *self.WORDS, "--out", str(tmp_path / "r")]) == 130
        said = capsys.readouterr().out
        saved = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)
        whole = fodp.Plan(**saved["plan"]).epsilon()
        assert saved["step"] == 30
        assert f"its epsilon is {rounded_up(whole)};" in said
        assert main(["export", str(tmp_path / "r"), str(tmp_path / "m.safetensors")]) == 0
        assert f"epsilon {rounded_up(whole)} at" in capsys.readouterr().out
        with safe_open(tmp_path / "m.safetensors", "pt") as opened:
            published = opened.metadata()
        assert float(published["epsilon"]) == whole
        assert published["steps"] == "30"
        assert self.claims(published["statement"]) == {rounded_up(whole)}

    def test_a_run_that_reached_its_target(self, tmp_path, capsys):
        target = ("--target-epsilon", "0.5")
        assert main(["train", *self.WORDS, *target, "--out", str(tmp_path / "r")]) == 0
        said = capsys.readouterr().out
        result = json.loads((tmp_path / "r" / "result.json").read_text())
        assert result["reason"] == "target reached"
        assert main(["export", str(tmp_path / "r"), str(tmp_path / "m.safetensors")]) == 0
        with safe_open(tmp_path / "m.safetensors", "pt") as opened:
            published = opened.metadata()
        assert float(published["epsilon"]) == result["epsilon"] <= 0.5
        texts = (said, (tmp_path / "r" / "privacy.txt").read_text(), published["statement"])
        assert [self.claims(text) for text in texts] == [{rounded_up(result["epsilon"])}] * 3

    def test_the_card_of_a_run_under_a_budget(self):
        budget = RenyiBudget.suited_to(plan().events(), 0.5, 1e-6)
        made = privacy_card(plan(), 3, 24, budget)
        assert (made["epsilon"], made["steps"]) == (0.5, 3)
        assert self.claims(made["statement"]) == {"0.5"}
