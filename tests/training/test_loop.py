"""The drop-in for people who own their loop: the same run as the trainer's, and no way around the release."""

import copy
import dataclasses
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fodp
from fodp.accounting import Event, Phase
from fodp.gradients import HERE
from fodp.layout import GradientBuffer
from fodp.methods import METHODS, Method, register
from fodp.methods.base import NoState
from fodp.options.update import NoiseCorrectedAdam
from fodp.own_loop import make_private
from sessions_for_tests import session

STEPS = 20


def plan(**changes):
    base = dict(
        sampling_rate=0.2,
        steps=STEPS,
        lot_size=12,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
        seed=0,
        method="fo-dp-sgd",
    )
    return fodp.Plan(**{**base, **changes})


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class Texts(nn.Module):
    """Embeddings, a module called twice, tied weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.mix = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.mix.weight
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        hidden = torch.tanh(self.tied(self.mix(hidden)))
        return self.head(hidden.mean(1))


class Tokens(nn.Module):
    """What has no rule as a layer: a class token, positions for all examples at once, attention, a weight by hand."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.Embedding(9, 6)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.over_time = nn.GRU(6, 6, batch_first=True)
        self.scale = nn.Parameter(torch.rand(6))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1])[None])
        hidden = torch.cat([self.token.expand(len(hidden), -1, -1), hidden], 1)
        hidden = hidden + (1 + self.scale) * self.attention(hidden, hidden, hidden)[0]
        return self.head(torch.tanh(self.over_time(hidden)[0][:, -1] @ self.embedding.weight.t())[:, :6])


MODELS = {
    "tokens": (lambda: Tokens().double(), lambda size: torch.randint(11, (size, 4))),
    "mlp": (mlp, lambda size: torch.randn(size, 5)),
    "conv": (conv_net, lambda size: torch.randn(size, 1, 8, 8)),
    "texts": (Texts, lambda size: torch.randint(11, (size, 4))),
}


def problem(kind="mlp", size=60):
    torch.manual_seed(0)
    make, inputs = MODELS[kind]
    data = TensorDataset(inputs(size), torch.randint(3, (size,)))
    return make(), data


def private(model=None, data=None, the_plan=None, optimizer=None, **options):
    """A small private loop; whatever is not given is ordinary."""
    ordinary, records = problem()
    model = ordinary if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return make_private(model, optimizer, records if data is None else data, the_plan or plan(), **options)


def advance(model, optimizer, batch, reduction="mean"):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
    optimizer.step()


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def reference(kind, make_optimizer, the_plan, size=60):
    """The same run by the Trainer's session."""
    model, data = problem(kind, size)
    run = session(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), data, the_plan)
    optimizer, buffer = make_optimizer(model), GradientBuffer(run.source.layout)
    for _ in range(the_plan.steps):
        buffer.set(run.take_step(), the_plan.lot_size)
        optimizer.step()
    return flat(model)


OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chosen", sorted(OPTIMIZERS))
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_it_is_the_same_run_as_the_engines_own(kind, method, chosen, reduction):
    the_plan, make_optimizer = plan(method=method), OPTIMIZERS[chosen]
    model, data = problem(kind)
    given = make_optimizer(model)
    same, optimizer, loader = make_private(model, given, data, the_plan, loss_reduction=reduction)
    assert same is model
    assert optimizer is given
    for batch in loader:
        advance(model, optimizer, batch, reduction)
    expected = reference(kind, make_optimizer, the_plan)
    assert loader.step == len(loader) == STEPS
    assert torch.allclose(flat(model), expected, atol=1e-6), (flat(model) - expected).abs().max()


@pytest.mark.parametrize("params", [dict(quantile=0.5, count_noise=2.0), dict(filter="doppler")])
def test_what_composes_with_every_method_composes_here(params):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = make_private(model, optimizer, data, plan(params=params))
    for batch in loader:
        advance(model, optimizer, batch)
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan(params=params))
    assert torch.allclose(flat(model), expected, atol=1e-6)


class Nested(nn.Module):
    """Arguments by name, constants among them, a dictionary out, checkpointed parts."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, *, features, scale, shift=None):
        hidden = checkpoint(lambda x: torch.tanh(self.body(input=x)), features["x"] * scale, use_reentrant=False)
        return {"logits": self.head(hidden), "loss": hidden.square().mean(), "shift": shift}


@pytest.mark.parametrize("half", [False, True])
def test_models_of_other_shapes_and_autocast_work(half):
    torch.manual_seed(0)
    model, optimizer, loader = private(Nested())
    for inputs, labels in itertools.islice(loader, 3):
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=half, dtype=torch.bfloat16):
            out = model(features={"x": inputs}, scale=torch.ones(5))
        F.cross_entropy(out["logits"].float(), labels).backward()
        optimizer.step()
    assert loader.step == 3
    assert flat(model).isfinite().all()


@pytest.mark.rule(1)
@pytest.mark.rule(8)
def test_the_loader_hands_out_the_plans_poisson_lots():
    model, optimizer, loader = private()
    _, data = problem()
    sizes = []
    for batch in loader:
        lot = loader._loop.push.recorder.current.lot
        assert lot.rate == 0.2
        assert torch.equal(batch[0], data.tensors[0][lot.indices])
        sizes.append(len(batch[0]))
        advance(model, optimizer, batch)
    assert len(sizes) == STEPS
    assert len(set(sizes)) > 3
    assert abs(sum(sizes) / STEPS - 12) < 3


@pytest.mark.rule(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_an_empty_lot_is_a_noise_only_step(kind, reduction):
    model, data = problem(kind, size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    the_plan = plan(sampling_rate=1e-6, steps=3, method="dp-sgd")
    _, _, loader = make_private(model, optimizer, data, the_plan, loss_reduction=reduction)

    def never(model, batch):
        raise AssertionError("no example: the loss is not asked for")

    noise = session(*problem(kind, size=3)[:1], never, data, the_plan)
    for batch in loader:
        assert len(batch[0]) == 0
        advance(model, optimizer, batch, reduction)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert 0.5 < 12 * gradient.std() < 1.5
        assert torch.allclose(gradient, noise.take_step() / 12)
    assert loader.step == 3
    assert flat(model).isfinite().all()


@pytest.mark.rule(9)
def test_a_lot_that_the_engine_would_split_is_taken_as_recorded(monkeypatch):
    """The owner's one pass has recorded all of it; counting it once per part would multiply the sum."""
    monkeypatch.setattr("fodp.clipping.engine._RECORDED_AT_ONCE", 1)
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = make_private(model, optimizer, data, plan())
    for batch in loader:
        advance(model, optimizer, batch)
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan())
    assert torch.allclose(flat(model), expected, atol=1e-6)


@pytest.mark.rule(2)
def test_small_lots_give_the_same_run_too():
    """Most lots of this run have no example or one."""
    the_plan = plan(sampling_rate=0.1, steps=30)
    model, data = problem(size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = make_private(model, optimizer, data, the_plan)
    sizes = set()
    for batch in loader:
        sizes.add(len(batch[0]))
        advance(model, optimizer, batch)
    assert {0, 1, 2} <= sizes
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), the_plan, size=8)
    assert torch.allclose(flat(model), expected, atol=1e-6)


@pytest.mark.rule(2)
def test_an_empty_lot_may_be_stepped_without_a_backward():
    model, optimizer, loader = private(the_plan=plan(sampling_rate=1e-6, steps=2))
    before = flat(model)
    for _ in loader:
        optimizer.step()
    assert not torch.equal(flat(model), before)


@pytest.mark.rule(15)
def test_parameter_groups_and_frozen_layers_act():
    model, _ = problem()
    model[2].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[2].parameters(), "lr": 0.5},
        {"params": model[3].parameters(), "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model, optimizer, loader = private(model, optimizer=optimizer)
    for inputs, labels in itertools.islice(loader, 3):
        F.cross_entropy(model(inputs), labels).backward()
        model[2].weight.grad = torch.ones(8)  # left over from something else
        optimizer.step()
    after = model.state_dict()
    assert not torch.equal(after["0.weight"], before["0.weight"])
    for name in ("2.weight", "2.bias", "3.weight", "3.bias"):
        assert torch.equal(after[name], before[name])


def test_an_optimizer_that_corrects_for_the_noise_learns_its_size():
    model, _ = problem()
    model, optimizer, loader = private(model, optimizer=NoiseCorrectedAdam(model.parameters(), lr=0.01))
    for batch in itertools.islice(loader, 2):
        advance(model, optimizer, batch)
    assert optimizer.param_groups[0]["noise_variance"] == pytest.approx(loader.session.noise_variance())
    assert loader.session.noise_variance() > 0


@pytest.mark.rule(15)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_acts(when):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def schedule():
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    scheduler = schedule() if when == "before" else None
    make_private_result = make_private(model, optimizer, data, plan())
    scheduler = scheduler or schedule()
    for step, batch in enumerate(itertools.islice(make_private_result[2], 4)):
        before = flat(model)
        advance(model, optimizer, batch)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(flat(model), before - 0.5**step * gradient)
        scheduler.step()


@pytest.mark.rule(15)
def test_with_overwhelming_noise_nothing_is_learnt():
    torch.manual_seed(0)
    inputs = torch.randn(600, 5)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()

    def accuracy(noise):
        torch.manual_seed(1)
        model = mlp()
        the_plan = plan(noise_multiplier=noise, steps=100, lot_size=120)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, _, loader = make_private(model, optimizer, TensorDataset(inputs, labels), the_plan)
        for batch in loader:
            advance(model, optimizer, batch)
        with torch.no_grad():
            return (model(inputs).argmax(1) == labels).float().mean().item()

    assert accuracy(0.5) > 0.75
    assert accuracy(1000.0) < 0.6


def released_sum(data, reduction, declared, clip_norm=0.5):
    """The first release on `data`; the same masks and the same noise for each data set that extends another."""
    model, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    the_plan = plan(steps=1, sampling_rate=1.0, clip_norm=clip_norm, method="dp-sgd", lot_size=1)
    _, _, loader = make_private(model, optimizer, data, the_plan, loss_reduction=declared, allow_non_finite=True)
    for batch in loader:
        advance(model, optimizer, batch, reduction)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


@pytest.mark.rule(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("outlier", [1.0, 1e6, float("inf"), float("nan")])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(reduction, outlier):
    _, data = problem()
    inputs, labels = data.tensors
    more = TensorDataset(torch.cat([inputs, outlier * torch.ones(1, 5)]), torch.cat([labels, labels[:1]]))
    apart = released_sum(more, reduction, reduction) - released_sum(data, reduction, reduction)
    assert apart.norm() <= 0.5 * (1 + 1e-5)
    assert (apart.norm() > 0.1) == (abs(outlier) < 1e9)


@pytest.mark.rule(3)
@pytest.mark.rule(27)
def test_a_wrongly_declared_reduction_would_break_the_bound_and_is_refused(monkeypatch):
    """The proof that the test above can fail, where nobody looks at the loss."""
    model, data = problem()

    def losses(m, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    norm = fodp.clipped_sum(model, losses, data[:1], clip_norm=1e6).norm().item()
    ten, eleven = (TensorDataset(*(c[:1].expand(n, *c.shape[1:]) for c in data.tensors)) for n in (10, 11))
    with refused("not the mean of its examples' own losses"):
        released_sum(ten, "sum", "mean")
    monkeypatch.setattr("fodp.sources.coupling.Coupling.refuse", lambda *_: None)
    for declared, breaks in (("sum", False), ("mean", True)):
        sums = [released_sum(copies, "sum", declared, clip_norm=11 * norm) for copies in (ten, eleven)]
        assert ((sums[1] - sums[0]).norm() > 1.5 * 11 * norm) == breaks


@pytest.mark.rule(5)
def test_a_non_finite_example_contributes_zero_and_the_run_goes_on():
    model, data = problem()
    data.tensors[0][:5] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fodp.DataError, match="not finite"):
        make_private(model, optimizer, data, plan(), loss_reduction="sum")
    _, _, loader = make_private(model, optimizer, data, plan(), loss_reduction="sum", allow_non_finite=True)
    for batch in loader:
        advance(model, optimizer, batch, "sum")
    assert flat(model).isfinite().all()


@pytest.mark.rule(5)
def test_a_non_finite_example_does_not_keep_the_model_from_being_checked():
    _, data = problem(size=2)
    data.tensors[0][0] = float("nan")
    model, optimizer, loader = private(
        data=data, the_plan=plan(sampling_rate=1.0), loss_reduction="sum", allow_non_finite=True
    )
    for batch in itertools.islice(loader, 2):
        advance(model, optimizer, batch, "sum")
    assert flat(model).isfinite().all()


@pytest.mark.rule(15)
def test_unnoised_gradients_are_nowhere_to_be_found():
    model, optimizer, loader = private()
    second = torch.optim.SGD(model.parameters(), lr=1.0)  # a forgotten, unprotected optimizer
    batch = next(iter(loader))
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert all(p.grad is None for p in model.parameters())
    before = flat(model)
    second.step()
    assert torch.equal(flat(model), before)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not torch.equal(flat(model), before)


def test_gradients_are_not_aliased_with_the_memory_or_each_other():
    model, optimizer, loader = private(the_plan=plan(method="fo-dp-sgd"))
    kept = []
    for batch in itertools.islice(loader, 3):
        advance(model, optimizer, batch)
        kept.append(([p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]))
    for held, copies in kept:
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    memory = loader.session.states["method"].read().clone()
    for parameter in model.parameters():
        parameter.grad.zero_()
    assert torch.equal(loader.session.states["method"].read(), memory)


@pytest.mark.parametrize("how", ["eval", "no_grad", "forgotten no_grad", "saliency after the step"])
def test_evaluation_inside_the_loop_changes_nothing(how):
    def evaluate(model, after=False):
        if how == "saliency after the step":
            if after:
                F.cross_entropy(model(inputs), labels).backward()
            return
        if how == "eval":
            model.eval()
        with torch.set_grad_enabled(how == "forgotten no_grad"):
            model(inputs)
        model.train()

    torch.manual_seed(5)
    inputs, labels = torch.randn(7, 5), torch.randint(3, (7,))
    model, optimizer, loader = private()
    for batch in loader:
        evaluate(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        evaluate(model)
        loss.backward()
        evaluate(model)
        optimizer.step()
        evaluate(model, after=True)
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan())
    assert torch.allclose(flat(model), expected, atol=1e-6)


def test_the_check_of_the_model_leaves_no_trace():
    """Dropout draws what it would have drawn without it; the mode stays."""

    def first_outputs(checked):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        model, _, loader = private(model)
        loader._loop.push.engine._checked = checked
        torch.manual_seed(1)
        batch = next(iter(loader))
        outputs = model(batch[0])
        assert model[1].training
        return outputs

    assert torch.equal(first_outputs(False), first_outputs(True))


def test_a_deep_copy_of_the_model_is_an_ordinary_model():
    model, optimizer, loader = private(the_plan=plan(seed=None))
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in itertools.islice(loader, 3):
        optimizer.zero_grad()
        average(batch[0]).sum().backward()
        assert all(p.grad is not None for p in average.parameters())
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        average.update_parameters(model)
    assert flat(average).isfinite().all()


def test_an_optimizer_whose_step_calls_its_parents_works():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model, _ = problem()
    model, optimizer, loader = private(model, optimizer=Mine(model.parameters(), lr=0.1))
    for batch in loader:
        advance(model, optimizer, batch)
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan())
    assert torch.allclose(flat(model), expected, atol=1e-6)


class Records(TorchDataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"inputs": self.data[index][0], "labels": self.data[index][1]}


def test_records_and_a_collate_function_of_ones_own():
    _, data = problem()

    def collate(records):
        return {k: torch.stack([r[k] for r in records]) for k in ("inputs", "labels")}

    model, optimizer, loader = private(data=Records(data), collate_fn=collate)
    for batch in loader:
        advance(model, optimizer, (batch["inputs"], batch["labels"]))
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan())
    assert torch.allclose(flat(model), expected, atol=1e-6)


@pytest.mark.rule(10)
def test_epsilon_is_that_of_the_steps_taken_and_reading_changes_nothing():
    the_plan = plan(steps=4)
    model, optimizer, loader = private(the_plan=the_plan)
    assert (loader.step, loader.epsilon()) == (0, 0.0)
    for batch in loader:
        advance(model, optimizer, batch)
        assert loader.epsilon() == loader.epsilon() == the_plan.epsilon(steps=loader.step)
    assert loader.epsilon(delta=1e-3) < loader.epsilon() == the_plan.epsilon()


def test_a_loop_in_pieces_is_one_run():
    model, optimizer, loader = private()
    for epoch in range(4):
        for batch in itertools.islice(loader, 5):
            advance(model, optimizer, batch)
        assert loader.step == 5 * (epoch + 1)
    expected = reference("mlp", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan())
    assert torch.allclose(flat(model), expected, atol=1e-6)


def test_closing_gives_the_ordinary_model_back():
    model, optimizer, loader = private()
    loader.close()
    with pytest.raises(fodp.PrivacyError, match="closed"):
        next(iter(loader))
    F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 0])).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    private(model, optimizer=optimizer)


# Misuse of the loop: each raises, and nothing is released.


def refused(match):
    return pytest.raises(fodp.PrivacyError, match=match)


@pytest.mark.rule(8)
def test_a_foreign_loader_is_refused():
    model, optimizer, _ = private()
    before = flat(model)
    for batch in itertools.islice(DataLoader(problem()[1], batch_size=12), 1):
        with refused("loader that make_private returned"):
            advance(model, optimizer, batch)
    assert torch.equal(flat(model), before)


@pytest.mark.rule(8)
def test_other_rows_than_the_lots_are_refused():
    model, optimizer, loader = private()
    for inputs, labels in loader:
        before = flat(model)
        with refused("another number of rows"):
            advance(model, optimizer, (inputs[1:], labels[1:]))
        assert torch.equal(flat(model), before)
        break


@pytest.mark.rule(2)
def test_rows_for_an_empty_lot_are_refused():
    model, optimizer, loader = private(the_plan=plan(sampling_rate=1e-6))
    next(iter(loader))
    with refused("another number of rows"):
        advance(model, optimizer, (torch.randn(2, 5), torch.tensor([0, 1])))


def test_a_step_without_backward_is_refused_and_can_be_made_good():
    model, optimizer, loader = private()
    for batch in itertools.islice(loader, 1):
        with refused("without a backward"):
            optimizer.step()
        advance(model, optimizer, batch)
    assert loader.step == 1


def test_a_second_step_is_refused():
    model, optimizer, loader = private()
    advance(model, optimizer, next(iter(loader)))
    with refused("without a lot"):
        optimizer.step()


@pytest.mark.parametrize("how", ["retain_graph", "accumulate", "parts", "interleaved"])
def test_a_second_backward_is_refused(how):
    model, optimizer, loader = private()
    inputs, labels = next(iter(loader))
    before = flat(model)
    loss = F.cross_entropy(model(inputs), labels)
    other = F.cross_entropy(model(inputs), labels) if how == "interleaved" else None
    loss.backward(retain_graph=how == "retain_graph")
    if how == "accumulate":
        other = F.cross_entropy(model(inputs), labels)
    if how == "parts":
        other = F.cross_entropy(model(inputs[:3]), labels[:3])
    with refused("second backward"):
        (other if other is not None else loss).backward()
    with refused("second backward"):
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_two_losses_added_up_are_one_backward():
    model, optimizer, loader = private()
    for inputs, labels in itertools.islice(loader, 2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels) + 0.1 * model(-inputs).square().mean()
        loss.backward()
        optimizer.step()
    assert loader.step == 2


@pytest.mark.parametrize("again", ["same iterator", "new iterator"])
def test_a_missing_step_is_refused(again):
    model, _, loader = private()
    lots = iter(loader)
    inputs, labels = next(lots)
    F.cross_entropy(model(inputs), labels).backward()
    with refused("not stepped"):
        next(lots if again == "same iterator" else iter(loader))


def test_a_missing_last_step_is_refused():
    model, optimizer, loader = private(the_plan=plan(steps=2))
    with refused("not stepped"):
        for i, batch in enumerate(loader):
            if i == 0:
                advance(model, optimizer, batch)


def test_a_spent_plan_has_no_more_lots():
    model, optimizer, loader = private(the_plan=plan(steps=2))
    for batch in loader:
        advance(model, optimizer, batch)
    with pytest.warns(UserWarning, match="2 steps are done"):
        assert list(loader) == []


def test_a_backward_through_an_earlier_lots_forward_is_refused():
    model, optimizer, loader = private()
    lots = iter(loader)
    inputs, labels = next(lots)
    stale = F.cross_entropy(model(inputs), labels)
    advance(model, optimizer, (inputs, labels))
    next(lots)
    with refused("another lot"):
        stale.backward()


def test_a_closure_is_refused():
    model, optimizer, loader = private()
    inputs, labels = next(iter(loader))
    for call in (lambda c: optimizer.step(c), lambda c: optimizer.step(closure=c)):
        with refused("closure"):
            call(lambda: F.cross_entropy(model(inputs), labels))


def test_inputs_changed_in_place_before_the_step_are_refused():
    model, optimizer, loader = private()
    inputs, labels = next(iter(loader))
    F.cross_entropy(model(inputs), labels).backward()
    inputs.zero_()
    with refused("changed in place"):
        optimizer.step()


@pytest.mark.parametrize("penalty", [1e-2, 1.0])
def test_a_penalty_that_goes_past_the_layers_is_refused(penalty):
    model, optimizer, loader = private()
    inputs, labels = next(iter(loader))
    loss = F.cross_entropy(model(inputs), labels) + penalty * model[0].weight.square().sum()
    loss.backward()
    with refused("weight_decay"):
        optimizer.step()


def test_a_penalty_is_found_even_after_a_lot_that_cannot_tell():
    model, optimizer, loader = private()
    lots = iter(loader)
    inputs, labels = next(lots)
    (F.cross_entropy(model(inputs), labels) * float("nan")).backward()
    optimizer.step()
    assert flat(model).isfinite().all()
    inputs, labels = next(lots)
    (F.cross_entropy(model(inputs), labels) + model[0].weight.square().sum()).backward()
    with refused("weight_decay"):
        optimizer.step()


def test_parts_of_the_model_alone_are_refused():
    model, optimizer, loader = private()
    inputs, labels = next(iter(loader))
    F.cross_entropy(model[3](model[2](model[1](model[0](inputs)))), labels).backward()
    with refused("the model itself"):
        optimizer.step()


@pytest.mark.rule(14)
@pytest.mark.parametrize("change", ["new group", "unfrozen", "frozen", "new layer"])
def test_later_changes_are_refused(change):
    model, _ = problem()
    model[2].requires_grad_(False)
    model, optimizer, loader = private(model)
    lots = iter(loader)
    advance(model, optimizer, next(lots))
    if change == "new group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    elif change == "new layer":
        model.append(nn.Linear(3, 3))
    else:
        model[2 if change == "unfrozen" else 0].requires_grad_(change == "unfrozen")
    before = flat(model)
    with refused("not this model's|changed after make_private"):
        advance(model, optimizer, next(lots))
    assert torch.equal(flat(model), before)


@pytest.mark.rule(16)
def test_a_batch_norm_that_wakes_up_is_refused():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
    with refused("GroupNorm"):
        private(model)
    model[1].eval()
    model, optimizer, loader = private(model)
    lots = iter(loader)
    advance(model, optimizer, next(lots))
    model.train()
    with refused("BatchNorm1d in training mode"):
        advance(model, optimizer, next(lots))


# Models whose examples cannot be told apart: found on the first lot, before anything is released.


class Mixing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.how == "centred":
            hidden = hidden - hidden.mean(0)
        if self.how == "centred in training":
            hidden = hidden - (hidden.mean(0) if self.training else 0)
        if self.how == "sorted":
            hidden = hidden.sort(0).values
        if self.how == "time first":
            hidden = self.first(inputs.unsqueeze(0).expand(len(inputs), -1, -1).contiguous()).mean(0)
        if self.how == "outputs transposed":
            return self.last(hidden).t()
        return self.last(hidden)


@pytest.mark.rule(4)
@pytest.mark.parametrize("how", ["centred", "centred in training", "sorted", "time first", "outputs transposed"])
def test_a_model_that_does_not_keep_examples_apart_is_refused(how):
    model, optimizer, loader = private(Mixing(how))
    before = flat(model)
    inputs, _ = next(iter(loader))
    for _ in range(2):  # ignoring it does not help
        with refused(r"keep the examples .*fodp\.Trainer"):
            model(inputs)
    with pytest.raises(fodp.PrivacyError):
        optimizer.step()
    assert torch.equal(flat(model), before)
    assert loader.step == 0


# Refused at once.


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.rule(14)
def test_arguments_that_cannot_be_private_are_refused():
    model, _ = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("loss_reduction must be one of mean, sum"):
        private(loss_reduction="none")
    with refused("iterable"):
        private(data=Stream())
    with refused("not this model's"):
        private(model, optimizer=torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1))
    with refused("lacks the trainable parameter 3.weight"):
        private(model, optimizer=torch.optim.SGD(model[:3].parameters(), lr=0.1))
    with refused("LBFGS"):
        private(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with refused("torch.optim"):
        private(model, optimizer=object())
    with refused("no parameter is trainable"):
        private(nn.Sequential(nn.Linear(5, 3)).requires_grad_(False), optimizer=sgd)
    private(model, optimizer=sgd)  # a refusal leaves nothing behind


@pytest.mark.rule(12)
def test_a_first_lot_of_mostly_empty_rows_does_not_end_the_run():
    """Whether rows are empty is private; a run that ended there would tell."""
    _, data = problem()
    inputs = data.tensors[0].clone()
    inputs[: len(inputs) // 2] = 0
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    model, optimizer, loader = private(model, TensorDataset(inputs, data.tensors[1]), plan(sampling_rate=1.0))
    advance(model, optimizer, next(iter(loader)))
    model, optimizer, loader = private(
        nn.Sequential(nn.Linear(5, 3, bias=False)), TensorDataset(torch.zeros_like(inputs), data.tensors[1])
    )
    advance(model, optimizer, next(iter(loader)))
    assert loader.step == 1


def test_a_model_or_optimizer_is_made_private_once():
    model, optimizer, _ = private()
    with refused("private already"):
        private(model)
    with refused("private already"):
        private(nn.Sequential(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with refused("private already"):
        private(optimizer=optimizer)


class Wanting(Method):
    """A method that wants more than a loop of one's own can give."""

    name = "wanting"
    summary = reference = noise_meaning = "for tests"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Params:
        wants: str = ""

    def events(self, plan):
        lots = 2 if self.params.wants == "two lots" else 1
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),) * lots, plan.steps),)

    def init(self, plan, size):
        return NoState()

    def step(self, step, state):
        lot = step.draw()
        if self.params.wants == "a secret second lot":
            step.draw(name="again")
        at = ((1.0, torch.zeros_like(step.parameters())),) if self.params.wants == "a shifted point" else HERE
        query = step.gradients(lot, at).clipped_sum(step.plan.clip_norm)
        noise = 0.5 if self.params.wants == "too little noise" else 1.0
        state.last = step.release(query, noise * step.plan.noise_multiplier * step.plan.clip_norm)
        return state.last


@pytest.fixture
def wanting():
    register(Wanting)
    yield
    del METHODS["wanting"]


@pytest.mark.usefixtures("wanting")
def test_the_release_itself_is_never_touched():
    model, optimizer, loader = private(the_plan=plan(method="wanting"))
    for batch in itertools.islice(loader, 2):
        advance(model, optimizer, batch)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(loader.session.states["method"].last, 12 * gradient)
        for parameter in model.parameters():
            parameter.grad.zero_()
        assert torch.allclose(loader.session.states["method"].last, 12 * gradient)


@pytest.mark.rule(6)
@pytest.mark.usefixtures("wanting")
@pytest.mark.parametrize(
    ("wants", "match"),
    [
        ("a shifted point", r"fodp\.Trainer"),
        ("a secret second lot", r"fodp\.Trainer"),
        ("too little noise", "promised"),
    ],
)
def test_methods_that_want_more_are_refused_before_a_release(wants, match):
    model, optimizer, loader = private(the_plan=plan(method="wanting", params=dict(wants=wants)))
    before = flat(model)
    with refused(match):
        advance(model, optimizer, next(iter(loader)))
    assert torch.equal(flat(model), before)


@pytest.mark.usefixtures("wanting")
def test_methods_that_cannot_be_dropped_in_are_refused_at_once(monkeypatch):
    with refused(r"several lots.*fodp\.Trainer"):
        private(the_plan=plan(method="wanting", params=dict(wants="two lots")))
    with refused(r"its own update.*fodp\.Trainer"):
        private(the_plan=plan(method="wanting", params=dict(update="adam")))
    for attribute, why in (("owns_optimizer", "its own update"), ("has_acceptance_test", "its proposals")):
        with monkeypatch.context() as patch:
            patch.setattr(Wanting, attribute, True)
            with refused(rf"{why}.*fodp\.Trainer"):
                private(the_plan=plan(method="wanting"))


def test_a_loader_that_is_dropped_with_a_lot_in_hand_leaves_nothing_in_the_process():
    """Hooks on all modules and modes would slow down, and judge, whatever else runs there; there is no step for it."""

    def listeners():
        hooks = torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
        return [len(each) for each in (*hooks, _get_current_function_mode_stack())]

    gc.collect()
    before = listeners()
    model, optimizer, loader = private()
    inputs, labels = loader.next_batch()
    loader.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
    assert listeners() != before
    del loader
    gc.collect()
    assert listeners() == before
    with pytest.raises(fodp.ConfigurationError, match="the loader was dropped while its lot was in hand"):
        optimizer.step()


class TestEpochs:
    """The same lots, an epoch at a time."""

    def test_an_epoch_is_one_over_the_rate_and_the_run_is_the_same(self):
        plain, optimizer, loader = private(the_plan=plan(steps=12))
        for batch in loader:
            advance(plain, optimizer, batch)
        model, optimizer, loader = private(the_plan=plan(steps=12))
        lengths = []
        for epoch in loader.epochs():
            before = loader.step
            for batch in epoch:
                advance(model, optimizer, batch)
            lengths.append(loader.step - before)
        assert lengths == [5, 5, 2]
        assert loader.steps_per_epoch == 5
        assert torch.equal(flat(model), flat(plain))

    def test_an_epoch_that_was_left_goes_on_and_so_does_one_of_a_resumed_loop(self, tmp_path):
        model, optimizer, loader = private(the_plan=plan(steps=12))
        for epoch in loader.epochs():
            for batch in itertools.islice(epoch, 3):
                advance(model, optimizer, batch)
            if loader.step >= 8:  # 3, 5, 8
                break
        assert loader.step == 8
        loader.save(tmp_path / "loop.pt")
        loader.close()
        model, optimizer, loader = private(the_plan=plan(steps=12), resume=tmp_path / "loop.pt")
        lengths = []
        for epoch in loader.epochs():
            lengths.append(sum(1 for batch in epoch if advance(model, optimizer, batch) is None))
        assert lengths == [2, 2]

    def test_an_epoch_without_a_step_is_no_endless_loop(self):
        _, _, loader = private()
        with pytest.raises(fodp.ConfigurationError, match="left before its first step"):
            list(loader.epochs())
        assert loader.step == 0

    def test_a_loop_that_is_over_or_closed_has_none(self):
        model, optimizer, loader = private(the_plan=plan(steps=1))
        for batch in loader:
            advance(model, optimizer, batch)
        with pytest.warns(UserWarning, match="1 steps are done"):
            assert list(loader.epochs()) == []
        _, _, loader = private()
        loader.close()
        with pytest.raises(fodp.ConfigurationError, match="closed"):
            loader.epochs()
