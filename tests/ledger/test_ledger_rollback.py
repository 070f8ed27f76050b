"""An old copy of a ledger that is put back is refused, or accepted by a word that stays in it."""

import json
import os

import pytest

import fodp
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import card, faults, summary
from ledgers_for_tests import named, raced
from ledgers_for_tests import spend as spend_on


def spend(path, run, steps=5):
    book = named(path)
    spend_on(book, run, steps)
    book.close()


def rolled_back(path):
    spend(path, "a")
    old = path.read_bytes()
    spend(path, "b")
    path.write_bytes(old)


@pytest.mark.rule(25)
@pytest.mark.fault(
    "an older copy of a ledger put back",
    happens="refused, also by new runs: a mark beside it knows how far it had come",
    lost="nothing",
    costs="nothing",
)
def test_an_older_copy_is_refused_by_new_runs_and_by_commands(tmp_path, capsys):
    path = tmp_path / "l.sqlite"
    rolled_back(path)
    with pytest.raises(fodp.PrivacyError, match=r"older than what was known.*newest copy.*accept-rollback"):
        spend(path, "c")
    for action in ("show", "check", "export"):
        assert main(["ledger", action, str(path)]) == 2
        assert "older than" in capsys.readouterr().err


@pytest.mark.fault(
    "the newest copy of a ledger that there is was restored",
    happens="`fodp ledger accept-rollback` goes on, and every card says so",
    lost="what the ledger knew since the copy",
    costs="the cards carry the warning",
)
def test_it_is_accepted_on_purpose_and_every_card_says_so(tmp_path, capsys):
    path = tmp_path / "l.sqlite"
    rolled_back(path)
    assert main(["ledger", "accept-rollback", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["known"] > said["found"] == said["entry"] - 1
    spend(path, "c")
    book = Ledger(path)
    assert faults(book) == []
    (record,) = summary(book)
    assert "an older copy of this ledger was put back" in card(record)
    assert main(["ledger", "accept-rollback", str(path)]) == 2
    assert "nothing to accept" in capsys.readouterr().err


@pytest.mark.fault(
    "two ledgers that went on from one copy",
    happens="refused: the other history is not known",
    lost="nothing",
    costs="nothing",
)
def test_one_that_went_on_after_the_copy_was_put_back_is_another_history(tmp_path):
    """As long, but not the same: the chain differs where the mark knows it."""
    path = tmp_path / "l.sqlite"
    rolled_back(path)
    mark = (tmp_path / "l.sqlite.mark").read_bytes()
    (tmp_path / "l.sqlite.mark").unlink()
    spend(path, "other", 7)
    (tmp_path / "l.sqlite.mark").write_bytes(mark)
    with pytest.raises(fodp.PrivacyError, match="older than what was known"):
        Ledger(path)


@pytest.mark.fault("another ledger in the place of the right one", happens="refused", lost="nothing", costs="nothing")
def test_another_ledger_in_its_place_is_refused(tmp_path):
    spend(tmp_path / "l.sqlite", "a")
    spend(tmp_path / "m.sqlite", "a")
    (tmp_path / "m.sqlite").rename(tmp_path / "l.sqlite")
    with pytest.raises(fodp.PrivacyError, match="another ledger than the one that was here"):
        Ledger(tmp_path / "l.sqlite")


@pytest.mark.rule(25)
@pytest.mark.fault(
    "a ledger that is gone",
    happens="refused: a new one would be a new budget",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_new_one_does_not_begin_where_one_is_gone(tmp_path):
    spend(tmp_path / "l.sqlite", "a")
    (tmp_path / "l.sqlite").unlink()
    with pytest.raises(fodp.PrivacyError, match=r"is gone.*restore a copy"):
        Ledger(tmp_path / "l.sqlite")
    assert not (tmp_path / "l.sqlite").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", "no", None])
@pytest.mark.fault("a damaged mark beside a ledger", happens="refused: restore it", lost="nothing", costs="nothing")
def test_a_damaged_mark_is_refused(tmp_path, text):
    path, mark = tmp_path / "l.sqlite", tmp_path / "l.sqlite.mark"
    spend(path, "a")
    mark.write_text(mark.read_text().replace('"entry": ', '"entry": 1') if text is None else text)
    with pytest.raises(fodp.PrivacyError, match="how far the ledger had come"):
        Ledger(path)


def test_a_ledger_moves_without_its_mark_and_gets_a_new_one(tmp_path):
    spend(tmp_path / "l.sqlite", "a")
    (tmp_path / "l.sqlite").rename(tmp_path / "m.sqlite")
    spend(tmp_path / "m.sqlite", "b")
    assert (tmp_path / "m.sqlite.mark").exists()


def test_the_mark_is_for_those_who_may_use_the_ledger(tmp_path):
    path, mark = tmp_path / "l.sqlite", tmp_path / "l.sqlite.mark"
    spend(path, "a")
    assert mark.stat().st_mode & 0o777 == 0o600
    path.chmod(0o660)
    spend(path, "b")
    assert mark.stat().st_mode & 0o777 == 0o660


@pytest.mark.fault(
    "processes that race to raise the mark", happens="the highest stays", lost="nothing", costs="nothing"
)
def test_processes_that_race_never_lower_the_mark(tmp_path):
    def spend_often(name):
        for number in range(15):
            spend(tmp_path / "l.sqlite", f"{name}.{number}", 1)

    raced(spend_often, "abc")
    last = Ledger(tmp_path / "l.sqlite").store.last()
    assert json.loads((tmp_path / "l.sqlite.mark").read_text())["chain"] == last.chain
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
