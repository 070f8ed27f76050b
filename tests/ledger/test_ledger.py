"""The ledger: written before use, never overspent, never quietly changed."""

import json
import math
import os
import re
import sqlite3
import threading
import time

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from scipy.stats import norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.accounting import Event, Phase, epsilon_of, phases_from_data, phases_to_data, rdp_curve
from fodp.accounting.budget import RenyiBudget, Repetitions
from fodp.accounting.renyi import ORDERS
from fodp.callbacks import Callback
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import card, faults, summary
from fodp.ledger.database import Database
from fodp.ledger.fingerprint import fingerprint, secret_file
from fodp.ledger.rows import DataState, RunState, states_after
from ledgers_for_tests import PHASES, QUICK, STEP, ledger, losses, named, refuse_overspending, spend


def exhaust(tmp_path):
    """Others take what is left, to the last bit."""
    for number, noise in enumerate((35.0, 100.0, 1000.0)):
        phases = (Phase((Event(1.0, noise),), 1),)
        budget = named(tmp_path).budget("people")
        fitting = int(named(tmp_path).left("people") * budget.capacity / budget.costs(phases)[1])
        if fitting:
            spend(named(tmp_path), f"other {number}", fitting, (Phase((Event(1.0, noise),), fitting),))


class TestFilter:
    def test_phases_without_steps_cost_nothing(self):
        """Schedules may leave some empty; their noise counts for nothing, however little it is."""
        nothing = Phase((Event(1.0, 0.01),), 0)
        budget = RenyiBudget.suited_to((nothing, *PHASES), 1.0, 1e-5)
        assert budget == RenyiBudget.suited_to(PHASES, 1.0, 1e-5)
        costs = budget.costs(PHASES)
        for phases in ((nothing, *PHASES), (*PHASES, nothing)):
            assert np.array_equal(budget.costs(phases), costs)
            assert np.array_equal(Repetitions(5).rdp(phases), Repetitions(5).rdp(PHASES))
        assert budget.costs((nothing,)).tolist() == budget.costs(()).tolist() == [0.0]

    @pytest.mark.rule(17)
    def test_adaptive_runs_are_refused_by_the_rdp_of_one_fixed_order(self, tmp_path):
        book = named(tmp_path)
        one = (Phase((Event(1.0, 20.0),), 1),)
        taken = 0
        while not taken or book.left("people") > 0.04:
            spend(book, f"run {taken}", 1, one)
            taken += 1
        with pytest.raises(fodp.PrivacyError, match="nothing of it fits"):
            book.open("one too many", one, 1)
        budget = book.budget("people")
        cost = rdp_curve(one)[1][ORDERS.index(budget.order)]
        assert taken == math.floor(budget.capacity / cost)
        # Fixed in advance, PLD would have found room for more: the refusal is not its doing.
        assert epsilon_of((Phase(one[0].events, taken + 1),), 1e-5, "pld") < 1.0

    @pytest.mark.rule(17)
    def test_the_order_is_fixed_by_the_first_run_and_stays(self, tmp_path):
        book = named(tmp_path)
        spend(book, "a", 5)
        order = book.budget("people").order
        other = (Phase((Event(0.01, 1.5),), 2),)  # would have liked another order
        spend(book, "b", 2, other)
        assert book.budget("people").order == order
        assert RenyiBudget.suited_to(other, 1.0, 1e-5).order != order

    @pytest.mark.rule(17)
    @pytest.mark.parametrize("threshold", [-2.0, -0.5, 0.0, 0.5, 1.0, 2.5])
    @pytest.mark.parametrize("first", [1.5, 3.0, 8.0])
    def test_the_exact_delta_of_an_adaptive_pair_of_releases_is_within_the_budget(self, threshold, first):
        """One release, then, depending on its outcome, either all that the filter leaves, or nothing."""
        budget = RenyiBudget(2.0, 1e-2, 4.0)
        left = budget.capacity - budget.order / (2 * first**2)
        assert left > 0  # the first release alone fits
        second = math.sqrt(budget.order / (2 * left))
        x = np.linspace(-10 * first, 10 * first, 40001) + 0.5
        for p, q in ((1.0, 0.0), (0.0, 1.0)):  # added, removed
            density = norm.pdf(x, p, first)
            loss = norm.logpdf(x, p, first) - norm.logpdf(x, q, first)
            rest = 2.0 - loss
            again = norm.cdf(0.5 / second - rest * second) - np.exp(rest) * norm.cdf(-0.5 / second - rest * second)
            stop = np.clip(1 - np.exp(rest), 0, None)
            delta = trapezoid(density * np.where(x > threshold, again, stop), x)
            assert delta <= 1e-2

    def test_capacity_is_what_the_accountant_would_allow(self):
        budget = RenyiBudget.suited_to(PHASES, 1.0, 1e-5)
        fitting = int(np.searchsorted(budget.costs((Phase((STEP,), 5000),)), budget.capacity, side="right")) - 1
        assert epsilon_of((Phase((STEP,), fitting),), 1e-5, "rdp") <= 1.0
        assert epsilon_of((Phase((STEP,), fitting + 2),), 1e-5, "rdp") > 1.0
        assert budget.epsilon_at(1e-5) == pytest.approx(1.0)

    def test_costs_are_those_of_the_accountant_for_schedules_and_several_lots(self):
        phases = (Phase((Event(0.1, 2.0), Event(0.2, 3.0)), 3), Phase((Event(0.1, 1.5),), 2))
        budget = RenyiBudget.suited_to(phases, 3.0, 1e-5)
        place = ORDERS.index(budget.order)
        costs = budget.costs(phases)
        assert len(costs) == 6
        assert costs[5] == pytest.approx(rdp_curve(phases)[1][place], rel=1e-6)
        assert costs[2] == pytest.approx(rdp_curve((Phase(phases[0].events, 2),))[1][place], rel=1e-6)

    def test_an_impossible_budget_is_refused(self):
        with pytest.raises(fodp.PrivacyError, match="too small"):
            RenyiBudget.suited_to(PHASES, 1e-6, 1e-9)


class TestBudget:
    @pytest.mark.fault(
        "a run that the budget has no room for",
        happens="refused before its first step, told who holds what",
        lost="nothing",
        costs="nothing",
    )
    def test_a_run_that_does_not_fit_is_refused_before_its_first_step(self, tmp_path):
        book = named(tmp_path)
        spend(book, "a", 60)
        with pytest.raises(fodp.PrivacyError, match=r"has .*% left and this needs .* only \d+ of its 100 steps"):
            book.open("b", PHASES, 100)
        assert book.steps("b") is None

    def test_it_cannot_be_changed_later(self, tmp_path):
        spend(named(tmp_path), "a", 5)
        with pytest.raises(fodp.PrivacyError, match="once and for all"):
            named(tmp_path, (2.0, 1e-5)).open("b", PHASES, 5)
        spend(ledger(tmp_path, dataset="people"), "b", 5)  # left out, it holds all the same
        with pytest.raises(fodp.PrivacyError, match="left and this needs"):
            ledger(tmp_path, dataset="people").open("c", PHASES, 100)

    def test_it_must_come_first(self, tmp_path):
        spend(ledger(tmp_path, dataset="people"), "a", 5)
        with pytest.raises(fodp.PrivacyError, match="before the first one"):
            named(tmp_path).open("b", PHASES, 5)

    def test_it_belongs_to_a_name(self, tmp_path):
        with pytest.raises(fodp.PrivacyError, match="name it"):
            ledger(tmp_path, budget=(1.0, 1e-5))
        spend(named(tmp_path), "a", 60)
        spend(ledger(tmp_path, dataset="others", budget=(1.0, 1e-5)), "b", 60)  # another data set, another budget

    @pytest.mark.rule(14)
    def test_a_typing_error_has_no_limitless_budget(self, tmp_path):
        book = named(tmp_path)
        assert book.left("people") == 1.0  # all of it, which its first run fixes
        with pytest.raises(fodp.LedgerError, match="knows no data set 'poeple'; it knows none: mend the name"):
            book.left("poeple")
        spend(book, "run", 2)
        assert 0 < book.left("people") < 1
        with pytest.raises(fodp.LedgerError, match="'poeple'; it knows people"):
            book.left("poeple")

    def test_a_data_set_without_a_budget_is_infinite(self, tmp_path):
        assert ledger(tmp_path, dataset="people").left("people") == math.inf

    def test_a_budget_whose_delta_hardly_means_anything_is_warned_of(self, tmp_path):
        with pytest.warns(UserWarning, match=r"delta 0\.5 is above 0\.001: publishing that share") as told:
            Ledger(tmp_path / "l.sqlite", dataset="people", budget=(3, 0.5))
        assert told[0].filename == __file__

    @pytest.mark.rule(14)
    @pytest.mark.parametrize("budget", [3, "3,1e-5", (3,), {"epsilon": 3, "delta": 1e-5}, (3, 1e-5, 1)])
    def test_a_budget_in_another_form(self, tmp_path, budget):
        with pytest.raises(fodp.ConfigurationError, match=r"budget is a pair \(epsilon, delta\), such as \(3, 1e-5\)"):
            named(tmp_path, budget)

    @pytest.mark.rule(11)
    def test_a_replay_never_gives_back_what_an_earlier_process_used(self, tmp_path):
        book = named(tmp_path)
        spend(book, "a", 30, settle=False)  # the process died
        used = book.steps("a")
        assert used >= 30
        again = book.open("a", PHASES, 60)
        assert again.covers(10)  # a seeded replay from a checkpoint at step 10
        again.settle(12)
        assert book.steps("a") == used

    @pytest.mark.rule(11)
    @pytest.mark.fault(
        "a seeded run replays its steps", happens="not charged again; another run is", lost="nothing", costs="nothing"
    )
    def test_a_replay_is_not_charged_again_but_another_run_is(self, tmp_path):
        book = named(tmp_path)
        spend(book, "a", 30)
        before = book.left("people")
        again = book.open("a", PHASES, 30)
        assert all(again.covers(step) for step in range(30))
        assert book.left("people") == before
        spend(book, "b", 30)  # same seed or not: the ledger does not know, and charges
        assert book.left("people") < before

    @pytest.mark.fault(
        "a run taken up by another process, by the Python API",
        happens="the new process goes on, the old one gets no more steps",
        lost="steps since the checkpoint",
        costs="the lost steps stay charged",
    )
    def test_a_run_resumed_elsewhere_stops_here(self, tmp_path):
        book = named(tmp_path)
        first = book.open("a", PHASES, 60)
        assert first.covers(0)
        second = named(tmp_path).open("a", PHASES, 60)
        for forbidden in (lambda: first.covers(5), lambda: first.settle(1), lambda: first.note_checkpoint(1, "x")):
            with pytest.raises(fodp.PrivacyError, match="another process"):
                forbidden()
        assert second.covers(1)


@pytest.mark.rule(17)
@pytest.mark.fault(
    "processes that race for the last of a budget",
    happens="checking and reserving is one transaction: never overspent",
    lost="nothing",
    costs="nothing",
)
def test_processes_racing_on_one_ledger_cannot_overspend_together(tmp_path):
    refuse_overspending(tmp_path, time.sleep)  # SQLite is not fair to those who wait


class TestFile:
    def test_entries_cannot_be_changed_or_deleted(self, tmp_path):
        spend(named(tmp_path), "a", 5)
        raw = sqlite3.connect(tmp_path / "l.sqlite")
        for statement in (
            "UPDATE entries SET steps = 0",
            "DELETE FROM entries WHERE id = 3",
            "INSERT OR REPLACE INTO entries VALUES (3, 0, 'settle', 'people', 'a', 0, 0, '{}', '', 0, 0, 0, '', '')",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                raw.execute(statement)

    @pytest.mark.parametrize(
        "edit",
        [
            "UPDATE entries SET rdp = 0 WHERE kind = 'settle'",
            "UPDATE entries SET steps = 1 WHERE kind = 'settle'",
            "DELETE FROM entries WHERE id = 3",
            "UPDATE entries SET data = replace(data, '35.0', '90.0') WHERE kind = 'run'",
            "UPDATE entries SET data = '[]' WHERE kind = 'run'",
            "UPDATE entries SET data = '{}' WHERE kind = 'budget'",
            "UPDATE entries SET steps = 1000000, rdp = 'x', at = 1e300 WHERE kind = 'settle'",
            "UPDATE entries SET dataset = x'ff' WHERE kind = 'run'",
        ],
    )
    @pytest.mark.fault(
        "a ledger edited by hand",
        happens="refused; `fodp ledger check` names the entries",
        lost="nothing, with a copy",
        costs="nothing",
    )
    def test_edits_behind_its_back_are_seen_and_nothing_more_is_spent(self, capsys, tmp_path, edit):
        spend(named(tmp_path), "a", 5)
        assert faults(ledger(tmp_path)) == []
        raw = sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)
        triggers = [sql for (sql,) in raw.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")]
        for name in ("no_update", "no_delete"):
            raw.execute(f"DROP TRIGGER {name}")
        raw.execute(edit)
        for sql in triggers[:2]:
            raw.execute(sql)
        with pytest.raises(fodp.PrivacyError, match=r"changed by something else than fodp \(entry \d (was|is)"):
            named(tmp_path)
        assert main(["ledger", "show", str(tmp_path / "l.sqlite")]) == 2
        assert "something else" in capsys.readouterr().err
        found = faults(ledger(tmp_path, create=False, verify=False))
        assert any("changed" in fault or "missing" in fault for fault in found)
        assert main(["ledger", "check", str(tmp_path / "l.sqlite")]) == 2
        assert "cannot be believed" in capsys.readouterr().err
        assert main(["ledger", "check", "--json", str(tmp_path / "l.sqlite")]) == 2
        assert json.loads(capsys.readouterr().out)["ok"] is False

    def test_a_forged_chain_does_not_help_against_the_sums(self, tmp_path):
        book = named(tmp_path)
        spend(book, "a", 5)
        with book.store.writing():
            book.store.append("settle", "people", "a", steps=5, rdp=1e-9)
        assert any("states a cost" in fault for fault in faults(book))
        with book.store.writing():
            book.store.append("settle", "people", "a", steps=5, rdp=99.0)
        assert any("exceeds the budget" in fault for fault in faults(book))

    def test_a_ledger_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(fodp.PrivacyError, match="there is no ledger"):
            Ledger(tmp_path / "none.sqlite", create=False)
        with pytest.raises(fodp.PrivacyError, match="cannot be used"):
            Ledger(tmp_path / "no folder" / "l.sqlite")

    def test_reading_changes_nothing(self, capsys, tmp_path):
        spend(named(tmp_path), "a", 5)
        before = (tmp_path / "l.sqlite").read_bytes()
        for words in (["show"], ["show", "--json"], ["check"], ["export"], ["export", "--json"]):
            assert main(["ledger", words[0], str(tmp_path / "l.sqlite"), *words[1:]]) == 0
        assert (tmp_path / "l.sqlite").read_bytes() == before

    def test_it_works_from_another_thread(self, tmp_path):
        book, done = named(tmp_path), []
        thread = threading.Thread(target=lambda: done.append(spend(book, "a", 5)))
        thread.start()
        thread.join()
        assert done


class TestSize:
    @pytest.mark.fault(
        "a ledger of very many runs",
        happens="a grant reads a few rows whatever its size; `show` has pages",
        lost="nothing",
        costs="nothing",
    )
    def test_no_more_rows_are_read_for_a_grant_when_there_are_more_runs(self, tmp_path, monkeypatch):
        """Rows are counted, not seconds: opening reads the newest hundred, a run and a reservation a few."""
        read = []
        original = Database.row
        monkeypatch.setattr(Database, "row", lambda rows, number: read.append(number) or original(rows, number))

        def reads():
            book = named(tmp_path, budget=(9.0, 1e-5))
            read.clear()
            account = book.open(f"timed {len(read)} {book.store.count()}", PHASES, 1, seed="a:b", fingerprint="a:data")
            assert account.covers(0)
            assert book.left("people") < 1
            return len(read)

        few = reads()
        for number in range(60):
            spend(named(tmp_path, budget=(9.0, 1e-5)), f"run {number}", 1)
        with pytest.raises(fodp.PrivacyError, match="used this seed"):
            reads()
        assert len(read) <= few
        monkeypatch.setattr("fodp.ledger.admission.Admission.refuse_used_seed", lambda *_: None)
        assert reads() <= few + 2

    def test_a_long_sum_is_never_below_the_truth(self):
        data, costs = DataState(), np.random.default_rng(0).exponential(1e-3, 2000)
        for number, cost in enumerate(costs):
            data, _ = states_after(number, "selection", 1, float(cost), {}, data, RunState())
        truth = math.fsum(costs)
        assert truth <= data.spent <= truth * (1 + 1e-11)
        assert data.spent == data.taken


class TestFingerprint:
    def data(self, shift=0.0):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(60, 4, generator=generator) + shift
        return TensorDataset(inputs, (inputs[:, 0] > 0).long())

    def trainer(self, book, data, seed=None, model=None, **options):
        plan = fodp.Plan(
            sampling_rate=0.2, steps=5, lot_size=12, clip_norm=1.0, noise_multiplier=9.0, delta=1e-5, seed=seed,
            accountant="rdp", method="fo-dp-sgd",
        )  # fmt: skip

        return fodp.Trainer(model or nn.Linear(4, 2), losses, data, plan, ledger=book, **options)

    @pytest.mark.fault(
        "other data under a known name",
        happens="refused unless it is said to be on purpose, which is written down",
        lost="nothing",
        costs="nothing",
    )
    def test_other_data_under_the_same_name_stops_unless_allowed(self, tmp_path):
        self.trainer(named(tmp_path), self.data()).fit()
        self.trainer(named(tmp_path), self.data()).fit()
        with pytest.raises(fodp.PrivacyError, match="not what it was"):
            self.trainer(named(tmp_path), self.data(1.0)).fit()
        self.trainer(named(tmp_path, allow_changed_data=True), self.data(1.0)).fit()
        self.trainer(named(tmp_path), self.data(1.0)).fit()
        assert "changed on purpose" in card(summary(ledger(tmp_path))[0])
        self.trainer(ledger(tmp_path, dataset="more"), self.data(2.0)).fit()  # another name, other data

    @pytest.mark.rule(17)
    @pytest.mark.fault(
        "known data under another name, whose budget it would escape",
        happens="refused unless it is said to be on purpose; both cards say so",
        lost="nothing",
        costs="nothing",
    )
    def test_known_data_under_another_name_stops_unless_allowed(self, tmp_path):
        """A renamed data set would escape its budget."""
        self.trainer(named(tmp_path), self.data()).fit()
        entries = len(ledger(tmp_path).store.select())
        for options in (dict(dataset="renamed", budget=(1.0, 1e-5)), dict(dataset="renamed"), dict()):
            with pytest.raises(fodp.PrivacyError, match=r"as 'people' already.*allow_other_name=True"):
                self.trainer(ledger(tmp_path, **options), self.data()).fit()
        assert len(ledger(tmp_path).store.select()) == entries
        self.trainer(ledger(tmp_path, dataset="renamed", allow_other_name=True), self.data()).fit()
        self.trainer(ledger(tmp_path, dataset="renamed"), self.data()).fit()  # said once is enough
        self.trainer(named(tmp_path), self.data()).fit()
        records = {record["dataset"]: record for record in summary(ledger(tmp_path))}
        assert records["people"]["also_known_as"] == ["renamed"]
        assert "as 'people' too" in card(records["renamed"])
        assert "as 'renamed' too" in card(records["people"])

    def test_an_old_version_of_the_data_is_known_too(self, tmp_path):
        self.trainer(named(tmp_path), self.data()).fit()
        self.trainer(named(tmp_path, allow_changed_data=True), self.data(1.0)).fit()
        for shift in (0.0, 1.0):
            with pytest.raises(fodp.PrivacyError, match="as 'people' already"):
                self.trainer(ledger(tmp_path, dataset="renamed"), self.data(shift)).fit()

    def test_unnamed_runs_may_share_their_data(self, tmp_path):
        self.trainer(ledger(tmp_path), self.data()).fit()
        self.trainer(ledger(tmp_path), self.data()).fit()
        assert all(len(record["also_known_as"]) == 1 for record in summary(ledger(tmp_path)))
        with pytest.raises(fodp.PrivacyError, match="as 'unnamed data of run"):
            self.trainer(named(tmp_path), self.data()).fit()

    def test_images_are_the_same_data_when_a_model_takes_them_flat(self, tmp_path):
        inputs, labels = self.data().tensors
        self.trainer(named(tmp_path), self.data()).fit()
        square = TensorDataset(inputs.reshape(-1, 2, 2), labels)
        flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        self.trainer(named(tmp_path), square, model=flat).fit()
        with pytest.raises(fodp.PrivacyError, match="not what it was"):
            self.trainer(named(tmp_path), TensorDataset(inputs[:30], labels[:30])).fit()

    @pytest.mark.rule(11)
    @pytest.mark.fault("a seeded run resumed on other data", happens="refused", lost="nothing", costs="nothing")
    def test_a_seeded_run_never_puts_its_noise_on_other_data(self, tmp_path):
        first = self.trainer(ledger(tmp_path), self.data(), seed=0)
        first.save(tmp_path / "no.pt")
        first.fit()
        first.save(tmp_path / "c.pt")
        for allow in (False, True):
            book = ledger(tmp_path, allow_changed_data=allow)
            with pytest.raises(fodp.PrivacyError, match=r"not what it was|repeat its noise"):
                self.trainer(book, self.data(1.0), seed=0).resume(tmp_path / "c.pt")

    def test_it_is_keyed_with_a_secret_that_stays_here(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "one"))
        mark = fingerprint([b"data"])
        assert mark == fingerprint([b"da", b"ta"])
        assert secret_file().stat().st_mode & 0o777 == 0o600
        key = secret_file().read_bytes()
        self.trainer(named(tmp_path), self.data()).fit()
        assert key not in (tmp_path / "l.sqlite").read_bytes()
        assert key.hex().encode() not in (tmp_path / "l.sqlite").read_bytes()
        secret_file().chmod(0o644)
        with pytest.raises(fodp.PrivacyError, match="chmod 600"):
            fingerprint([b"data"])
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "two"))
        assert fingerprint([b"data"]) != mark
        self.trainer(named(tmp_path), self.data(1.0)).fit()  # another machine cannot compare, and does not stop
        (tmp_path / "three").write_text("a file where the folder should be")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "three"))
        assert fingerprint([b"data"]) is None

    def test_the_drop_in_keeps_a_ledger_too(self, tmp_path):
        plan = fodp.Plan(
            sampling_rate=0.2, steps=6, lot_size=12, clip_norm=1.0, noise_multiplier=9.0, delta=1e-5, method="dp-sgd"
        )
        seen = []

        def loop(count):
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = fodp.make_private(model, optimizer, self.data(), plan, ledger=named(tmp_path))
            for _, (inputs, labels) in zip(range(count), loader, strict=False):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                run = summary(ledger(tmp_path))[0]["runs"][-1]
                seen.append(run["steps"] >= loader.step)
            loader.close()
            return summary(ledger(tmp_path))[0]["runs"][-1]

        assert (loop(6)["steps"], loop(2)["steps"]) == (6, 2)
        assert len(seen) == 8
        assert all(seen)
        exhaust(tmp_path)
        with pytest.raises(fodp.PrivacyError, match="left"):
            loop(6)

    @pytest.mark.fault(
        "the budget is spent in the middle of a run",
        happens="it ends in good order, with a checkpoint and a result",
        lost="the rest of the plan",
        costs="the steps taken",
    )
    def test_the_trainer_stops_in_order_when_other_runs_take_the_rest(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fodp.ledger.account._AHEAD", 1e-9)  # reserve one step at a time
        monkeypatch.setattr("fodp.ledger.account._WRITES", 0)
        book = named(tmp_path)
        seen = []

        class Thief(Callback):
            def on_step(self, trainer):
                if trainer.step == 2:
                    book.release(trainer.run_id)
                    exhaust(tmp_path)

            def on_epoch(self, trainer):
                seen.append(trainer.step)

        stopped = self.trainer(book, self.data(), callbacks=[Thief()])
        outcome = stopped.fit()
        assert (outcome.reason, outcome.steps, seen) == ("budget spent", 2, [2])
        assert book.steps(stopped.run_id) == 2
        assert faults(book) == []


def _gamma(mean, shape):
    """γ of the truncated negative binomial with this mean."""
    with mpmath.workdps(30):

        def excess(gamma):
            if shape == 0:
                return (1 / gamma - 1) / mpmath.log(1 / gamma) - mean
            return shape * (1 - gamma) / (gamma * (1 - gamma**shape)) - mean

        return mpmath.findroot(excess, (mpmath.mpf("1e-9"), 1 - mpmath.mpf("1e-9")), solver="anderson", tol=1e-20)


def _chance_above(mean, shape, count):
    """Pr[K > count], from the hypergeometric function that its tail is."""
    gamma = _gamma(mean, shape)
    k = count + 1
    if shape == 0:
        first = (1 - gamma) ** k / k / mpmath.log(1 / gamma)
    else:
        first = (1 - gamma) ** k / (gamma**-shape - 1) * mpmath.rf(shape, k) / mpmath.factorial(k)
    return first * mpmath.hyp2f1(1, k + shape, k + 1, 1 - gamma)


class TestSelection:
    @pytest.mark.parametrize("words", [["--noise-multiplier=1e-29"], ["--noise-multiplier=1e29", "--set=beta=1e-200"]])
    def test_absurd_noise_ends_in_a_number(self, capsys, tmp_path, words):
        said = ["--method=fo-dp-sgd", "--mean=3", "--sampling-rate=0.1", "--steps=5", "--dataset-name=d", "--no-budget"]
        assert main(["ledger", "select", str(tmp_path / "l.sqlite"), *said, *words]) == 0
        assert main(["ledger", "check", str(tmp_path / "l.sqlite")]) == 0
        capsys.readouterr()
        assert main(["ledger", "show", str(tmp_path / "l.sqlite"), "--json"]) == 0
        stated = json.loads(capsys.readouterr().out)[0]["selections"][0]["epsilon"]
        assert stated == math.inf if len(words) == 1 else 0 <= stated < 0.1

    def test_it_costs_more_than_one_run_and_less_than_the_mean_number_of_them(self):
        phases = (Phase((Event(0.04, 1.1),), 500),)
        one, all_of_them = epsilon_of(phases, 1e-5, "rdp"), epsilon_of((Phase(phases[0].events, 15000),), 1e-5, "rdp")
        for shape in (0.0, 1.0, math.inf):
            assert one < Repetitions(30, shape).epsilon(phases, 1e-5) < all_of_them

    @pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
    def test_the_number_is_drawn_from_the_stated_distribution(self, shape, monkeypatch):
        """Exactly: the mean over all quantiles is the stated mean."""
        drawn = Repetitions(4.0, shape)
        chances = np.exp(drawn._log_chances(np.arange(0 if shape == math.inf else 1, 400)))
        counts = np.arange(0 if shape == math.inf else 1, 400)
        assert chances.sum() == pytest.approx(1.0, abs=1e-6)
        assert chances @ counts == pytest.approx(4.0, rel=1e-4)
        for share in (0.01, 0.5, 0.97):
            monkeypatch.setattr("secrets.randbelow", lambda top, share=share: int(share * top))
            assert drawn.draw() == counts[np.searchsorted(np.cumsum(chances), share, side="right")]

    @pytest.mark.parametrize(("mean", "shape"), [(100.0, 0.0), (1000.0, 0.0), (1000.0, 0.1), (300.0, 1.0), (50.0, 3.0)])
    @pytest.mark.parametrize("above", [1e-6, 1e-8, 1e-10])
    def test_the_tail_of_the_distribution_is_drawn_too(self, mean, shape, above, monkeypatch):
        """Without a logarithm's tail, 1e-7 of all draws at a mean of 1000, the price is that of another number."""
        monkeypatch.setattr("secrets.randbelow", lambda top: top - round(above * top))
        drawn = Repetitions(mean, shape).draw()
        with mpmath.workdps(30):
            assert _chance_above(mean, shape, drawn) <= above * 1.01
            assert _chance_above(mean, shape, drawn - 1) >= above * 0.99

    def test_the_last_word_ends_a_draw(self, monkeypatch):
        monkeypatch.setattr("secrets.randbelow", lambda top: top - 1)
        for shape in (0.0, 0.3, 1.0, 4.0, math.inf):
            assert 30 < Repetitions(10.0, shape).draw() < 10_000
        assert Repetitions(1.0, 0.0).draw() == 1

    @pytest.mark.parametrize("mean", [1.5, 10.0, 1000.0])
    @pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
    def test_the_price_is_the_theorems(self, mean, shape):
        """Papernot and Steinke (2022), theorem 2, with γ solved in 30 digits: never below it."""
        phases = (Phase((Event(1.0, 20.0),), 1),)
        orders = np.array(ORDERS, dtype=float)
        rdp, gamma = orders / 2 / 20**2, float(_gamma(mean, shape))
        constant = (1 + shape) * np.min((1 - 1 / orders) * rdp - math.log(gamma) / orders)
        expected = np.minimum.accumulate((rdp + constant + math.log(mean) / (orders - 1))[::-1])[::-1]
        price = Repetitions(mean, shape).rdp(phases)
        assert np.all(price >= expected * (1 - 1e-12))
        assert price == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("mean", [2.0, 10.0, 100.0])
    @pytest.mark.parametrize("shape", [0.0, 1.0])
    def test_the_price_is_not_below_what_a_selection_reveals(self, mean, shape):
        """The largest of K draws of N(0, σ²) or N(1, σ²): its exact Rényi divergence, by integration."""
        sigma, gamma = 2.0, float(_gamma(mean, shape))

        def log_density(y, shift):  # p(y)·E[K·F(y)^(K-1)], with the generating function's derivative
            rest = 1 - (1 - gamma) * norm.cdf(y, shift, sigma)
            slope = (1 - gamma) / rest / -math.log(gamma) if shape == 0 else gamma / rest**2
            return norm.logpdf(y, shift, sigma) + np.log(slope)

        y = np.linspace(-80.0, 80.0, 400_001)
        assert trapezoid(np.exp(log_density(y, 0)), y) == pytest.approx(1, abs=1e-9)
        price = Repetitions(mean, shape).rdp((Phase((Event(1.0, sigma),), 1),))
        for order in (2.0, 4.0, 16.0):
            for one, other in ((0, 1), (1, 0)):
                p, q = log_density(y, one), log_density(y, other)
                truth = math.log(trapezoid(np.exp(order * p + (1 - order) * q), y))
                assert truth / (order - 1) <= price[ORDERS.index(order)]

    def test_it_is_charged_before_the_runs_are_made(self, capsys, tmp_path):
        path = str(tmp_path / "l.sqlite")
        words = ["--mean", "3", "--sampling-rate", "0.1", "--noise-multiplier", "4", "--steps", "10", "--json"]
        select = ["ledger", "select", path, "--dataset-name", "people", *words]
        assert main([*select, "--budget", "2,1e-5"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["runs"] >= 1
        assert 0 < result["left"] < 1
        while (code := main(select)) == 0:
            pass
        assert code == 2
        assert "left" in capsys.readouterr().err
        assert faults(ledger(tmp_path)) == []
        assert main(["ledger", "show", path]) == 0
        assert main(["ledger", "export", path]) == 0
        assert "best of a random number" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("mean", "shape"), [(0.5, 1), (math.nan, 1), (3, -1), (3, math.nan), (math.inf, 1), (2e6, 0)]
    )
    def test_wrong_numbers_are_refused(self, mean, shape):
        with pytest.raises(fodp.PrivacyError):
            Repetitions(mean, shape)


class TestCommandLine:
    def train(self, tmp_path, name, *words):
        shared = ["--ledger", str(tmp_path / "l.sqlite"), "--dataset-name", "people"]
        return main(["train", *QUICK, *shared, "--out", str(tmp_path / name), *words])

    def test_a_shared_ledger_guards_a_data_set_over_many_runs(self, capsys, tmp_path):
        assert self.train(tmp_path, "a", "--budget", "0.5,1e-5", "--json") == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert 0 < result["budget_left"] < 1
        assert not (tmp_path / "a" / "ledger.sqlite").exists()
        count = 1
        while self.train(tmp_path, f"more {count}") == 0:
            count += 1
        assert 2 <= count < 10
        assert "of the budget of people is left" in (seen := capsys.readouterr()).out
        assert "left and this needs" in seen.err
        assert not (tmp_path / f"more {count}").exists()
        for where in (tmp_path / "l.sqlite", tmp_path / "a"):
            assert main(["ledger", "show", str(where), "--json"]) == 0
            record = json.loads(capsys.readouterr().out)[0]
            assert record["dataset"] == "people"
            assert len(record["runs"]) == count
            assert record["budget"]["epsilon"] == 0.5
            assert sum(run["share"] for run in record["runs"]) == pytest.approx(record["budget"]["spent"])
        assert main(["ledger", "check", str(tmp_path / "l.sqlite")]) == 0
        assert main(["ledger", "export", str(tmp_path / "l.sqlite"), "--dataset-name", "people"]) == 0
        text = capsys.readouterr().out
        parts = ("Unit:", "Adjacency:", "Sampling:", "(Poisson sampling)", "Noise:", "Accountant:", "Added up by:")
        for part in (*parts, "at delta 1e-06", "Not covered:"):
            assert part in text

    @pytest.mark.fault("a run resumed with another ledger", happens="refused", lost="nothing", costs="nothing")
    def test_a_run_goes_on_only_with_its_own_ledger(self, capsys, tmp_path):
        assert self.train(tmp_path, "a", "--budget", "0.5,1e-5") == 0
        (tmp_path / "l.sqlite").rename(tmp_path / "moved.sqlite")
        again = ["train", "--resume", "--quiet", "--out", str(tmp_path / "a")]
        assert main(again) == 2
        assert "there is no ledger" in capsys.readouterr().err
        assert main([*again, "--ledger", str(tmp_path / "moved.sqlite")]) == 0
        spend(Ledger(tmp_path / "strange.sqlite", dataset="people"), "x", 3)
        assert main([*again, "--ledger", str(tmp_path / "strange.sqlite")]) == 2
        assert "only with its ledger" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (["--budget", "4"], "EPS,DELTA"),
            (["--budget", "4,x"], "EPS,DELTA"),
            (["--budget", "4,2"], "delta"),
            (["--budget=-1,1e-5"], "epsilon"),
            (["--dataset-name", " "], "name"),
        ],
    )
    def test_wrong_words(self, capsys, tmp_path, words, hint):
        assert self.train(tmp_path, "a", *words) == 2
        err = capsys.readouterr().err
        assert hint in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "a").exists()

    def test_a_budget_that_comes_while_another_run_begins_is_refused(self, tmp_path, monkeypatch):
        """Between looking and writing, another process opened a run that no budget counts."""
        first = Ledger(tmp_path / "l.sqlite", dataset="people")
        second = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(8.0, 1e-5))
        agreed = second._admission.agreed_budget

        def slow(*words):
            found = agreed(*words)
            first.open("quick", PHASES, 10)
            return found

        monkeypatch.setattr(second._admission, "agreed_budget", slow)
        with pytest.raises(fodp.PrivacyError, match="before it had a budget"):
            second.open("late", PHASES, 10)
        assert second.budget("people") is None

    @pytest.mark.parametrize("moment", ["_refuse_late_budget", "agreed_budget"])
    @pytest.mark.parametrize("what", ["open", "charge_selection"])
    def test_a_budget_that_another_process_fixes_meanwhile_holds_for_both(self, tmp_path, monkeypatch, moment, what):
        """Between any two looks at the file somebody else may write to it."""

        def attempt(name, budget):
            path = tmp_path / f"{name}.sqlite"
            first = Ledger(path, dataset="people", budget=(8.0, 1e-5))
            second = Ledger(path, dataset="people", budget=budget)
            original = getattr(second._admission, moment)

            def overtaken(*words):
                result = None if moment == "_refuse_late_budget" else original(*words)
                if not first.store.of_data("people").runs:
                    first.open("quicker", PHASES, 10)
                return original(*words) if moment == "_refuse_late_budget" else result

            monkeypatch.setattr(second._admission, moment, overtaken)
            if what == "open":
                second.open("slower", PHASES, 10)
            else:
                second.charge_selection(PHASES, Repetitions(2))
            return second

        assert faults(attempt("a", (8.0, 1e-5))) == []
        with pytest.raises(fodp.PrivacyError, match="a budget is fixed once and for all"):
            attempt("b", (1.0, 1e-5))

    def test_a_new_name_needs_a_budget_or_a_word_that_there_is_none(self, capsys, tmp_path):
        """A typo in the name, or in that of the file, would otherwise escape the budget."""
        assert self.train(tmp_path, "a", "--budget", "0.5,1e-5") == 0
        before = (tmp_path / "l.sqlite").read_bytes()
        assert self.train(tmp_path, "b", "--dataset-name", "poeple") == 2
        assert "knows people" in (err := capsys.readouterr().err)
        assert "--no-budget" in err
        assert self.train(tmp_path, "b", "--ledger", str(tmp_path / "m.sqlite")) == 2
        assert "is new" in capsys.readouterr().err
        numbers = ["--mean=2", "--sampling-rate=0.1", "--noise-multiplier=9", "--steps=5"]
        assert main(["ledger", "select", str(tmp_path / "l.sqlite"), "--dataset-name=poeple", *numbers]) == 2
        assert (tmp_path / "l.sqlite").read_bytes() == before
        assert not (tmp_path / "b").exists()
        assert not (tmp_path / "m.sqlite").exists()
        words = ("--dataset-name", "others", "--no-budget")
        assert self.train(tmp_path, "b", *words) == 2
        assert "as 'people' already" in (err := capsys.readouterr().err)
        assert "--allow-other-name" in err
        assert self.train(tmp_path, "c", *words, "--allow-other-name") == 0
        assert self.train(tmp_path, "d", "--dataset-name", "others") == 0

    def test_a_selection_costs_what_its_method_costs(self, capsys, tmp_path):
        numbers = ["--mean=2", "--sampling-rate=0.1", "--noise-multiplier=4", "--steps=5", "--budget=9,1e-5"]
        charged = {}
        for method, *params in (["dp-sgd"], ["dp-sam"], ["fo-dp-sgd", "--set=beta=0.5"]):
            path = str(tmp_path / f"{method}.sqlite")
            words = [f"--method={method}", *params]
            assert main(["ledger", "select", path, "--dataset-name=d", *numbers, *words, "--json"]) == 0
            capsys.readouterr()
            assert main(["ledger", "show", path, "--json"]) == 0
            (selection,) = json.loads(capsys.readouterr().out)[0]["selections"]
            charged[method] = selection["epsilon"]
            assert 0 < selection["share"] < 1
            assert main(["ledger", "show", path]) == 0
            assert f"{selection['share']:.1%}" in capsys.readouterr().out
        assert charged["fo-dp-sgd"] < charged["dp-sgd"] < charged["dp-sam"]

    @pytest.mark.parametrize("words", [["--budget", "4,1e-5"], ["--dataset-name", "x"], ["--ledger", "l"]])
    def test_words_that_need_each_other(self, capsys, tmp_path, words, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert main(["train", *QUICK, *words]) == 2
        assert "add --" in capsys.readouterr().err
        assert os.listdir(tmp_path) == []

    def test_as_many_more_runs_like_the_last_fit_as_are_told(self, capsys, tmp_path):
        book = named(tmp_path)
        assert book.more_like_the_last("people") is None  # there is no last one
        spend(book, "small", 1)
        spend(book, "large", 20)
        more = book.more_like_the_last("people")
        assert main(["ledger", "show", str(tmp_path / "l.sqlite")]) == 0
        assert f"left, room for {more} more like the last" in " ".join(capsys.readouterr().out.split())
        for number in range(more):
            spend(book, f"run {number}", 20)
        assert more > 1
        assert book.more_like_the_last("people") == 0
        with pytest.raises(fodp.BudgetError):
            book.open("one too many", PHASES, 20)
        spend(ledger(tmp_path, dataset="unlimited"), "a", 5)
        assert book.more_like_the_last("unlimited") is None

    def test_show_says_that_nothing_was_charged(self, capsys, tmp_path):
        path = str(tmp_path / "new.sqlite")
        fodp.Ledger(path, dataset="people", budget=(3, 1e-5))
        assert main(["ledger", "show", path]) == 0
        assert "nothing was charged yet" in capsys.readouterr().out
        assert main(["ledger", "show", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []

    def test_show_leafs_through_many_runs(self, capsys, tmp_path):
        book = named(tmp_path)
        for number in range(30):
            spend(book, f"run {number:02}", 1)
        path = str(tmp_path / "l.sqlite")

        def shown(*words):
            assert main(["ledger", "show", path, *words, "--json"]) == 0
            (record,) = json.loads(capsys.readouterr().out)
            assert (record["run_count"], record["pages"]) == (30, 2)
            return [run["run"] for run in record["runs"]]

        names = [f"run {number:02}" for number in reversed(range(30))]
        assert shown() == names[:25]
        assert shown("--page", "2") == names[25:]
        assert shown("--page", "3") == []
        assert shown("--all") == names
        assert main(["ledger", "show", path]) == 0
        text = capsys.readouterr().out
        assert re.match(r"people: 30 runs, budget \(1, 1e-05\): [0-9.]+% spent, [0-9.]+% left", text)
        assert "page 1 of 2" in text
        assert main(["ledger", "show", path, "--page", "0"]) == 2
        assert "page" in capsys.readouterr().err

    def test_a_bar_appears_when_a_check_takes_long(self, capsys, tmp_path, monkeypatch):
        spend(named(tmp_path), "a", 5)
        check = ["ledger", "check", str(tmp_path / "l.sqlite")]
        monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich is concerned
        monkeypatch.setenv("TERM", "xterm")
        assert main(check) == 0
        assert "checking" not in capsys.readouterr().err
        monkeypatch.setattr("fodp.cli.waiting._PATIENCE", 0.0)
        monkeypatch.setattr("fodp.ledger.store.Store.faults", lambda store: time.sleep(0.5) or [])
        assert main(check) == 0
        seen = capsys.readouterr()
        assert "checking" in seen.err
        assert "checking" not in seen.out

    def test_an_unknown_name(self, capsys, tmp_path):
        spend(named(tmp_path), "a", 5)
        assert main(["ledger", "show", str(tmp_path / "l.sqlite"), "--dataset-name", "nobody"]) == 2
        assert "it knows people" in capsys.readouterr().err


def test_events_survive_being_written_down():
    phases = (Phase((Event(0.1, 2.0), Event(0.2, 3.0)), 3), Phase((Event(0.1, 1.5),), 2))
    assert phases_from_data(json.loads(json.dumps(phases_to_data(phases)))) == phases
    for wrong in ([[1]], [[[[2.0, 1.0]], 3]], [[[[0.5, 1.0]], -1]], [[[[0.5]], 1]]):
        with pytest.raises(fodp.PrivacyError):
            phases_from_data(wrong)


class TestTimes:
    """How fast steps follow each other tells how large their lots are, and that how large the data is."""

    def test_rows_have_whole_minutes(self, tmp_path, monkeypatch):
        monkeypatch.setattr("time.time", lambda: 1_700_000_123.456)
        named(tmp_path, budget=(3.0, 1e-5)).open("a", PHASES, 100).settle(3)
        assert {entry.at for entry in ledger(tmp_path).store.select()} == {1_700_000_100.0}
        assert "2023-11-14 22:15 UTC" in card(summary(ledger(tmp_path))[0])

    def test_steps_are_reserved_in_powers_of_two(self, tmp_path, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr("fodp.ledger.account.time.perf_counter", lambda: clock[0])
        account = named(tmp_path, budget=(3.0, 1e-5)).open("a", PHASES, 100)
        for step in range(100):
            assert account.covers(step)
            clock[0] += 0.071  # seven steps in half a second
        ends = [entry.steps for entry in ledger(tmp_path).store.select("reserve")]
        assert [b - a for a, b in zip([0, *ends], ends, strict=False)] == [1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 3]
