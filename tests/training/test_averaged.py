"""The average of the iterates: in scores, files and the model that comes out; training goes on from the iterate."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import ConfigurationError
from fodp.callbacks import Callback, Checkpoint, Evaluate
from fodp.ledger import Ledger
from fodp.state import checkpoint
from fodp.trainer import Trainer

KINDS = [dict(average="ema", average_decay=0.8), dict(average="tail", average_share=0.3), dict(average="power")]


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(size=80):
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def plan(average=KINDS[0], **changes):
    base = dict(
        sampling_rate=0.25, steps=24, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        accountant="rdp", method="dp-sgd", params=dict(lr=0.5, **average),
    )  # fmt: skip
    return fodp.Plan(**{**base, **changes})


def trainer(the_plan=None, model=None, **options):
    return Trainer(model or network(), losses, data(), the_plan or plan(), **options)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Watch(Callback):
    """Iterates and averages after every step; stops where it is told to."""

    def __init__(self, stop=None):
        self.iterates, self.averages, self.stop = [], [], stop

    def on_step(self, trainer):
        self.iterates.append(flat(trainer.model))
        with trainer.averaged():
            self.averages.append(flat(trainer.model))
        assert torch.equal(flat(trainer.model), self.iterates[-1])
        if trainer.step == self.stop:
            trainer.interrupt()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_is_that_without_an_average_and_the_model_is_the_average(kind, dtype):
    plain, watch = Watch(), Watch()
    inputs, labels = data().tensors
    for the_plan, seen in ((plan({}), plain), (plan(kind), watch)):
        training = Trainer(network(dtype), losses, TensorDataset(inputs.to(dtype), labels), the_plan, callbacks=[seen])
        training.fit()
    assert all(map(torch.equal, plain.iterates, watch.iterates))
    assert all(map(torch.equal, plain.iterates, plain.averages))
    assert torch.equal(flat(training.model), watch.averages[-1])
    assert not torch.allclose(flat(training.model), watch.iterates[-1])
    if kind["average"] == "tail":
        assert torch.equal(watch.averages[16], watch.iterates[16])  # before it begins
        assert torch.allclose(watch.averages[-1], torch.stack(watch.iterates[17:]).mean(0), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["average"])
def test_a_second_fit_goes_on_from_the_iterate(kind):
    whole = trainer(plan(kind))
    whole.fit()
    cut = trainer(plan(kind), callbacks=[Watch(stop=19)])
    assert cut.fit().reason == "interrupted"
    half_way = flat(cut.model)
    cut.fit()
    assert torch.equal(flat(cut.model), flat(whole.model))
    assert not torch.equal(half_way, flat(whole.model))


def test_weights_that_the_owner_sets_between_fits_are_trained_on_from():
    cut = trainer(callbacks=[watch := Watch(stop=12)])
    cut.fit()
    with torch.no_grad():
        cut.model[0].bias.fill_(7.0)
    cut.fit()
    assert watch.iterates[12][48:56].mean() > 6  # of the step after


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["average"])
@pytest.mark.parametrize("when", ["in the fit", "after the fit"])
def test_a_checkpoint_is_resumed_bit_for_bit_and_its_model_is_the_average(kind, when, tmp_path):
    whole = trainer(plan(kind))
    whole.fit()
    saves = [Checkpoint(tmp_path / "c.pt")] if when == "in the fit" else []
    cut = trainer(plan(kind), callbacks=[watch := Watch(stop=20), *saves])
    cut.fit()
    if when == "after the fit":
        cut.save(tmp_path / "c.pt")
    assert torch.equal(flat(cut.model), watch.averages[-1])
    saved = checkpoint.load(tmp_path / "c.pt")
    assert torch.equal(torch.cat([t.flatten() for t in saved["model"].values()]), watch.averages[-1])
    assert torch.equal(saved["iterate"], watch.iterates[-1])
    resumed = trainer(plan(kind))
    resumed.resume(tmp_path / "c.pt")
    assert torch.equal(flat(resumed.model), watch.iterates[-1])
    resumed.fit()
    assert torch.equal(flat(resumed.model), flat(whole.model))


def test_a_secure_run_is_resumed_with_its_average(tmp_path):
    secure = plan(seed=None)
    cut = trainer(secure, callbacks=[Watch(stop=12), Checkpoint(tmp_path / "c.pt")], ledger=Ledger(tmp_path / "l.db"))
    cut.fit()
    resumed = trainer(secure, callbacks=[watch := Watch()], ledger=Ledger(tmp_path / "l.db"))
    resumed.resume(tmp_path / "c.pt")
    with resumed.averaged():
        assert torch.equal(flat(resumed.model), flat(cut.model))
    resumed.fit()
    assert torch.equal(flat(resumed.model), watch.averages[-1])


def test_scores_are_those_of_the_average():
    found = []

    def metric(model, _):
        found.append(flat(model))
        return {"loss": 1.0}

    watch = Watch()
    trainer(callbacks=[watch, Evaluate(None, metric=metric)]).fit()
    assert torch.equal(found[-1], watch.averages[-1])
    assert torch.equal(found[1], watch.averages[3])  # of the first epoch; found[0] is the rehearsal


def test_a_score_that_fails_leaves_the_iterate():
    training = trainer()
    training.fit()
    training._weights.put_back()
    before = flat(training.model)
    with pytest.raises(ZeroDivisionError), training.averaged():
        _ = 1 / int(torch.equal(flat(training.model), before))
    assert torch.equal(flat(training.model), before)


def test_sa_dpsgd_scores_its_proposals_at_the_iterate():
    seen = []
    model = network()

    def score():
        seen.append(flat(model))
        return 0.0

    watch = Watch()
    trainer(plan(method="sa-dpsgd"), model, public_score=score, callbacks=[watch]).fit()
    averages = {tuple(a.tolist()) for a in watch.averages[1:]}
    assert seen
    assert not averages & {tuple(point.tolist()) for point in seen}


def test_tied_weights_are_averaged_once_and_exported_by_all_their_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))[:, :2]

    training = trainer(model=Tied())
    training.fit()
    training.save(tmp_path / "c.pt")
    saved = checkpoint.load(tmp_path / "c.pt")["model"]
    assert torch.equal(saved["first.weight"], saved["second.weight"])
    assert torch.equal(saved["first.weight"], training.model.first.weight)


def test_a_loop_of_ones_own_has_the_same_average(tmp_path):
    def loop(steps, resume=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        the_plan = plan(KINDS[1], params=KINDS[1])
        model, optimizer, loader = fodp.make_private(model, optimizer, data(), the_plan, resume=resume)
        for inputs, labels in loader:
            with pytest.raises(ConfigurationError, match="between two steps"), loader.averaged():
                pass
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if loader.step == steps:
                break
        return model, loader

    model, loader = loop(24)
    iterate = flat(model)
    with loader.averaged():
        average = flat(model)
    assert torch.equal(flat(model), iterate)
    twin = trainer(plan(KINDS[1]))
    twin.fit()
    assert torch.allclose(average, flat(twin.model), atol=1e-6)
    _, half = loop(20)
    with half.averaged(), pytest.raises(ConfigurationError, match="outside of averaged"):
        next(iter(half))
    half.save(tmp_path / "c.pt")
    model, resumed = loop(24, tmp_path / "c.pt")
    assert torch.equal(flat(model), iterate)
    with resumed.averaged():
        assert torch.equal(flat(model), average)
