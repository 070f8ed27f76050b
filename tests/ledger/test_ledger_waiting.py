"""Another program holds the ledger's file: runs wait as long as it takes, and say so."""

import os
import signal
import sqlite3
import threading

import pytest
import torch
from torch import nn

import fodp
from fodp.callbacks import Callback, Checkpoint
from fodp.ledger import Ledger, sqlite


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(sqlite, "_PATIENCE", 0.5)
    for name in ("_AHEAD", "_WRITES"):  # steps are reserved one by one
        monkeypatch.setattr(f"fodp.ledger.account.{name}", 0.0)


class Browser(Callback):
    """Somebody opens the ledger in a database browser at a step, and leaves it open for a while."""

    def __init__(self, path, statement, seconds):
        self.path, self.statement, self.seconds = path, statement, seconds

    def on_step(self, trainer):
        if trainer.step == 3:
            self.connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self.connection.execute("BEGIN")
            self.connection.execute(self.statement).fetchall()
            threading.Timer(self.seconds, self.connection.close).start()


def make(folder, callbacks, seed=None):
    plan = fodp.Plan(
        sampling_rate=0.5, steps=6, lot_size=10, clip_norm=1.0, noise_multiplier=4.0, delta=1e-5, seed=seed,
        accountant="rdp", method="fo-dp-sgd",
    )  # fmt: skip
    data = (torch.randn(20, 3, generator=torch.Generator().manual_seed(0)),)
    callbacks = [*callbacks, Checkpoint(folder / "c.pt")]
    book = Ledger(folder / "l.sqlite")
    return fodp.Trainer(nn.Linear(3, 1), lambda m, b: m(b[0]).squeeze(1), data, plan, callbacks=callbacks, ledger=book)


@pytest.mark.fault(
    "another program holds the ledger's lock (a database browser)",
    happens="the run waits as long as it takes, with a line on stderr after 5 seconds, and goes on",
    lost="nothing",
    costs="time",
)
@pytest.mark.parametrize("statement", ["SELECT * FROM entries", "UPDATE header SET key = key"], ids=["reads", "writes"])
def test_a_run_waits_for_who_holds_the_ledger(tmp_path, capfd, statement):
    run = make(tmp_path, [Browser(tmp_path / "l.sqlite", statement, 2.5)])
    outcome = run.fit()
    assert (outcome.reason, outcome.lost_steps) == ("finished", 0)
    assert capfd.readouterr().err.count("waiting for the ledger") >= 1


@pytest.mark.fault(
    "Ctrl-C twice while a run waits for its ledger",
    happens="it breaks off; `--resume` goes on",
    lost="steps since the last checkpoint",
    costs="the lost steps stay charged",
)
def test_waiting_can_be_broken_off_and_the_run_goes_on_later(tmp_path):
    class Impatience(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                for seconds in (0.3, 1.5):
                    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = make(tmp_path, [Browser(tmp_path / "l.sqlite", "UPDATE header SET key = key", 30), Impatience()])
    browser = run.callbacks[0]
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert browser.connection.in_transaction  # it was not waited for
    browser.connection.close()
    again = make(tmp_path, [])
    again.resume(tmp_path / "c.pt")
    assert again.fit().reason == "finished"
