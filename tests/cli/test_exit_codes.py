"""Every exit code of the command line is on the page docs/exit-codes.md, and is what commands return."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fodp
from fodp.audit.report import Report
from fodp.callbacks import Callback
from fodp.cli import methods
from fodp.cli.commands import OWN
from fodp.cli.exits import CODES
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.state import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
WORDS = ("--epochs", "2", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1", "--quiet")


class Kill(Callback):
    """Sends signals to this very process after some steps: {step: signal}."""

    def __init__(self, at):
        self.at = at

    def on_step(self, trainer):
        if trainer.step in self.at:
            os.kill(os.getpid(), self.at[trainer.step])


@pytest.fixture
def train(monkeypatch, tmp_path):
    """`fodp train` in a folder, with a callback of ours."""
    original = fodp.Trainer.fit

    def run(callback=None, *words):
        def fit(trainer):
            trainer.callbacks.insert(0, callback or Callback())
            return original(trainer)

        monkeypatch.setattr(fodp.Trainer, "fit", fit)
        return main(["train", *(words or WORDS), "--out", str(tmp_path / "r")])

    return run


@pytest.fixture
def heard():
    """Under `nohup` the tests themselves would ignore a SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def on_the_page():
    rows = re.findall(r"^\| ([0-9, ]+) \|", PAGE.read_text(), re.MULTILINE)
    return {int(code) for row in rows for code in row.split(",")}


def test_the_page_and_every_help_list_exactly_the_codes_that_there_are(capsys):
    codes = {code for row in CODES for code in row}
    stopped = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    assert on_the_page() == codes == {0, 1, 2, 70} | stopped
    for words in ([], *([command.name] for command in OWN)):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert all(f"  {', '.join(map(str, row))}: " in shown for row in CODES)


@pytest.mark.rule(11)
@pytest.mark.fault(
    "Ctrl-C, SIGTERM of a job scheduler, SIGHUP of a closed terminal",
    happens="the step under way ends, a checkpoint is written; exit code 128 + signal, `--resume` goes on",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_in_good_order(train, tmp_path, capsys, number, heard):
    before = signal.getsignal(number)
    assert train(Kill({5: number})) == 128 + number
    assert signal.getsignal(number) is before
    assert "stopped after step 5 of" in capsys.readouterr().out
    saved = checkpoint.load(tmp_path / "r" / "checkpoint.pt")
    assert saved["step"] == 5
    book = Ledger(tmp_path / "r" / "ledger.sqlite", create=False)
    assert book.steps(saved["run"]) == 5  # what was reserved ahead was given back
    book.close()
    assert train(None, "--resume", "--quiet") == 0
    assert checkpoint.load(tmp_path / "r" / "checkpoint.pt")["lost_steps"] == 0


class Twice(Callback):
    """Two signals within one moment of a run."""

    def __init__(self, number):
        self.number = number

    def on_epoch(self, trainer):
        os.kill(os.getpid(), self.number)
        os.kill(os.getpid(), self.number)


@pytest.mark.fault(
    "a second signal while a run is ending",
    happens="it breaks off at once, with the signal's exit code; `--resume` goes on from the last checkpoint",
    lost="steps since the last checkpoint",
    costs="the lost steps stay charged",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_breaks_off_at_once(train, capsys, number):
    assert train(Twice(number)) == 128 + number
    assert "fodp: interrupted" in capsys.readouterr().err


def test_nohup_is_left_alone(train):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(Kill({5: signal.SIGHUP})) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault(
    "a mistake of fodp, or in the user's own model",
    happens="the traceback, a line that says what to do, exit code 70",
    lost="the step that broke off",
    costs="that step stays charged",
)
def test_an_unexpected_error_is_no_violation(monkeypatch, capsys):
    def broken(options):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(methods, "run", broken)
    monkeypatch.setattr("fodp.cli.commands.OWN", (fodp.cli.commands.Command("methods", "", methods.options, broken),))
    assert main(["methods"]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError: a mistake of ours" in said
    assert "should not have happened" in said


def test_a_violation_is_one_and_wrong_input_is_two(capsys):
    assert main(["epsilon", "--noise-multiplier", "nonsense"]) == 2
    assert main(["methods"]) == 0
    assert {Report.exit_code.fget(type("R", (), {"consistent": held})()) for held in (True, False)} == {0, 1}


@pytest.mark.fault(
    "stdout in ASCII or cp1252 (cron, pipes on Windows)",
    happens="what cannot be printed is replaced by `?`; files are UTF-8 all the same",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("what", ["train", "methods", "ledger export"])
def test_what_a_stream_cannot_show_is_replaced(tmp_path, encoding, what):
    ledger = tmp_path / "l.sqlite"
    words = ["train", *WORDS, "--seed", "0", "--out", str(tmp_path / "r"), "--ledger", str(ledger), "--no-budget",
             "--dataset-name", "Лица ε"]  # fmt: skip
    if what == "methods":
        words = ["methods", "fo-dp-sgd"]
    elif what == "ledger export":
        assert main(words) == 0
        words = ["ledger", "export", str(ledger)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "fodp.cli.main", *words], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    done.stdout.decode(encoding)


@pytest.mark.fault(
    "folder and ledger with names that are no text (not UTF-8)",
    happens="they work like any others",
    lost="nothing",
    costs="nothing",
)
def test_paths_that_are_no_text_work(tmp_path, capsys):
    folder, ledger = tmp_path / os.fsdecode(b"r\xff\xfe"), tmp_path / os.fsdecode(b"l\xff.sqlite")
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError:
        pytest.skip("this file system takes text only")
    words = [*WORDS, "--ledger", str(ledger), "--no-budget", "--dataset-name", "people", "--json"]
    assert main(["train", *words, "--out", str(folder)]) == 0
    assert main(["train", "--resume", "--quiet", "--out", str(folder)]) == 0
    assert main(["export", str(folder), str(tmp_path / os.fsdecode(b"m\xff.safetensors"))]) == 0
    assert main(["ledger", "check", str(ledger)]) == 0
    assert main(["ledger", "show", str(ledger)]) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {folder.name, ledger.name}


@pytest.mark.fault(
    "a δ of at least one over the public size of the data",
    happens="a sentence on stderr says what that allows, and names a smaller one",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize(("delta", "said"), [("0.001", 1), ("0.0005", 0)])
def test_a_large_delta_is_met_with_a_sentence(tmp_path, capsys, delta, said):
    words = [*WORDS[2:], "--epochs", "0.2", "--delta", delta]
    assert main(["train", *words, "--out", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().err.count("is above 0.00069, one over the 1.44e+03 records") == said
