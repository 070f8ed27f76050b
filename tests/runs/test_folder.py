"""One run owns its folder while it works, and nobody else writes there; the dead own nothing."""

import os
import signal
import time

import pytest

import fodp
from fodp.callbacks import Callback
from fodp.cli.main import main
from fodp.cli.train import _fresh_name
from fodp.runs.folder import RunFolder
from fodp.state import checkpoint

WORDS = ("--epochs", "2", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1", "--quiet")


class Wait(Callback):
    """Holds a run after its first step for as long as a file is there."""

    def __init__(self, file):
        self.file = file

    def on_step(self, trainer):
        while self.file.exists():
            time.sleep(0.01)


def started(words, wait=None):
    """`fodp train` in a forked child."""
    pid = os.fork()
    if pid == 0:
        original = fodp.Trainer.fit

        def fit(trainer):
            if wait is not None:
                trainer.callbacks.append(Wait(wait))
            return original(trainer)

        fodp.Trainer.fit = fit
        os._exit(main(["train", *words]))
    return pid


def code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never happened")


@pytest.mark.rule(11)
@pytest.mark.fault(
    "several processes given the same `--out`",
    happens="one trains; the others are refused with a line that names its process",
    lost="nothing",
    costs="nothing",
)
def test_of_several_processes_one_owns_the_folder(tmp_path, capfd):
    main(["train", *WORDS, "--out", str(tmp_path / "warm")])  # what is loaded and cached, children inherit
    wait = tmp_path / "wait"
    wait.touch()
    processes = {started([*WORDS, "--out", str(tmp_path / "r")], wait) for _ in range(4)}
    for _ in range(3):
        pid, status = os.wait()
        assert os.waitstatus_to_exitcode(status) == 2
        processes.remove(pid)
    wait.unlink()
    assert code(processes.pop()) == 0
    said = capfd.readouterr().err
    assert said.count("belongs to a run that process") + said.count("holds a run already") == 3
    assert checkpoint.load(tmp_path / "r" / "checkpoint.pt")["lost_steps"] == 0
    assert not (tmp_path / "r" / "run.lock").exists()


@pytest.mark.fault(
    "a run is resumed while its process is alive",
    happens="refused; the process goes on",
    lost="nothing",
    costs="nothing",
)
def test_a_living_run_is_not_taken_over_and_a_dead_one_is(tmp_path, capfd):
    wait, folder = tmp_path / "wait", tmp_path / "r"
    wait.touch()
    pid = started([*WORDS, "--out", str(folder)], wait)
    until((folder / "checkpoint.pt").exists)
    resume = ["train", "--resume", "--quiet", "--out", str(folder)]
    assert main(resume) == 2
    assert f"belongs to a run that process {pid} on" in capfd.readouterr().err
    os.kill(pid, signal.SIGKILL)
    assert code(pid) == -signal.SIGKILL
    assert (folder / "run.lock").exists()
    assert main(resume) == 0
    assert not (folder / "run.lock").exists()


def test_a_folder_that_holds_a_run_is_left_as_it_was(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.create()
    folder.config.write_text("{}")
    folder.leave()
    before = sorted(path.name for path in folder.path.iterdir())
    with pytest.raises(fodp.PrivacyError, match="holds a run already"):
        RunFolder(tmp_path / "r").create()
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_holding_is_for_one_at_a_time_and_can_be_passed_on(tmp_path):
    one, other = RunFolder(tmp_path), RunFolder(tmp_path)
    one.take()
    one.take()  # it is ours
    with pytest.raises(fodp.PrivacyError, match=f"process {os.getpid()} on"):
        other.take()
    one.leave()
    other.take()
    other.leave()


@pytest.mark.fault(
    "runs started within one second without `--out`",
    happens="each has a folder of its own",
    lost="nothing",
    costs="nothing",
)
def test_default_names_never_collide():
    assert len({_fresh_name() for _ in range(1000)}) == 1000
