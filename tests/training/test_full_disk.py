"""A disk that fills up: room is taken before the first release, the training is not lost, and loss is no success."""

import contextlib
import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.state import checkpoint
from fodp.support import files


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(folder, callbacks=(), seed=None, width=300, ledger=None):
    """A run whose window makes later checkpoints much larger than the first."""
    inputs = torch.randn(30, width, generator=torch.Generator().manual_seed(0))
    plan = fodp.Plan(
        sampling_rate=1 / 3, steps=12, lot_size=10, clip_norm=1.0, noise_multiplier=4.0, delta=1e-5, seed=seed,
        accountant="rdp", method="fo-dp-sgd", params=dict(window=16),
    )  # fmt: skip
    torch.manual_seed(1)
    book = ledger or Ledger(folder / "l.sqlite")
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    saving = Checkpoint(folder / "c.pt", every=100)
    return fodp.Trainer(nn.Linear(width, 40), losses, data, plan, callbacks=[*callbacks, saving], ledger=book)


class Fill(Callback):
    """Somebody else takes the rest of the disk after some steps."""

    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_step(self, trainer):
        if trainer.step == self.step:
            fill(self.folder)


def fill(folder):
    with (folder / "others").open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):  # no space left
                while file.write(bytes(size)):
                    pass


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 4 MB, where the system lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs a file system of its own, which only root can have")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.rule(11)
@pytest.mark.fault(
    "the disk fills up while a run trains",
    happens="checkpoints are written into room that was taken before the first release; the run ends well",
    lost="nothing",
    costs="twice the size of a checkpoint on the disk while the run goes on",
)
def test_a_disk_that_fills_up_does_not_lose_the_training(small_disk):
    book = Ledger(small_disk.parent / "l.sqlite")  # elsewhere: only the checkpoint is at stake
    run = make(small_disk, [Fill(small_disk, 5)], ledger=book)
    assert run.fit().reason == "finished"
    saved = checkpoint.load(small_disk / "c.pt")
    assert saved["step"] == 12
    assert len(saved["state"]["states"]["method"]["releases"]) == 12
    assert {path.name for path in small_disk.iterdir()} == {"c.pt", "others"}  # the room is given back


@pytest.mark.rule(11)
@pytest.mark.fault(
    "the disk of checkpoint and ledger fills up, so that no step can be written down",
    happens="the run stops before the next release, with a checkpoint; exit code 2; `--resume` goes on",
    lost="nothing",
    costs="nothing",
)
def test_a_full_disk_under_the_ledger_stops_the_run_in_good_order(small_disk, monkeypatch):
    for name in ("_AHEAD", "_WRITES"):  # steps are reserved one by one, so that the ledger is written to
        monkeypatch.setattr(f"fodp.ledger.account.{name}", 0.0)
    run = make(small_disk, [Fill(small_disk, 5)])
    with pytest.raises(fodp.PrivacyError, match="full"):
        run.fit()
    saved = checkpoint.load(small_disk / "c.pt")
    assert saved["step"] == run.step >= 5
    (small_disk / "others").unlink()
    again = make(small_disk, ledger=run.ledger)
    again.resume(small_disk / "c.pt")
    assert again.fit().reason == "finished"
    assert again.lost_steps == 0


@pytest.mark.rule(11)
@pytest.mark.fault(
    "no room on the disk for the checkpoints to come",
    happens="refused before the first release, naming how much is needed",
    lost="nothing",
    costs="nothing",
)
def test_too_little_room_is_found_before_the_first_release(small_disk):
    fill(small_disk)
    with (small_disk / "others").open("r+b") as file:
        file.truncate(os.path.getsize(file.name) - 500_000)  # enough for the first checkpoint, not for a full window
    run = make(small_disk, ledger=Ledger(small_disk.parent / "l.sqlite"))
    with pytest.raises(fodp.PrivacyError, match=r"no room .* which need [0-9]+ MB .* nothing was released"):
        run.fit()
    assert run.step == 0
    assert run.ledger.steps(run.run_id) in (0, None)


def fail_to_save(monkeypatch, from_call):
    """From a given checkpoint on, the system says that the disk is full."""
    original, calls = torch.save, []

    def save(content, file, *args, **kwargs):
        calls.append(1)
        if len(calls) >= from_call:
            file.failed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise RuntimeError(
                "[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0"
            )  # as PyTorch puts it
        return original(content, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)


@pytest.mark.fault(
    "the last checkpoint cannot be written at all",
    happens="the weights and their privacy card are saved as weights.safetensors; exit code 2 with a line of ours",
    lost="what it takes to go on; not the model",
    costs="nothing more than was spent",
)
def test_the_weights_at_least_are_saved(tmp_path, monkeypatch):
    fail_to_save(monkeypatch, 2)
    run = make(tmp_path)
    with pytest.raises(fodp.PrivacyError, match=r"disk is full.*The weights of step 12 .* are in .*weights") as raised:
        run.fit()
    assert "inline_container" not in str(raised.value)
    with safe_open(tmp_path / "weights.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("weight"), run.model.weight)
        assert float(opened.metadata()["epsilon"]) == run.plan.epsilon()
    assert checkpoint.load(tmp_path / "c.pt")["step"] == 0  # the one before is untouched


@pytest.mark.rule(11)
@pytest.mark.fault(
    "all steps of a secure run were used and its only checkpoint is from before the first",
    happens="resuming is refused: there is no result; exit code 2",
    lost="the training",
    costs="all its steps stay charged",
)
def test_a_run_that_lost_everything_is_no_result(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fail_to_save(patch, 2)
        first = make(tmp_path)
        with pytest.raises(fodp.PrivacyError, match="disk is full"):
            first.fit()
    assert first.ledger.steps(first.run_id) == 12  # what was released stays charged
    again = make(tmp_path)
    with pytest.raises(fodp.PrivacyError, match=r"all 12 steps of this run were used.*the training is lost"):
        again.resume(tmp_path / "c.pt")


def test_the_command_line_says_so_too(tmp_path, monkeypatch, capsys):
    words = ["--epochs", "1", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1", "--quiet"]
    with monkeypatch.context() as patch:
        fail_to_save(patch, 2)
        assert main(["train", *words, "--out", str(tmp_path / "r")]) == 2
    assert "The weights of step" in capsys.readouterr().err
    assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == 2
    said = capsys.readouterr()
    assert "the training is lost" in said.err
    assert not (tmp_path / "r" / "result.json").exists()


class TestRoom:
    def test_it_is_used_and_passed_on(self, tmp_path):
        path = tmp_path / "f"
        path.write_bytes(b"old")
        files.make_room(path, 1000)
        room = tmp_path / "f.room.part"
        assert room.stat().st_blocks * 512 >= 1000
        inode = room.stat().st_ino
        with files.atomically(path) as part, part.open("r+b") as file:
            file.write(b"new")
            file.truncate()
        assert (path.read_bytes(), path.stat().st_ino) == (b"new", inode)
        assert room.read_bytes() == b"old"  # its blocks are the room for what comes next
        files.give_room_back(path)
        assert [file.name for file in tmp_path.iterdir()] == ["f"]

    def test_a_crash_while_writing_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "f"
        path.write_bytes(b"old")
        files.make_room(path, 10)

        def broken_off():
            with files.atomically(path) as part:
                part.write_bytes(b"half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            broken_off()
        assert path.read_bytes() == b"old"

    def test_what_cannot_be_had_leaves_no_litter(self, tmp_path):
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            try:
                files.make_room(tmp_path / "f", 10_000)
            except OSError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "a checkpoint of a large model",
    happens="tensors go to the disk from where they are, hashed on the way",
    lost="nothing",
    costs="memory of at most a tenth of the state",
)
def test_a_checkpoint_takes_no_memory_to_speak_of(tmp_path):
    """In a process of its own, whose peak nothing else has raised."""
    pid = os.fork()
    if pid == 0:
        run = make(tmp_path, width=20_000)  # 0.8 million parameters, 15 releases: 50 MB
        for _ in range(16):
            run.session.states["method"].write(torch.randn(run.source.engine.layout.size))
        state = (tmp_path / "before").write_text("") or 16 * run.source.engine.layout.size * 4
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        run.save(tmp_path / "c.pt")
        grown = peak() - before
        os._exit(0 if grown < 0.1 * state and (tmp_path / "c.pt").stat().st_size > 0.9 * state else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_finished_run_is_saved_once_at_its_end(tmp_path, monkeypatch):
    written = []
    original = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda path, *rest: (written.append(path), original(path, *rest)))
    run = make(tmp_path)
    run.callbacks[-1].every = 1
    run.fit()
    assert len(written) == 1 + run.epochs
    shutil.rmtree(tmp_path, ignore_errors=True)
