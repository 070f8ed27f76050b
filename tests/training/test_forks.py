"""A fork copies a run: only the process that made it goes on, or both would release and one would be counted."""

import os
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint
from fodp.ledger import Ledger
from fodp.own_loop import make_private
from fodp.step import Step
from fodp.support.files import Hold

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
STEPS = 6


def plan(seed=None):
    return fodp.Plan(
        sampling_rate=0.5, steps=STEPS, lot_size=10, clip_norm=1.0, noise_multiplier=6.0, delta=1e-5, seed=seed,
        accountant="rdp", method="dp-sgd",
    )  # fmt: skip


def data():
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainer(ledger=None, callbacks=(), seed=None, dataset=None, **options):
    rows = data() if dataset is None else dataset
    return fodp.Trainer(nn.Linear(4, 2), losses, rows, plan(seed), ledger=ledger, callbacks=callbacks, **options)


def in_child(work):
    """What `work` returns in a forked child, or the message of its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                found = work()
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            os.write(write, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(content)


class Fork(Callback):
    """In the middle of a fit; the child comes out of it first, and the parent goes on when it has ended."""

    def on_step(self, trainer):
        if trainer.step == 2:
            child = os.fork()
            if child:
                os.waitpid(child, 0)


@pytest.mark.rule(11)
def test_only_the_parent_goes_on_after_a_fork_in_a_fit(tmp_path):
    """It takes all of its steps, the child none, and the ledger counts each that was taken."""
    book, mine = Ledger(tmp_path / "l.sqlite"), os.getpid()
    training = trainer(book, [Fork(), Checkpoint(tmp_path / "c.pt")])
    training.session.steps_by(lambda session, number: CountedStep(session, number, tmp_path / "noise"))
    try:
        training.fit()
    finally:
        if os.getpid() != mine:
            os._exit(0)
    assert (tmp_path / "noise").read_text() == "x" * STEPS
    assert book.steps(training.run_id) == STEPS


class CountedStep(Step):
    """Writes down, across processes, that noise was added."""

    def __init__(self, session, number, file):
        super().__init__(session, number)
        self.file = file

    def noised(self, *words):
        with self.file.open("a") as handle:
            handle.write("x")
        return super().noised(*words)


@pytest.mark.rule(11)
@pytest.mark.parametrize("seed", [None, 3], ids=["secure", "seeded"])
def test_a_trainer_in_a_child_is_refused(seed):
    training = trainer(seed=seed)
    said = in_child(training.fit)
    assert said.startswith("PrivacyError: this run was made before this process was forked")
    assert "in the process that trains" in said
    assert in_child(lambda: trainer(seed=seed).fit().steps) == STEPS
    assert training.fit().steps == STEPS  # the parent's


@pytest.mark.rule(11)
def test_a_loop_in_a_child_is_refused():
    model = nn.Linear(4, 2)
    model, optimizer, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan())

    def step():
        inputs, labels = next(iter(loader))
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    step()
    assert "forked" in in_child(step)
    inputs, labels = next(iter(loader))  # a lot in hand is the parent's too
    F.cross_entropy(model(inputs), labels).backward()
    assert "forked" in in_child(optimizer.step)
    optimizer.step()
    assert loader.step == 2


@pytest.mark.rule(11)
def test_a_ledger_in_a_child_is_refused(tmp_path):
    """What it has granted already too, which needs no look into the file."""
    book = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(50.0, 1e-5))
    account = book.open("run", plan().events(), STEPS)
    assert account.covers(0)
    works = [
        lambda: account.covers(0),
        lambda: account.settle(0),
        lambda: book.left("people"),
        lambda: book.steps("run"),
    ]
    for work in works:
        assert "was opened before this process was forked" in in_child(work)
    assert in_child(lambda: Ledger(tmp_path / "l.sqlite").steps("run")) == 1
    in_child(book.close)
    assert book.steps("run") == 1


def test_workers_that_read_ahead_are_forked_as_ever(tmp_path):
    class Rows(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return tuple(column[index] for column in data().tensors)

    training = trainer(Ledger(tmp_path / "l.sqlite"), dataset=Rows(), num_workers=1)
    assert training.fit().steps == STEPS


def test_a_child_does_not_hold_its_parents_folder(tmp_path):
    hold = Hold(tmp_path / "run.lock")
    assert hold.take("parent")
    in_child(hold.leave)
    assert (tmp_path / "run.lock").exists()
    assert in_child(lambda: hold.take("child")) is False
