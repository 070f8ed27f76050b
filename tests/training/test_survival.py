"""Runs that survive: a crash or a full disk at any write, and then either the same result or a clear stop.

A profile function watches the calls that write (files, fsync, rename, SQLite's BEGIN, INSERT and COMMIT). Before each
of them it copies the folder: what a crash at that moment would leave, as no buffer of the process is in the copy. Or it
fails at the n-th, in a child forked from this warm process. n runs over all, so every moment between two is covered.
"""

import errno
import hashlib
import io
import os
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint, CSVLog
from fodp.cli.main import main
from fodp.ledger import Ledger, replays
from fodp.ledger.card import faults
from fodp.noise import Streams
from fodp.runs.export import export
from fodp.state import checkpoint

STEPS = 6
CRASHED, REFUSED, BROKEN = 77, 2, 99


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(folder, seed, callbacks=(), ledger=None):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 4, generator=generator)
    torch.manual_seed(1)
    plan = fodp.Plan(
        sampling_rate=1 / 3, steps=STEPS, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=seed,
        accountant="rdp", method="fo-dp-sgd",
    )  # fmt: skip
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    parts = [*callbacks, CSVLog(folder / "metrics.csv"), Checkpoint(folder / "c.pt")]
    return fodp.Trainer(nn.Linear(4, 2), losses, data, plan, callbacks=parts, ledger=ledger)


def train(folder, seed, callbacks=()):
    """Start the run in the folder, or go on with it, as `fodp train` does."""
    trainer = make(folder, seed, callbacks, ledger=Ledger(folder / "l.sqlite"))
    if (folder / "c.pt").exists():
        trainer.resume(folder / "c.pt")
    else:
        assert not sum(row.steps or 0 for row in trainer.ledger.store.select()), "a silent restart"
    outcome = trainer.fit()
    torch.save([p.detach() for p in trainer.model.parameters()], folder / "weights")
    assert outcome.reason == "interrupted" or outcome.epsilon == trainer.plan.epsilon()
    return outcome


def in_child(work):
    """Fork, work, and return how that ended: 0, REFUSED (a PrivacyError) or BROKEN (anything else)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            code = 0
        except fodp.PrivacyError:
            code = REFUSED
        except BaseException:
            traceback.print_exc()
            code = BROKEN
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def log_noise(folder):
    """From now on every noise vector leaves its hash in a file, before anybody can use it."""
    original = Streams.normal_

    def normal(self, out, std, step, name):
        drawn = original(self, out, std, step, name)
        line = f"{step} {hashlib.sha256(drawn.numpy().tobytes()).hexdigest()}\n"
        handle = os.open(folder / "noise", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, line.encode())
        os.close(handle)
        return drawn

    Streams.normal_ = normal


def writes(frame, function):
    """Is this builtin about to write something?"""
    owner, name, caller = getattr(function, "__self__", None), function.__name__, frame.f_code.co_name
    if isinstance(owner, sqlite3.Connection) and caller == "execute":
        caller = frame.f_back.f_code.co_name  # the one that waits for the file
    if caller == "normal":
        return False  # our own log
    if isinstance(owner, sqlite3.Connection):
        return caller in ("transaction", "insert", "_create") and name in ("execute", "executescript")
    if isinstance(owner, io.IOBase):
        return name in ("write", "flush", "close") and owner not in (sys.stdout, sys.stderr)
    return function.__module__ == "posix" and name in ("fsync", "replace", "link", "unlink", "mkdir", "write")


class Fault:
    """Counts the writes of this process, and fails at the given one."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __call__(self, frame, event, function):
        if event != "c_call" or not writes(frame, function):
            return
        self.count += 1
        if self.count == self.at:
            self.act(function)

    def act(self, function):
        if isinstance(getattr(function, "__self__", None), sqlite3.Connection):
            raise sqlite3.OperationalError("database or disk is full")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Copies(Fault):
    """Copies the folder before every write: what a crash there would leave."""

    def __init__(self, folder, copies):
        super().__init__()
        self.folder, self.copies = folder, copies

    def __call__(self, frame, event, function):
        self.at = self.count + 1  # each of them
        super().__call__(frame, event, function)

    def act(self, function):
        shutil.copytree(self.folder, self.copies / str(self.count))


def faulty(folder, seed, fault):
    def work():
        log_noise(folder)
        sys.setprofile(fault)
        try:
            train(folder, seed)
        finally:
            sys.setprofile(None)

    return work


def undisturbed(folder, seed):
    def work():
        log_noise(folder)
        train(folder, seed)

    return work


def resumed(folder, seed):
    """Go on in this process, which is faster than in a child: 0, or REFUSED."""
    original = Streams.normal_
    log_noise(folder)
    try:
        train(folder, seed)
    except fodp.PrivacyError:
        return REFUSED
    finally:
        Streams.normal_ = original
    return 0


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: hundreds of runs would spend their time waiting for the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fodp-tests-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The weights of an uninterrupted seeded run, and how many writes it makes."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 0)  # warm: everything is loaded and cached now
    shutil.rmtree(folder)
    folder.mkdir()

    def work():
        fault = Fault()
        sys.setprofile(fault)
        train(folder, 0)
        sys.setprofile(None)
        (folder / "count").write_text(str(fault.count))

    assert in_child(work) == 0
    return torch.load(folder / "weights"), int((folder / "count").read_text())


def judge(folder, seed, weights, log=("step", "3", "6")):
    """What must hold for a run that was interrupted and then went on to its end."""
    noise = (folder / "noise").read_text().splitlines()
    book = Ledger(folder / "l.sqlite")
    run = checkpoint.load(folder / "c.pt")["run"]
    assert faults(book) == []
    assert book.steps(run) == STEPS
    if seed is None:
        assert len(set(noise)) == len(noise)  # no noise vector repeats
        assert len(noise) <= STEPS  # and no release that the ledger does not count
    else:
        assert all(torch.equal(a, b) for a, b in zip(torch.load(folder / "weights"), weights, strict=True))
        assert len(set(noise)) == STEPS  # replays are the same release
        assert {line.split(",")[1] for line in (folder / "metrics.csv").read_text().splitlines()} >= set(log)
    left = {path.name for path in folder.iterdir()} - {
        "l.sqlite",
        "l.sqlite.mark",
        "c.pt",
        "metrics.csv",
        "noise",
        "weights",
    }
    # Of a run that broke off before its first checkpoint, and that nobody can resume, a file of hashes may stay.
    assert all(name.endswith((".part", ".tail")) for name in left)
    assert not list(folder.glob(replays._path(book.store, run, "*").name))
    book.close()


def all_is_lost(folder, seed):
    """A secure run that used all of its steps after its only checkpoint: it must not pass for a trained one."""
    saved, book = checkpoint.load(folder / "c.pt"), Ledger(folder / "l.sqlite")
    used = book.steps(saved["run"])
    book.close()
    return seed is None and saved["step"] == 0 and used == STEPS and not (folder / "weights").exists()


def sampled(writes, seed):
    """Every tenth write, others for each kind of run, and the last; all of them in `make soak`."""
    if os.environ.get("FODP_ALL_WRITES"):
        return list(writes)
    return sorted({*list(writes)[(5 if seed is None else 0) :: 10], writes[-1]})


@pytest.mark.rule(11)
@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "secure"])
@pytest.mark.fault(
    "the process dies at any single write to a file or to the ledger",
    happens="resuming goes on; a seeded run ends with the same bits, a secure one repeats no noise",
    lost="steps since the last checkpoint, in a secure run",
    costs="the lost steps stay charged",
)
def test_a_crash_at_any_write_is_survived(quick_path, reference, seed):
    weights, count = reference
    run = quick_path / "run"
    run.mkdir()
    assert in_child(faulty(run, seed, Copies(run, quick_path))) == 0
    copies = len(list(quick_path.iterdir())) - 1
    run.rename(quick_path / str(copies + 1))  # after the last write
    assert copies > max(50, 0.9 * count)  # a few more or fewer than were counted: how far a run reserves, goes by time
    for at in sampled(range(1, copies + 2), seed):
        folder = quick_path / str(at)
        code = resumed(folder, seed)
        if code == REFUSED and all_is_lost(folder, seed):
            continue
        assert code == 0, f"write {at}"
        judge(folder, seed, weights)


@pytest.mark.rule(11)
@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "secure"])
@pytest.mark.fault(
    "the disk is full at any single write",
    happens="one line that says so, exit code 2; resuming goes on",
    lost="at most steps since the last checkpoint",
    costs="the lost steps stay charged",
)
def test_a_full_disk_at_any_write_stops_clearly_and_is_survived(quick_path, reference, seed):
    weights, count = reference
    refused = 0
    tried = sampled(range(1, count + 1), seed)
    for at in tried:
        folder = quick_path / str(at)
        folder.mkdir()
        code = in_child(faulty(folder, seed, Fault(at)))
        assert code in (REFUSED, 0), f"write {at}"  # never a traceback; 0 where only tidying up failed
        refused += code == REFUSED
        code = resumed(folder, seed)
        if code == REFUSED and all_is_lost(folder, seed):
            continue
        assert code == 0, f"write {at}"
        judge(folder, seed, weights, log=("step", "6"))  # a line that did not fit on the disk is gone
    assert refused > len(tried) // 2


@pytest.mark.rule(11)
@pytest.mark.parametrize("limit", [0, 4096, 100000, 2**22])
@pytest.mark.fault(
    "a limit on the size of files (quota, `ulimit -f`)",
    happens="one line, exit code 2; resuming goes on when it is lifted",
    lost="nothing",
    costs="nothing",
)
def test_files_that_may_not_grow_stop_the_run_clearly(tmp_path, reference, limit):
    """Not injected: the kernel refuses to write beyond a size, whoever asks."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        train(tmp_path, 0)

    code = in_child(limited)
    assert code == (REFUSED if limit < 2**20 else 0)
    assert in_child(undisturbed(tmp_path, 0)) == 0
    judge_weights = torch.load(tmp_path / "weights")
    assert all(torch.equal(a, b) for a, b in zip(judge_weights, reference[0], strict=True))


class Slow(Callback):
    """Leaves time for a bullet between steps."""

    def on_step(self, trainer):
        time.sleep(0.02)


@pytest.mark.rule(11)
@pytest.mark.parametrize(("seed", "after"), [(0, 2), (None, 1), (None, 4)])
@pytest.mark.fault(
    "kill -9, power cut",
    happens="`--resume` goes on from the last checkpoint",
    lost="steps since the last checkpoint, in a secure run",
    costs="the lost steps stay charged",
)
def test_a_real_kill_is_survived(tmp_path, reference, seed, after):
    def slowly():
        log_noise(tmp_path)
        train(tmp_path, seed, [Slow()])

    pid = os.fork()
    if pid == 0:
        slowly()
        os._exit(0)
    for _ in range(2000):
        if (tmp_path / "noise").exists() and len((tmp_path / "noise").read_text().splitlines()) >= after:
            break
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert in_child(undisturbed(tmp_path, seed)) == 0
    judge(tmp_path, seed, reference[0])


@pytest.mark.fault(
    "a folder or file system that cannot be written",
    happens="refused before the first step; reading commands work",
    lost="nothing",
    costs="nothing",
)
def test_a_read_only_folder_stops_clearly(reference):
    folder = Path(tempfile.mkdtemp(prefix="fodp-read-only-"))  # pytest's own folders are closed to other users
    folder.chmod(0o755)

    def as_nobody(work):
        def child():
            if os.getuid() == 0:
                os.setuid(65534)  # root may write anywhere
            work()

        return child

    try:
        train(folder, 0)
        for path in folder.iterdir():
            path.chmod(0o444)
        folder.chmod(0o555)
        assert in_child(as_nobody(lambda: train(folder, 0))) == REFUSED
        assert in_child(as_nobody(lambda: train(folder / "none", 0))) == REFUSED
        book = ["ledger", "check", str(folder / "l.sqlite")]
        assert in_child(as_nobody(lambda: main(book) and os._exit(BROKEN))) == 0  # reading needs no writing
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            trainer.interrupt()


class TestCheckpoint:
    def saved(self, folder, seed=0):
        train(folder, seed, [StopAt(4)])
        return folder / "c.pt"

    def refused(self, folder, match, seed=0):
        with pytest.raises(fodp.PrivacyError, match=match):
            train(folder, seed)

    @pytest.mark.fault(
        "a flipped byte anywhere in a checkpoint",
        happens="refused: restore a copy",
        lost="nothing, with a copy",
        costs="nothing",
    )
    def test_every_flipped_byte_is_noticed(self, tmp_path):
        path = self.saved(tmp_path)
        good = path.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 150)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :])
            with pytest.raises(fodp.PrivacyError):
                checkpoint.load(path)

    @pytest.mark.parametrize("seed", [0, None], ids=["seeded", "secure"])
    @pytest.mark.fault(
        "a checkpoint that was rewritten, digest and all",
        happens="refused: the ledger does not know it",
        lost="nothing",
        costs="nothing",
    )
    def test_a_forged_one_is_refused_by_the_ledger(self, tmp_path, seed):
        path = self.saved(tmp_path, seed)
        content = checkpoint.load(path)
        content["model"]["weight"] += 1.0
        checkpoint.save(path, {k: v for k, v in content.items() if k not in ("digest", "format", "made_with")})
        self.refused(tmp_path, "tampered", seed)

    @pytest.mark.fault(
        "an older checkpoint of the run put back",
        happens="a seeded run repeats the same releases; a secure one goes on behind the steps that were used",
        lost="steps since that checkpoint, in a secure run",
        costs="nothing is charged twice",
    )
    def test_an_older_one_of_the_run_is_good(self, tmp_path, reference):
        path = self.saved(tmp_path)
        old = path.read_bytes()
        train(tmp_path, 0)
        path.write_bytes(old)
        train(tmp_path, 0)
        assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "weights"), reference[0], strict=True))

    @pytest.mark.parametrize(("name", "seeds"), [("fodp", (0,)), ("torch", (0,))])
    @pytest.mark.fault(
        "a checkpoint of another version of fodp or torch",
        happens="a seeded run is refused; a secure one goes on where the format can be read",
        lost="nothing",
        costs="nothing",
    )
    def test_of_another_version(self, tmp_path, monkeypatch, name, seeds):
        for seed in seeds:
            folder = tmp_path / str(seed)
            folder.mkdir()
            with monkeypatch.context() as patch:
                patch.setattr(fodp if name == "fodp" else torch, "__version__", "0.0.7")
                self.saved(folder, seed)
            self.refused(folder, rf"written with {name} 0\.0\.7", seed)

    @pytest.mark.fault(
        "a run resumed with an older copy of its ledger",
        happens="refused: it has forgotten what was spent",
        lost="nothing",
        costs="nothing",
    )
    def test_an_older_ledger_is_refused(self, tmp_path):
        (tmp_path / "run").mkdir()
        self.saved(tmp_path / "run", None)
        shutil.copy(tmp_path / "run" / "l.sqlite", tmp_path / "old")
        train(tmp_path / "run", None)
        shutil.copy(tmp_path / "old", tmp_path / "run" / "l.sqlite")
        self.refused(tmp_path / "run", "older than what was known", None)
        (tmp_path / "run" / "l.sqlite.mark").unlink()
        self.refused(tmp_path / "run", "only with its ledger", None)

    @pytest.mark.parametrize("seed", [0, None], ids=["seeded", "secure"])
    @pytest.mark.fault(
        "a run resumed without its ledger",
        happens="refused",
        lost="nothing",
        costs="nothing",
    )
    def test_not_without_its_ledger(self, tmp_path, seed):
        path = self.saved(tmp_path, seed)
        with pytest.raises(fodp.PrivacyError, match="only with its ledger"):
            make(tmp_path, seed).resume(path)

    @pytest.mark.rule(11)
    @pytest.mark.fault(
        "a seeded run that replays and stops early",
        happens="its ε is that of all that was ever released",
        lost="nothing",
        costs="nothing",
    )
    def test_a_result_never_states_less_than_was_spent(self, tmp_path):
        """A seeded run replays from an old checkpoint and stops early: what it had released stays counted."""
        old = self.saved(tmp_path).read_bytes()
        train(tmp_path, 0)
        (tmp_path / "c.pt").write_bytes(old)
        trainer = make(tmp_path, 0, [StopAt(5)], ledger=Ledger(tmp_path / "l.sqlite"))
        trainer.resume(tmp_path / "c.pt")
        outcome = trainer.fit()
        assert (outcome.reason, outcome.steps) == ("interrupted", 5)
        assert outcome.epsilon == trainer.plan.epsilon()


class TestCommandLine:
    WORDS = ("--epochs", "2", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1", "--quiet")

    def killed(self, folder, when, seed=("--seed", "0")):
        """`fodp train` that dies in the middle, at a moment chosen by `when(trainer)`."""

        class Bullet(Callback):
            def on_start(self, trainer):
                if when == "start":
                    os._exit(CRASHED)

            def on_step(self, trainer):
                if trainer.step == when:
                    os._exit(CRASHED)

        def work():
            original = fodp.Trainer.fit

            def fit(trainer):
                trainer.callbacks.insert(0, Bullet())
                return original(trainer)

            fodp.Trainer.fit = fit
            main(["train", *self.WORDS, *seed, "--out", str(folder)])

        assert in_child(work) == CRASHED

    @pytest.mark.fault(
        "a crash before the first release",
        happens="`--resume` begins anew and says so",
        lost="nothing",
        costs="nothing",
    )
    def test_a_run_that_released_nothing_begins_anew_and_says_so(self, capfd, tmp_path):
        self.killed(tmp_path / "r", "start")
        assert not (tmp_path / "r" / "checkpoint.pt").exists()
        assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == 0
        assert "begins anew" in capfd.readouterr().err

    @pytest.mark.parametrize("when", ["before its configuration", "start", 5])
    @pytest.mark.fault(
        "half-written files of a killed process",
        happens="removed when the run goes on; files that are not ours stay",
        lost="nothing",
        costs="nothing",
    )
    def test_what_a_killed_process_had_begun_to_write_is_removed(self, tmp_path, when):
        folder, words = tmp_path / "r", ["--resume"]
        if when == "before its configuration":
            folder.mkdir()
            words = [*self.WORDS, "--seed", "0"]
        else:
            self.killed(folder, when)
        ours = ("config.json", "checkpoint.pt", "ledger.sqlite", "ledger.sqlite.mark", "accuracy.png", "metrics.csv")
        for name in (*(f"{file}.a.part" for file in ours), "mine.part"):
            (folder / name).touch()
        assert main(["train", *words, "--quiet", "--out", str(folder)]) == 0
        assert [path.name for path in folder.glob("*.part")] == ["mine.part"]  # what is not ours stays

    @pytest.mark.fault(
        "the checkpoint is gone though steps were used",
        happens="refused: restore it, or start a new run elsewhere",
        lost="the training",
        costs="its steps stay charged",
    )
    def test_never_a_silent_restart(self, capfd, tmp_path):
        self.killed(tmp_path / "r", 5)
        (tmp_path / "r" / "checkpoint.pt").unlink()
        assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == 2
        assert "steps were used" in capfd.readouterr().err

    @pytest.mark.fault(
        "an export of a run that was killed",
        happens="its card counts the steps that the ledger knows, not those of the checkpoint",
        lost="nothing",
        costs="nothing",
    )
    def test_an_export_states_what_the_ledger_counts(self, capfd, tmp_path):
        self.killed(tmp_path / "r", 15, ())
        saved = checkpoint.load(tmp_path / "r" / "checkpoint.pt")
        stated = export(tmp_path / "r", tmp_path / "m.safetensors")
        assert saved["step"] < 15 <= stated["steps"]
        # How far steps are reserved, and whether a checkpoint was due, is a matter of time.
        lost = saved["step"] == 0 and stated["steps"] == 20
        assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == (REFUSED if lost else 0)
        said = capfd.readouterr()
        assert ("stays charged" in said.err) if lost else ("stay charged" in said.out)
