"""The ledger on a PostgreSQL server: the same promises. A real server is started in a temporary folder."""

import glob
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import fodp
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import faults, summary
from ledgers_for_tests import PHASES, QUICK, named, refuse_overspending, spend

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'fodp[postgres]'")


def programs():
    """The folder of the server's programs, wherever a system keeps them: Debian's are not on the path."""
    told = shutil.which("pg_config")
    folders = [subprocess.run([told, "--bindir"], capture_output=True, text=True).stdout.strip()] if told else []
    folders += sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: float(path.split("/")[-2]), reverse=True)
    folders += [os.path.dirname(path) for path in (shutil.which("initdb"),) if path]
    for folder in folders:
        if all(os.access(os.path.join(folder, name), os.X_OK) for name in ("initdb", "pg_ctl", "postgres")):
            return folder
    return pytest.skip("PostgreSQL's server is not installed (no initdb): apt install postgresql")


def unprivileged():
    """Who runs the server, which refuses to be root's; {} means whoever runs the tests."""
    if os.getuid() != 0:
        return {}
    import pwd  # not there on Windows

    known = {user.pw_name for user in pwd.getpwall()}
    user = next((name for name in ("postgres", "nobody") if name in known), None)
    return {"user": user} if user else pytest.skip("PostgreSQL does not run as root, and there is nobody else")


@pytest.fixture(scope="session")
def server():
    """The folder of a running server's socket."""
    bin, user = programs(), unprivileged()
    folder = tempfile.mkdtemp(prefix="fodp-pg-", dir="/tmp")  # the path of a socket has at most 107 bytes
    data, log = f"{folder}/data", f"{folder}/log"
    if user:
        shutil.chown(folder, **user)

    def run(name, *words):
        done = subprocess.run([f"{bin}/{name}", "-D", data, *words], cwd="/", capture_output=True, text=True, **user)
        said = Path(log).read_text()[-2000:] if os.path.exists(log) else ""
        assert done.returncode == 0, f"{name}: {done.stderr}{said}"

    settings = {"listen_addresses": "''", "unix_socket_directories": folder, "fsync": "off", "shared_buffers": "8MB"}
    try:
        run("initdb", "-A", "trust", "-U", "fodp", "-E", "UTF8", "--locale=C", "--no-sync")
        run("pg_ctl", "-o", " ".join(f"-c {k}={v}" for k, v in settings.items()), "-l", log, "-w", "-s", "start")
        try:
            yield folder
        finally:
            run("pg_ctl", "-m", "immediate", "-s", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def address(server, tmp_path, monkeypatch):
    """A database of its own for each test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    name = f"d{os.urandom(6).hex()}"
    with psycopg.connect(f"postgresql:///postgres?host={server}&user=fodp", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql:///{name}?host={server}&user=fodp"


def behind_its_back(address, statement):
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # triggers sleep
        connection.execute(statement)


def test_it_says_what_a_file_says(address, tmp_path):
    books = [named(address), named(tmp_path / "l.sqlite")]
    for book in books:
        spend(book, "a", 7, seed="a:1", fingerprint="a:data")
        spend(book, "b", 9)
        book.open("held", PHASES, 20).covers(0)
        assert faults(book) == []
        with pytest.raises(fodp.PrivacyError, match="used this seed"):
            book.open("c", PHASES, 1, seed="a:1")
        with pytest.raises(fodp.PrivacyError, match="not what it was"):
            book.open("c", PHASES, 1, fingerprint="a:other")
        with pytest.raises(fodp.PrivacyError, match="Held for steps to come"):
            book.open("c", PHASES, 100)
    server, file = books
    assert server.left("people") == file.left("people")
    assert summary(server) == summary(file)
    states = [[entry[5:7] + entry[8:10] for entry in book.store.select()] for book in books]
    assert states[0] == states[1]


@pytest.mark.rule(11)
def test_steps_of_a_seeded_run_are_repeated_as_they_were(address):
    """Hashes that are in no row yet are in a file among the user's own, where the mark is."""
    account = named(address).open("a", PHASES, 20, replays=True)
    for step in range(4):
        assert account.covers(step)
        account.witness(step, b"%d" % step)
    book = named(address)
    again = book.open("a", PHASES, 20, replays=True)
    assert again.charged >= 4
    assert again.repeats(0)
    again.witness(2, b"2")
    with pytest.raises(fodp.PrivacyError, match="something else under the same noise"):
        again.witness(3, b"other")
    if again.charged > 4:  # the process before had reserved more than it took
        again.witness(4, b"4")
        with pytest.raises(fodp.PrivacyError, match="resumed by another process"):
            account.witness(4, b"4")
    assert faults(book) == []


def test_rows_cannot_be_changed_or_deleted(address):
    spend(named(address), "a")
    with psycopg.connect(address, autocommit=True) as connection:
        for statement in ("UPDATE fodp_entries SET steps = 0", "DELETE FROM fodp_entries", "TRUNCATE fodp_entries"):
            with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
                connection.execute(statement)


@pytest.mark.rule(25)
@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE fodp_entries SET rdp = 0 WHERE kind = 'settle'",
        "UPDATE fodp_entries SET steps = 1 WHERE kind = 'settle'",
        "UPDATE fodp_entries SET data = '{}' WHERE kind = 'budget'",
        "UPDATE fodp_entries SET by_dataset = 7 WHERE kind = 'settle'",
        "DELETE FROM fodp_entries WHERE id = 3",
        "UPDATE fodp_header SET key = 'ff'",
        "DROP TRIGGER fodp_no_change ON fodp_entries",
        "DROP TABLE fodp_entries; CREATE TABLE fodp_entries (id bigint)",
    ],
)
@pytest.mark.fault(
    "a ledger on a server edited by hand", happens="refused", lost="nothing, with a copy", costs="nothing"
)
def test_edits_behind_its_back_grant_nothing(address, edit):
    spend(named(address), "a")
    behind_its_back(address, edit)
    with pytest.raises(fodp.PrivacyError, match=r"restore a copy"):
        named(address).open("b", PHASES, 1)


@pytest.mark.rule(25)
def test_rows_that_were_cut_off_are_missed(address):
    spend(named(address), "a")
    before = named(address).store.count()
    spend(named(address), "b")
    behind_its_back(address, f"DELETE FROM fodp_entries WHERE id > {before}")
    with pytest.raises(fodp.PrivacyError, match="older than what was known"):
        named(address)
    assert main(["ledger", "accept-rollback", address]) == 0
    spend(named(address), "c")
    behind_its_back(address, "DROP TABLE fodp_entries")
    with pytest.raises(fodp.PrivacyError, match="there is no ledger"):  # and none is begun
        named(address)


@pytest.mark.rule(17)
@pytest.mark.fault(
    "processes that race on a ledger on a server",
    happens="checking and reserving is one transaction under a lock: never overspent",
    lost="nothing",
    costs="nothing",
)
def test_processes_racing_on_one_server_cannot_overspend_together(address):
    refuse_overspending(address)  # the tables do not exist yet either


def test_the_commands_take_its_address(address, tmp_path, capsys):
    words = ["train", *QUICK, "--ledger", address, "--dataset-name", "people"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 2
    assert "is new" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "a"), "--budget", "0.5,1e-5"]) == 0
    assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "a")]) == 0
    assert main(["ledger", "check", address]) == 0
    capsys.readouterr()
    for where in (address, str(tmp_path / "a")):
        assert main(["ledger", "show", where, "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert record["run_count"] == 1
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "m.safetensors")]) == 0


def test_a_password_does_not_get_into_the_folder_of_a_run(address):
    with pytest.raises(fodp.PrivacyError, match=r"pgpass") as refusal:
        Ledger(address.replace("user=fodp", "user=fodp&password=hunter2"))
    assert "hunter2" not in str(refusal.value)


@pytest.mark.fault(
    "the server of a ledger is not there",
    happens="one line, exit code 2, before the first step",
    lost="nothing",
    costs="nothing",
)
def test_a_server_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(fodp.PrivacyError, match="cannot be used") as refusal:
        Ledger(f"postgresql:///none?host={tmp_path}&user=fodp")
    assert "\n" not in str(refusal.value)
