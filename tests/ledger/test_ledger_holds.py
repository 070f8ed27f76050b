"""A run holds what its whole plan costs: runs do not starve each other, and everybody sees who holds what."""

import threading
import time

import pytest

import fodp
from fodp.accounting import Phase
from fodp.cli.main import main
from fodp.ledger.card import card, faults, summary
from ledgers_for_tests import PHASES, QUICK, fitting, named, raced


@pytest.mark.fault(
    "other runs want the budget that a run counts on",
    happens="a run holds what its whole plan costs; others are refused before they begin",
    lost="nothing",
    costs="what is not used comes back at the end",
)
def test_a_run_that_began_is_never_starved(tmp_path):
    book = named(tmp_path)
    slow = book.open("slow", PHASES, 50)
    assert slow.covers(0)
    with pytest.raises(fodp.PrivacyError, match=r"needs .*Held for steps to come: .*% by .*@.* for run slow since 20"):
        named(tmp_path).open("greedy", PHASES, 50)
    number = 0
    while book.left("people") * book.budget("people").capacity > book.budget("people").costs(PHASES)[1]:
        small = named(tmp_path).open(f"small {number}", PHASES, 1)
        assert small.covers(0)  # what was never granted is not charged, and the loop would have no end
        small.settle(1)
        number += 1
    assert number > 5
    assert all(slow.covers(step) for step in range(50))
    slow.settle(50)
    assert faults(book) == []


def test_what_was_held_and_not_used_comes_back_at_the_end(tmp_path):
    book = named(tmp_path)
    account = book.open("a", PHASES, 60)
    whole = book.left("people")
    assert account.covers(0)
    assert book.left("people") == pytest.approx(whole)
    assert [hold.run for hold in book.holds("people")] == ["a"]
    account.settle(10)
    assert book.holds("people") == []
    assert book.left("people") > whole + 0.3
    again = book.open("a", PHASES, 60)  # resumed: held again
    assert book.left("people") == pytest.approx(whole)
    again.settle(10)
    assert faults(book) == []


def test_an_exactly_filled_budget_lets_its_run_take_every_step(tmp_path):
    book = named(tmp_path)
    book.open("first", PHASES, 3).settle(3)
    capacity = book.budget("people").capacity
    steps = int(book.left("people") * capacity / book.budget("people").costs(PHASES)[1])
    account = book.open("rest", PHASES, steps)
    assert all(account.covers(step) for step in range(steps))


@pytest.mark.fault(
    "a dead run still holds budget",
    happens="`fodp ledger release` gives it back",
    lost="nothing",
    costs="its used steps stay charged",
)
def test_a_dead_run_gives_back_by_hand_what_it_did_not_use(tmp_path, capsys):
    book = named(tmp_path)
    account = book.open("dead0123456789", PHASES, 60)
    assert account.covers(0)
    held = book.left("people")
    (record,) = summary(book)
    assert record["budget"]["held"] > 0.3
    assert "held by runs that have not ended" in card(record)
    path = str(tmp_path / "l.sqlite")
    assert main(["ledger", "show", path]) == 0
    assert "held" in capsys.readouterr().out
    assert main(["ledger", "release", path, "dead"]) == 0
    assert "is given back" in capsys.readouterr().out
    assert named(tmp_path).left("people") > held + 0.3
    assert book.steps("dead0123456789") == 1
    assert main(["ledger", "release", path, "dead"]) == 2
    assert "holds anything" in capsys.readouterr().err
    assert main(["ledger", "check", path]) == 0


def test_a_released_run_that_lives_goes_on_while_there_is_room(tmp_path):
    book = named(tmp_path)
    account = book.open("a", PHASES, 60)
    book.release("a")
    other = book.open("b", PHASES, 50)
    steps = [account.covers(step) for step in range(60)]
    assert steps[0]
    assert not steps[-1]
    assert all(other.covers(step) for step in range(50))
    assert faults(book) == []


class TestWaiting:
    @pytest.mark.fault(
        "no room in the budget now, perhaps later",
        happens="`--wait` waits and says for whom",
        lost="nothing",
        costs="time",
    )
    def test_for_what_others_give_back(self, tmp_path):
        first = named(tmp_path).open("a", PHASES, 60)
        assert first.covers(0)
        said, waits = [], threading.Event()
        waiting = named(tmp_path, wait=60.0)
        waiting.tell_waiting(lambda text: (said.append(text), waits.set()))
        opened = []
        thread = threading.Thread(target=lambda: opened.append(waiting.open("b", PHASES, 60)))
        thread.start()
        assert waits.wait(60)
        assert not opened
        first.settle(1)
        thread.join(timeout=60)
        assert opened
        assert len(said) == 1
        assert "waiting for room" in said[0]

    def test_not_for_what_will_never_fit(self, tmp_path):
        book = named(tmp_path)
        account = book.open("a", PHASES, 60)
        assert all(account.covers(step) for step in range(60))
        account.settle(60)
        said, late = [], named(tmp_path, wait=60.0)
        late.tell_waiting(said.append)
        with pytest.raises(fodp.PrivacyError, match="left and this needs"):
            late.open("b", PHASES, 60)
        assert said == []  # it did not wait

    def test_not_for_ever(self, tmp_path):
        named(tmp_path).open("a", PHASES, 60)
        with pytest.raises(fodp.PrivacyError, match="Held for steps to come"):
            named(tmp_path, wait=0.3).open("b", PHASES, 60)
        with pytest.raises(fodp.PrivacyError, match="wait"):
            named(tmp_path, wait=-1)

    def test_by_the_command(self, tmp_path, capsys):
        words = ["train", *QUICK, "--ledger", str(tmp_path / "l.sqlite"), "--dataset-name", "people"]
        book = named(tmp_path)
        book.open("to fix the budget", PHASES, 1).settle(0)
        budget = book.budget("people")
        steps = int(budget.capacity / budget.costs(PHASES)[1])
        account = book.open("a", (Phase(PHASES[0].events, steps),), steps)
        assert main([*words, "--out", str(tmp_path / "b")]) == 2
        assert "Held for steps to come" in capsys.readouterr().err
        assert not (tmp_path / "b").exists()
        threading.Timer(1.0, lambda: account.settle(1)).start()
        assert main([*words, "--out", str(tmp_path / "b"), "--wait"]) == 0
        assert "waiting for room" in capsys.readouterr().err


@pytest.mark.rule(17)
@pytest.mark.fault(
    "many processes on one budget",
    happens="those that begin come to their end, the others are refused before they begin",
    lost="nothing",
    costs="nothing",
)
def test_of_many_processes_those_that_begin_end_and_the_others_never_begin(tmp_path):
    def train(name):
        try:
            account = named(tmp_path).open(name, PHASES, 15)
        except fodp.PrivacyError as error:
            return -1 if "left and this needs" in str(error) else str(error)
        taken = 0
        while taken < 15 and account.covers(taken):
            taken += 1
            time.sleep(0.001)
        account.settle(taken)
        return taken

    outcomes = raced(train, [f"run {n}" for n in range(20)])
    assert set(outcomes.values()) == {15, -1}, outcomes  # all of it, or nothing
    book = named(tmp_path)
    assert list(outcomes.values()).count(15) == fitting(book, 15)
    assert faults(book) == []
