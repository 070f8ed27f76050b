"""Buffers leave with the model and no noise protects them: a model that writes into them is refused, by everybody."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Checkpoint
from fodp.clipping.buffers import KeptBuffers
from fodp.own_loop import make_private
from fodp.state import checkpoint
from sessions_for_tests import session


class Statistics(nn.Module):
    """Passes its input on, and remembers something about it in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("kept", torch.tensor([0.5, float("nan")]), persistent=way != "not saved")
        self.register_buffer("links", torch.eye(2).to_sparse())

    def forward(self, x):
        if self.way in ("in place", "not saved"):
            self.kept.mul_(0.9).add_(x.detach().mean())
        elif self.way == "behind autograd's back":
            self.kept.data[1] = x.detach().mean()
        elif self.way == "another tensor":
            self.kept = 0.9 * self.kept + x.mean()
        elif self.way == "another shape":
            self.kept = x.detach().clone()
        elif self.way == "a new one":
            self.register_buffer("fresh", x.detach().mean())
        elif self.way == "a count":
            self.kept += 1
        elif self.way == "sparse":
            self.links.mul_(x.detach().mean())
        return x


WAYS = (
    "in place", "not saved", "behind autograd's back", "another tensor", "another shape", "a new one", "a count",
    "sparse",
)  # fmt: skip


def model(way):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Statistics(way), nn.Tanh(), nn.Linear(8, 2))


def losses(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 4, generator=generator), torch.arange(40) % 2)


def plan():
    return fodp.Plan(
        sampling_rate=0.5, steps=3, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        accountant="rdp", method="dp-sgd",
    )  # fmt: skip


def as_at_first(net):
    """Parameters and buffers are those of a model that saw nothing."""
    mine, fresh = net.state_dict(), model("none").state_dict()
    if "1.kept" not in mine:  # not saved
        del fresh["1.kept"]
    apart = [torch.equal(a.to_dense().nan_to_num(), fresh[k].to_dense().nan_to_num()) for k, a in mine.items()]
    return mine.keys() == fresh.keys() and all(apart)


@pytest.mark.rule(12)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
def test_the_trainer_refuses_before_anything_is_used(tmp_path, monkeypatch, way, engine):
    monkeypatch.setattr("fodp.trainer.rehearse", lambda run, dataset: None)  # as if it began to write later
    net = model(way)
    trainer = fodp.Trainer(net, losses, data(), plan(), engine=engine, callbacks=[Checkpoint(tmp_path / "c.pt")])
    with pytest.raises(fodp.PrivacyError, match=r"writes into the buffer 1\.(kept|fresh|links) when it sees examples"):
        trainer.fit()
    assert (trainer.step, trainer.lost_steps) == (1, 1)  # the step that broke off counts as used
    assert as_at_first(net)
    saved = checkpoint.load(tmp_path / "c.pt")  # the one from before the first step
    assert saved["step"] == 0


@pytest.mark.rule(12)
@pytest.mark.parametrize("way", WAYS)
def test_the_rehearsal_refuses_before_anything_is_charged(way):
    net = model(way)
    trainer = fodp.Trainer(net, losses, data(), plan())
    with pytest.raises(fodp.PrivacyError, match=r"writes into the buffer 1\.(kept|fresh|links) when it sees examples"):
        trainer.fit()
    assert (trainer.step, trainer.lost_steps) == (0, 0)
    assert as_at_first(net)


@pytest.mark.rule(12)
@pytest.mark.parametrize("way", WAYS)
def test_the_drop_in_loop_refuses_before_anything_is_released(way):
    net = model(way)
    _, optimizer, loader = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan())
    inputs, labels = next(iter(loader))
    F.cross_entropy(net(inputs), labels).backward()
    with pytest.raises(fodp.PrivacyError, match=r"writes into the buffer 1\.(kept|fresh|links)"):
        optimizer.step()
    assert loader.step == 0
    assert as_at_first(net)


@pytest.mark.rule(12)
def test_a_loop_that_is_closed_in_the_middle_of_a_step_keeps_no_statistics():
    net = model("in place")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, loader = make_private(net, optimizer, data(), plan())
    inputs, _ = next(iter(loader))
    net(inputs)
    with pytest.raises(fodp.PrivacyError, match=r"writes into the buffer 1\.kept"):
        loader.close()
    assert as_at_first(net)
    loader.close()
    make_private(net, optimizer, data(), plan())[2].close()  # it was given back all the same


def test_buffers_that_stay_as_they_are_do_no_harm():
    net = model("none")
    fodp.Trainer(net, losses, data(), plan()).fit()
    assert torch.equal(net[1].kept.nan_to_num(), torch.tensor([0.5, 0.0]))
    net = model("none")
    _, optimizer, loader = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan())
    for inputs, labels in itertools.islice(loader, 2):
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    assert loader.step == 2


def test_a_change_between_two_steps_is_the_owners_business():
    """A scheduled constant, a resume: only what passes over private data write is refused."""
    net = model("none")
    run = session(net, losses, data(), plan())
    run.take_step()
    net[1].kept.fill_(7.0)
    run.take_step()
    assert run.number == 2
    assert net[1].kept.tolist() == [7.0, 7.0]


def test_who_is_named():
    net = model("a count")
    kept = KeptBuffers(net, who="model mine:net")
    kept.refuse_changes()
    net(torch.zeros(1, 4))
    with pytest.raises(fodp.PrivacyError, match="model mine:net writes into the buffer"):
        kept.refuse_changes()


class WritesIntoParameters(nn.Module):
    """Begins with the statistics of the first batch it sees, as "data-dependent initialisation" does."""

    def __init__(self, trained: bool):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=trained)
        self.head = nn.Linear(4, 2)
        self.seen = False

    def forward(self, x):
        if not self.seen and x.sum() != 0:
            self.seen = True
            with torch.no_grad():
                self.scale.copy_(x.mean(0))
        return self.head(x * self.scale)


WRITTEN = "writes into the parameter scale when it sees examples"


@pytest.mark.rule(12)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
def test_the_trainer_refuses_a_model_that_writes_what_it_sees_into_parameters(trained):
    with pytest.raises(fodp.PrivacyError, match=WRITTEN):
        fodp.Trainer(WritesIntoParameters(trained), losses, data(), plan()).fit()


@pytest.mark.rule(12)
def test_the_drop_in_loop_refuses_a_model_that_writes_what_it_sees_into_parameters():
    net = WritesIntoParameters(trained=False)
    _, optimizer, loader = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan())
    inputs, labels = next(iter(loader))
    F.cross_entropy(net(inputs), labels).backward()
    with pytest.raises(fodp.PrivacyError, match=WRITTEN):
        optimizer.step()
    assert loader.step == 0


class MakesAParameter(nn.Linear):
    """Puts what it sees into a frozen parameter that it makes in a later pass, or into one that was added then."""

    way = "none"

    def forward(self, x):
        if self.way == "made":
            self.seen = nn.Parameter(x.detach().mean(0), requires_grad=False)
        elif self.way == "added":
            with torch.no_grad():
                self.seen.copy_(x.mean(0))
        return super().forward(x)


@pytest.mark.rule(12)
@pytest.mark.parametrize("way", ["made", "added"])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_frozen_parameter_of_a_later_pass_holds_nothing_of_what_the_model_sees(way, replaced):
    refused = "has another parameter, seen" if way == "made" else "writes into the parameter seen"
    for own in (False, True):
        net = MakesAParameter(4, 2)
        if replaced:
            net.seen = nn.Parameter(torch.zeros(4), requires_grad=False)
        if own:
            _, optimizer, loader = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan())

            def step(net=net, optimizer=optimizer, loader=loader):
                inputs, labels = loader.next_batch()
                loader.backward(F.cross_entropy(net(inputs), labels, reduction="none"))
                optimizer.step()
        else:
            step = fodp.Trainer(net, losses, data(), plan()).take_step
        step()
        net.seen, net.way = nn.Parameter(torch.zeros(4), requires_grad=False), way
        with pytest.raises(fodp.PrivacyError, match=refused):
            step()
