"""A ledger that is damaged anywhere either says so or still says the truth: never more budget, never fewer steps."""

import os
import random
import sqlite3
import tempfile
from pathlib import Path

import pytest

import fodp
from fodp.ledger import Ledger
from ledgers_for_tests import PHASES

TRIES = 2000
RUNS = range(3)  # of each data set


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: thousands of copies would spend their time waiting for the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fodp-tests-") as folder:
        yield Path(folder)


def written(path):
    """A ledger with runs on two data sets: some ended, one did not; and what is true of it."""
    for name, share in (("people", 9), ("others", 4)):
        book = Ledger(path, dataset=name, budget=(1.0, 1e-5))
        for number in RUNS:
            account = book.open(
                f"{name} {number}", PHASES, share, seed=f"{number:012x}:{name}", fingerprint="a:" + name
            )
            for step in range(share - number % 2):
                assert account.covers(step)
            if number != 1:
                account.settle(share - number % 2)
        book.close()


def told(path):
    """What the ledger says about itself; PrivacyError if it refuses."""
    book = Ledger(path, create=False)
    try:
        names = ("people", "others")
        runs = [f"{name} {number}" for name in names for number in RUNS]
        return (
            [book.left(name) for name in names],
            [book.budget(name) for name in names],
            [book.steps(run) for run in runs],
            [entry.run for run in runs for entry in book.store.marked(f"seed {run[-1]:0>12}:{run[:-2]}")],
        )
    finally:
        book.close()


def flipped(good, place):
    return good[: place // 8] + bytes([good[place // 8] ^ (1 << place % 8)]) + good[place // 8 + 1 :]


def places(good, count, seed):
    """Bits all over the file, half of them where something is written."""
    chance = random.Random(seed)
    used = [place for place, byte in enumerate(good) if byte]
    for number in range(count):
        byte = chance.choice(used) if number % 2 else chance.randrange(len(good))
        yield byte * 8 + chance.randrange(8)


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Of a large ledger only what is used is checked: here the checks that small ones get besides are left out."""
    if request.param == "large":
        monkeypatch.setattr("fodp.ledger.sqlite._SMALL", 0)
        monkeypatch.setattr("fodp.ledger.store._NEWEST", 1)
    return request.param


@pytest.mark.rule(25)
@pytest.mark.fault(
    "a flipped bit anywhere in a ledger",
    happens="the truth or a refusal, never a larger budget or fewer steps",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_every_flipped_bit_is_refused_or_harmless(quick_path, size):
    path = quick_path / "l.sqlite"
    written(path)
    truth, good = told(path), path.read_bytes()
    refused = 0
    for place in places(good, TRIES, seed=25):
        path.write_bytes(flipped(good, place))
        try:
            assert told(path) == truth, f"bit {place}"
        except fodp.PrivacyError:
            refused += 1
    assert refused > TRIES // 10


@pytest.mark.rule(25)
@pytest.mark.fault(
    "a damaged index of the ledger, which hides rows",
    happens="refused: two indexes must agree",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_damaged_index_grants_nothing(quick_path, size):
    """Every bit of one index's pages in turn: what a run is granted is what the undamaged file grants, or nothing."""
    path = quick_path / "l.sqlite"
    written(path)
    good = path.read_bytes()
    raw = sqlite3.connect(path)
    size = raw.execute("PRAGMA page_size").fetchone()[0]
    roots = [root for (root,) in raw.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'")]
    raw.close()
    truth = told(path)
    chance = random.Random(0)
    for root in roots:
        page = good[(root - 1) * size : root * size]
        used = [place for place, byte in enumerate(page) if byte]
        for byte in chance.sample(used, min(100, len(used))):
            path.write_bytes(flipped(good, ((root - 1) * size + byte) * 8 + chance.randrange(8)))
            try:
                assert told(path) == truth
                book = Ledger(path, dataset="people")
                assert book.open("new", PHASES, 3).covers(0)
                assert book.left("people") < truth[0][0]
            except fodp.PrivacyError:
                pass


def advice(path, create):
    with pytest.raises(fodp.PrivacyError) as refusal:
        Ledger(path, create=create).left("people")
    return str(refusal.value)


@pytest.mark.rule(25)
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 99, 4096, 20000, -4096])
@pytest.mark.fault(
    "a truncated ledger",
    happens="refused; the advice is to restore a copy, never to begin a new one",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_truncated_ledger_is_to_be_restored_not_begun_anew(tmp_path, keep, create):
    path = tmp_path / "l.sqlite"
    written(path)
    path.write_bytes(path.read_bytes()[:keep])
    text = advice(path, create)
    assert "restore a copy" in text
    assert "fodp ledger check" in text
    assert "new budget" in text
    assert "name a" not in text


@pytest.mark.rule(25)
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.fault(
    "another file in the place of a ledger",
    happens="refused; the advice is to restore a copy",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_foreign_file_may_have_been_a_ledger(tmp_path, create):
    (tmp_path / "l.sqlite").write_text("a diary, not a ledger, but long enough to be taken for one" * 9)
    other = sqlite3.connect(tmp_path / "m.sqlite")
    other.execute("CREATE TABLE t (a)")
    other.commit()
    for name in ("l.sqlite", "m.sqlite"):
        text = advice(tmp_path / name, create)
        assert "restore a copy" in text
        assert "fodp ledger check" in text


@pytest.mark.fault(
    "a ledger of an earlier version", happens="refused: go on with that version", lost="nothing", costs="nothing"
)
def test_a_ledger_of_an_earlier_version_is_no_reason_for_a_new_one(tmp_path):
    other = sqlite3.connect(tmp_path / "l.sqlite")
    other.execute("PRAGMA user_version = 2")
    other.execute("CREATE TABLE entries (a)")
    other.commit()
    assert "the version that wrote it" in advice(tmp_path / "l.sqlite", True)


def test_a_new_ledger_is_for_its_owner_and_an_old_one_keeps_its_mode(tmp_path):
    path, before = tmp_path / "l.sqlite", os.umask(0)
    try:
        written(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o660)
    Ledger(path, dataset="people").open("more", PHASES, 1).settle(0)
    assert path.stat().st_mode & 0o777 == 0o660
