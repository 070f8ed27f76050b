"""All that the Trainer can do, in a loop of one's own: lots in parts, resuming, workers, schedules, layers, models."""

import itertools
import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import fodp
from fodp.gradients import Flat
from fodp.own_loop import make_private

STEPS = 6


def plan(method="dp-sgd", params=None, **changes):
    base = dict(sampling_rate=0.2, steps=STEPS, lot_size=12, clip_norm=0.5, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**{**base, **changes}, method=method, params=params or {})


def refused(message):
    return pytest.raises(fodp.ConfigurationError, match=message)


def problem():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(60, 5), torch.randint(3, (60,)))
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), data


def private(the_plan=None, model=None, data=None, optimizer=None, **options):
    ordinary, records = problem()
    model = ordinary if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return make_private(model, optimizer, records if data is None else data, the_plan or plan(), **options)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trained(the_plan, **options):
    """By the Trainer."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")  # noqa: E731
    fodp.Trainer(model, loss, data, the_plan, optimizer, **options).fit()
    return flat(model)


def looped(the_plan, microbatch=None, reduction="mean", **options):
    model, optimizer, loader = private(the_plan, microbatch=microbatch, loss_reduction=reduction, **options)
    for lot in loader:
        optimizer.zero_grad()
        for inputs, labels in [lot] if microbatch is None else lot:
            F.cross_entropy(model(inputs), labels, reduction=reduction).backward()
        optimizer.step()
    return flat(model)


# --- lots in parts -------------------------------------------------------------------------------------------

BLOCKS = dict(width=4.0)
CASES = {
    "dp-sgd": plan(),
    "fo-dp-sgd": plan("fo-dp-sgd", dict(beta=0.5)),
    "quantile": plan(params=dict(quantile=0.5, count_noise=20.0)),
    "layers": plan(params=dict(clip="per-layer")),
    "layers, quantile": plan(params=dict(clip="per-layer", quantile=0.5, count_noise=20.0)),
    "blocks": plan("block-dp-sgd", BLOCKS),
    "schedules": plan(params=dict(noise_schedule=((0, 1.0), (3, 0.5)), clip_schedule=((0, 1.0), (2, 0.1)))),
    "normalised": plan(params=dict(clip="normalised")),
    "shape": plan(params=dict(shape="fan-in", width=4.0)),
    "shape, layers": plan(params=dict(shape="fan-in", width=4.0, clip="per-layer")),
    "exact noise": plan(exact_noise=True),
    "empty lots": plan(sampling_rate=1e-9),
}


@pytest.mark.rule(9)
@pytest.mark.parametrize("case", CASES)
def test_lots_in_parts_give_the_same_run_as_the_trainer(case):
    expected = trained(CASES[case])
    for microbatch, reduction in ((None, "mean"), (1, "sum"), (5, "mean")):
        assert torch.allclose(looped(CASES[case], microbatch, reduction), expected, atol=1e-5)


@pytest.mark.rule(3)
def test_what_is_held_between_parts_is_clipped():
    model, optimizer, loader = private(plan(sampling_rate=1.0, clip_norm=1e-3), microbatch=20)
    lot = next(iter(loader))
    for inputs, labels in lot:
        F.cross_entropy(model(1e3 * inputs), labels).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    held = loader._loop.push._gathered
    assert 0 < held._sum.norm() <= 60 * 1e-3 * (1 + 1e-6)
    assert len(held.norms) == 60
    assert all(part._chunk is None for part in held._parts)  # of the passes only norms and weights are left
    optimizer.step()


def test_memory_does_not_grow_with_the_number_of_parts():
    model, optimizer, loader = private(plan(sampling_rate=1.0), microbatch=10)
    recorded = []
    for lot in itertools.islice(loader, 1):
        for inputs, labels in lot:
            recorded.append(len(loader._loop.push.recorder.current.caught._recordings))
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert recorded == [1] * 6  # each part begins anew


@pytest.mark.rule(14)
def test_wrong_use_of_parts_is_refused_with_a_sentence_and_can_be_made_good():
    model, optimizer, loader = private(plan(sampling_rate=1.0), microbatch=40)
    before, lots = flat(model), iter(loader)
    lot = next(lots)
    with refused("before the lot's last part"):
        optimizer.step()
    inputs, labels = next(lot)
    with refused("without a backward through the model"):
        next(lot)
    F.cross_entropy(model(inputs), labels).backward()
    with refused("a second backward in the same lot"):
        F.cross_entropy(model(inputs), labels).backward()
    with refused("was drawn but not stepped"):
        next(lots)
    with refused("save between two steps"):
        loader.save("nowhere")
    assert torch.equal(flat(model), before)
    assert loader.step == 0


@pytest.mark.rule(14)
@pytest.mark.rule(3)
def test_a_part_that_breaks_off_while_it_is_summed_ends_its_lot(monkeypatch):
    """Ctrl-C or a lack of memory in the wrong moment: the part must not be in the sum twice."""
    model, _, loader = private(microbatch=4)
    lot = next(iter(loader))
    inputs, labels = next(lot)
    F.cross_entropy(model(inputs), labels).backward()
    with monkeypatch.context() as patch:
        patch.setattr(Flat, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(lot)
    assert loader.step == 1  # lost, and charged
    with refused("is over"):
        next(lot)


def test_parts_of_a_lot_that_is_over_are_refused():
    model, optimizer, loader = private(microbatch=5)
    lots = iter(loader)
    lot = next(lots)
    for inputs, labels in lot:
        F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    with refused("this lot was stepped"):
        next(lot)
    with refused("without a lot"):
        optimizer.step()


@pytest.mark.rule(14)
@pytest.mark.parametrize("microbatch", [0, -1, 2.5])
def test_a_microbatch_is_a_whole_number(microbatch):
    with pytest.raises(fodp.PrivacyError, match="microbatch"):
        private(microbatch=microbatch)


class Doubling(fodp.methods.METHODS["dp-sgd"]):
    """Asks for two sums of its lot."""

    name = "doubling"

    def step(self, step, state):
        query = 0.5 * step.gradients(step.draw()).clipped_sum(2 * step.clip_norm)
        return step.release(query, step.plan.noise_multiplier * step.clip_norm)


@pytest.mark.rule(14)
def test_a_method_that_asks_for_other_sums_is_refused_before_anything_is_drawn():
    fodp.register(Doubling)
    try:
        looped(plan("doubling"))  # whole lots are as good as in the Trainer
        with refused("asks for another sum of it"):
            private(plan("doubling"), microbatch=5)
    finally:
        del fodp.methods.METHODS["doubling"]


# --- empty lots ----------------------------------------------------------------------------------------------


class Fussy(nn.Module):
    """Fails on an empty batch, as models do that take shapes from their inputs; with dropout and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, inputs, labels=None):
        assert len(inputs) > 0
        logits = self.b(self.drop(self.a(inputs.view(len(inputs), -1))))
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.rule(2)
@pytest.mark.parametrize("own_loss", [True, False])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_model_that_fails_on_an_empty_batch_gets_through_empty_lots(own_loss, microbatch):
    empty = plan(sampling_rate=1e-9)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Fussy()
    start, state = flat(model), torch.get_rng_state()
    model, optimizer, loader = private(empty, model, microbatch=microbatch)
    for lot in loader:
        for inputs, labels in [lot] if microbatch is None else lot:
            output = model(inputs, labels if own_loss else None)
            assert output["logits"].shape == (0, 3)
            (output["loss"] if own_loss else F.cross_entropy(output["logits"], labels)).backward()
        optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other, data = Fussy(), problem()[1]
    loss = lambda m, b: F.cross_entropy(m(b[0])["logits"], b[1], reduction="none")  # noqa: E731
    fodp.Trainer(other, loss, data, empty, torch.optim.SGD(other.parameters(), lr=0.1)).fit()
    assert torch.equal(flat(model), flat(other))
    assert not torch.equal(flat(model), start)


# --- resuming ------------------------------------------------------------------------------------------------


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def stepped(the_plan, path=None, steps=None, resume=None, **options):
    """Some steps of a loop with Adam and a scheduler; saved after the last."""
    model, _ = problem()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader = private(
        the_plan, model, optimizer=optimizer, scheduler=scheduler, resume=resume, **options
    )
    for inputs, labels in itertools.islice(loader, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        if path is not None and loader.step == 3:
            loader.save(path)
    return model, loader


@pytest.mark.rule(11)
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
def test_a_seeded_loop_goes_on_bit_for_bit(method, tmp_path):
    the_plan, path = plan(method), tmp_path / "loop.pt"
    whole, _ = stepped(the_plan)
    _, first = stepped(the_plan, path, steps=4)
    first.close()
    second, loader = stepped(the_plan, resume=path)
    assert torch.equal(flat(second), flat(whole))
    assert (loader.step, loader.lost_steps) == (STEPS, 0)
    assert loader.epsilon() == the_plan.epsilon()


@pytest.mark.rule(11)
def test_a_secure_loop_loses_what_it_used_after_the_file_and_never_under_counts(tmp_path):
    the_plan, path, ledger = plan(seed=None), tmp_path / "loop.pt", fodp.Ledger(tmp_path / "ledger.db")
    whole, first = stepped(the_plan, path, steps=5, ledger=ledger)
    first.close()
    second, loader = stepped(the_plan, steps=0, resume=path, ledger=ledger)
    assert loader.lost_steps == 2  # steps 4 and 5 were released after the file was written
    assert loader.step == 5
    assert loader.epsilon() == the_plan.epsilon(steps=5)
    assert not torch.equal(flat(second), flat(whole))
    loader.close()
    _, loader = stepped(the_plan, resume=path, ledger=ledger)
    assert loader.step == STEPS


@pytest.mark.rule(11)
@pytest.mark.rule(14)
def test_a_loop_is_resumed_with_its_own_plan_ledger_and_parts_only(tmp_path):
    path, ledger = tmp_path / "loop.pt", fodp.Ledger(tmp_path / "ledger.db")
    stepped(plan(seed=None), path, steps=3, ledger=ledger)[1].close()
    for the_plan, options, message in (
        (plan(seed=None), {}, "goes on only with its ledger"),
        (plan(seed=None, noise_multiplier=2.0), dict(ledger=ledger), "noise_multiplier was 1.0, now 2.0"),
        (plan(seed=None), dict(ledger=fodp.Ledger(tmp_path / "other.db")), "other.db"),
    ):
        with pytest.raises(fodp.PrivacyError, match=message):
            stepped(the_plan, resume=path, **options)
    with pytest.raises(fodp.PrivacyError, match="there is no checkpoint"):
        stepped(plan(), resume=tmp_path / "nothing.pt")


# --- workers -------------------------------------------------------------------------------------------------


@pytest.mark.rule(9)
@pytest.mark.parametrize("microbatch", [None, 5])
def test_workers_change_no_bit_of_a_loop_and_end_with_it(microbatch):
    data = Subset(problem()[1], range(60))  # read record by record
    expected = looped(plan(), microbatch, data=data)
    assert torch.equal(looped(plan(), microbatch, data=data, num_workers=2), expected)
    assert not multiprocessing.active_children()
    _, _, loader = private(data=data, num_workers=1)
    next(iter(loader))
    assert multiprocessing.active_children()
    loader.close()
    assert not multiprocessing.active_children()
