"""An exception of the user's own code in a step: that step is lost and charged, and the run can go on."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint
from fodp.ledger import Ledger
from fodp.noise import Streams
from fodp.state import checkpoint


class Flaky(Dataset):
    """A data set on a disk that fails once in a while: reads of some numbers raise."""

    def __init__(self, failing=()):
        self.reads, self.failing = 0, set(failing)
        self.inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.reads += 1
        if self.reads in self.failing:
            raise OSError("the network drive is gone")
        return self.inputs[index], int(self.inputs[index, 0] > 0)


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(seed=None, **changes):
    words = dict(
        sampling_rate=0.25, steps=12, lot_size=10, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, seed=seed,
        accountant="rdp", method="fo-dp-sgd",
    )  # fmt: skip
    return fodp.Plan(**words | changes)


@pytest.fixture
def drawn(monkeypatch):
    """The (step, name) of all noise and masks that were drawn."""
    seen = []
    for name in ("normal_", "words"):
        original = getattr(Streams, name)

        def watched(self, what, *rest, original=original, kind=name):
            seen.append((kind, *rest[-2:]))
            return original(self, what, *rest)

        monkeypatch.setattr(Streams, name, watched)
    return seen


@pytest.mark.rule(11)
@pytest.mark.fault(
    "an exception in the data set while a lot is read",
    happens="the exception reaches the caller, with a note of what was charged; another `fit()` goes on",
    lost="the step that broke off",
    costs="that step stays charged",
)
@pytest.mark.parametrize("seed", [None, 3], ids=["secure", "seeded"])
def test_a_data_set_that_fails_once_costs_one_step(tmp_path, drawn, seed):
    book, data = Ledger(tmp_path / "l.sqlite"), Flaky(failing=[80])  # all 40 are read once before
    torch.manual_seed(0)
    run = fodp.Trainer(
        nn.Linear(4, 2), losses, data, plan(seed), ledger=book, callbacks=[Checkpoint(tmp_path / "c.pt")]
    )
    with pytest.raises(OSError, match="network drive") as raised:
        run.fit()
    broken = run.step
    assert 1 < broken < 12
    assert (
        f"step {broken} of 12 broke off. {broken} steps are charged, of which 1 were lost" in raised.value.__notes__[0]
    )
    assert book.steps(run.run_id) == broken  # neither less, nor what was reserved ahead
    saved = checkpoint.load(tmp_path / "c.pt")
    assert (saved["step"], saved["lost_steps"]) == (broken, 1)
    outcome = run.fit()
    assert (outcome.reason, outcome.steps, outcome.lost_steps) == ("finished", 12, 1)
    assert outcome.epsilon == run.plan.epsilon()
    assert len(set(drawn)) == len(drawn)  # no mask and no noise twice
    assert len({step for kind, step, _ in drawn if kind == "normal_"}) == 11


@pytest.mark.fault(
    "an exception in the loss or the model",
    happens="the exception reaches the caller, with a note of what was charged; another `fit()` goes on",
    lost="the step that broke off",
    costs="that step stays charged",
)
@pytest.mark.parametrize("seed", [None, 3], ids=["secure", "seeded"])
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd", "dp-sam", "disk"])
def test_a_loss_that_fails_leaves_a_trainer_that_goes_on(drawn, seed, method):
    calls = itertools.count()

    def flaky(model, batch):
        if next(calls) == 60:
            raise ZeroDivisionError("a mistake in the loss")
        return losses(model, batch)

    data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    run = fodp.Trainer(nn.Linear(4, 2), flaky, data, plan(seed, method=method, steps=40))
    with pytest.raises(ZeroDivisionError):
        run.fit()
    assert run.fit().lost_steps == 1
    assert len(set(drawn)) == len(drawn)


def test_the_last_step_of_a_run_may_break_off_too():
    class Count(Callback):
        epochs = 0

        def on_epoch(self, trainer):
            self.epochs += 1

    steps = itertools.count()
    count = Count()
    run = fodp.Trainer(nn.Linear(4, 2), losses, Flaky(), plan(), callbacks=[count])
    original = run.session.method.step

    def step(step, state):
        if next(steps) == 11:
            step.draw()
            raise OSError("the network drive is gone")
        return original(step, state)

    run.session.method.step = step
    with pytest.raises(OSError, match="drive"):
        run.fit()
    assert run.fit().reason == "finished"
    assert count.epochs == 3  # the last one is told of too


@pytest.mark.fault(
    "a refusal in the middle of a run (examples that mix, statistics that the model keeps)",
    happens="the run ends; `fit()` again repeats why, a new Trainer is needed",
    lost="the step that broke off",
    costs="the steps so far and that one",
)
def test_a_refused_step_ends_the_run():
    calls = itertools.count()

    def mixing(model, batch):
        each = losses(model, batch)
        return each.mean() if next(calls) > 40 else each

    data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    run = fodp.Trainer(nn.Linear(4, 2), mixing, data, plan(steps=100))
    with pytest.raises(fodp.PrivacyError, match="one loss per example") as first:
        run.fit()
    with pytest.raises(fodp.PrivacyError, match="this run has ended, make a new Trainer") as again:
        run.fit()
    assert str(first.value) in str(again.value)


def test_in_a_loop_of_ones_own(drawn):
    data = Flaky(failing=[65])
    model = nn.Linear(4, 2)
    model, optimizer, loader = fodp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan())

    def train():
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    with pytest.raises(OSError, match="drive"):
        train()
    assert 0 < loader.step < 12
    train()
    assert loader.step == 12
    assert len(set(drawn)) == len(drawn)
