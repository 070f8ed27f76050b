"""A seeded run that is resumed is not charged twice for a step, so the step must be the same release, bit for bit."""

import functools
import os
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from fodp.callbacks import Callback
from fodp.ledger import Ledger, replays
from fodp.ledger.checking import faults
from fodp.own_loop import make_private
from fodp.trainer import Trainer
from ledgers_for_tests import data as tiny_data
from ledgers_for_tests import losses
from ledgers_for_tests import plan as tiny_plan

STEPS, SAVED = 8, 3
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


plan = functools.partial(tiny_plan, sampling_rate=0.5, steps=STEPS, method="fo-dp-sgd")
data = functools.partial(tiny_data, 40)


def other_losses(model, batch):
    return -losses(model, batch)


class Save(Callback):
    """Writes a checkpoint after some steps, and perhaps is killed later on."""

    def __init__(self, folder, killed_after=None):
        self.folder, self.killed_after = folder, killed_after

    def on_step(self, trainer):
        if trainer.step == SAVED:
            trainer.save(self.folder / "c.pt")
        if trainer.step == self.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def made(folder, loss=losses, callbacks=(), the_plan=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    book = Ledger(folder / "l.sqlite", dataset="people", budget=(8.0, 1e-5))
    return Trainer(
        model, loss, data(), the_plan or plan(), torch.optim.SGD(model.parameters(), lr=0.1), ledger=book,
        callbacks=callbacks, **options,
    )  # fmt: skip


def resumed(folder, *words, **options):
    trainer = made(folder, *words, **options)
    trainer.resume(folder / "c.pt")
    return trainer


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.rule(11)
def test_another_loss_repeats_no_noise(tmp_path):
    """Else two models give away the difference of two sums, with no noise on it."""
    made(tmp_path, callbacks=[Save(tmp_path)]).fit()
    other = resumed(tmp_path, other_losses)
    before = weights(other)
    with pytest.raises(fodp.PrivacyError, match=r"step 3 of this seeded run .*something else under the same noise"):
        other.fit()
    assert torch.equal(weights(other), before)  # nothing of it was used
    with pytest.raises(fodp.PrivacyError):  # nor is it later: memories have seen it
        other.fit()
    with pytest.raises(fodp.PrivacyError, match="has ended"):
        other.session.take_step()
    assert other.ledger.steps(other.run_id) == STEPS
    assert faults(other.ledger) == []


@pytest.mark.rule(11)
@pytest.mark.parametrize(
    "changes",
    [dict(copies=2), dict(augment=lambda batch: (2 * batch[0], batch[1]))],
    ids=["copies", "augmentation"],
)
def test_other_changes_repeat_no_noise(tmp_path, changes):
    made(tmp_path, callbacks=[Save(tmp_path)]).fit()
    with pytest.raises(fodp.PrivacyError, match="something else under the same noise"):
        resumed(tmp_path, **changes).fit()


@pytest.mark.rule(11)
def test_other_owners_repeat_no_noise(tmp_path):
    people = plan(unit="person", records_per_person=2, method="dp-sgd", sampling_rate=0.5)
    made(tmp_path, the_plan=people, owners=[n // 2 for n in range(40)], callbacks=[Save(tmp_path)]).fit()
    with pytest.raises(fodp.PrivacyError, match="something else under the same noise"):
        resumed(tmp_path, the_plan=people, owners=[n % 20 for n in range(40)]).fit()


@pytest.mark.rule(11)
def test_the_same_run_is_granted(tmp_path):
    whole = made(tmp_path, callbacks=[Save(tmp_path)])
    whole.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = resumed(tmp_path)
        assert again.fit().lost_steps == 0
    assert torch.equal(weights(again), weights(whole))
    assert again.ledger.steps(again.run_id) == STEPS
    assert faults(again.ledger) == []
    assert not list(tmp_path.glob("*.tail")) + list(tmp_path.glob("*.taken"))


@pytest.mark.rule(11)
def test_the_own_loop_too(tmp_path):
    def loop(sign, resume=None):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        book = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(8.0, 1e-5))
        model, optimizer, loader = make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan(), ledger=book, resume=resume
        )
        try:
            for inputs, labels in loader:
                optimizer.zero_grad()
                (sign * F.cross_entropy(model(inputs), labels)).backward()
                optimizer.step()
                if loader.step == SAVED and resume is None:
                    loader.save(tmp_path / "c.pt")
        finally:
            loader.close()
        return model.weight.detach().clone()

    first = loop(1)
    assert torch.equal(loop(1, tmp_path / "c.pt"), first)
    with pytest.raises(fodp.PrivacyError, match="something else under the same noise"):
        loop(-1, tmp_path / "c.pt")


@forking
@pytest.mark.rule(11)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestKilled:
    """Hashes that are in no row of the ledger yet are in a file beside it."""

    def killed(self, folder):
        """One whose last steps are in no row: it reserves four at a time, and is killed at the sixth."""

        def work():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fodp.ledger.account.Account._block", lambda *_: 4)
                made(folder, callbacks=[Save(folder, killed_after=6)]).fit()

        assert in_child(work) == -signal.SIGKILL
        book = Ledger(folder / "l.sqlite")
        (run,) = book.store.select("run")
        assert book.steps(run.run) == 8
        assert max(replays.known(book.store, run.run)) < 5
        return run.run

    def test_it_goes_on_bit_for_bit(self, tmp_path):
        (tmp_path / "whole").mkdir()
        whole = made(tmp_path / "whole")
        whole.fit()
        self.killed(tmp_path)
        again = resumed(tmp_path)
        assert again.fit().lost_steps == 0
        assert torch.equal(weights(again), weights(whole))
        assert again.ledger.steps(again.run_id) == STEPS

    def test_with_another_loss_it_does_not(self, tmp_path):
        run = self.killed(tmp_path)
        book = Ledger(tmp_path / "l.sqlite")
        with pytest.raises(fodp.PrivacyError, match="something else"):
            resumed(tmp_path, other_losses).fit()
        assert set(replays.known(book.store, run)) == set(range(6))  # the file's are in the ledger now

    @pytest.mark.parametrize("gone", [True, False], ids=["the file is gone", "the system was started anew"])
    def test_steps_of_which_nobody_knows_are_lost(self, tmp_path, monkeypatch, gone):
        self.killed(tmp_path)
        monkeypatch.setattr(replays, "_boot", lambda store: b"another.")
        for file in tmp_path.glob("*.tail") if gone else ():
            file.unlink()
        with pytest.warns(UserWarning, match="does not know what all of them released"):
            again = resumed(tmp_path)
        assert again.lost_steps == 5
        assert again.step == STEPS


@pytest.mark.rule(11)
def test_steps_of_an_earlier_version_are_lost(tmp_path, monkeypatch):
    """Its ledger has no hashes."""
    with monkeypatch.context() as patch:
        original = Ledger.open
        patch.setattr(Ledger, "open", lambda *words, replays, **named: original(*words, **named))
        patch.setattr("fodp.state.course.witness_of", lambda session, account: None)
        made(tmp_path, callbacks=[Save(tmp_path)], last_step=6).fit()
    with pytest.warns(UserWarning, match="an earlier version of fodp"):
        again = resumed(tmp_path)
    assert (again.step, again.lost_steps) == (6, 3)
    again.fit()
    assert again.ledger.steps(again.run_id) == STEPS


class TakenOver(Callback):
    """In the middle of a block of steps that this run has reserved, another one takes it up."""

    other = None

    def __init__(self, folder):
        self.folder = folder

    def on_step(self, trainer):
        if trainer.step == 5:
            self.other = resumed(self.folder)


@pytest.mark.rule(11)
def test_of_two_that_resume_at_once_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("fodp.ledger.account.Account._block", lambda *_: 4)
    made(tmp_path, callbacks=[Save(tmp_path)], last_step=4).fit()
    taken_over = TakenOver(tmp_path)
    one = resumed(tmp_path, callbacks=[taken_over])
    with pytest.raises(fodp.PrivacyError, match="resumed by another process"):
        one.fit()
    assert taken_over.other.fit().lost_steps == 0
    hashes = replays.known(one.ledger.store, one.run_id)
    assert set(hashes) == set(range(STEPS))
