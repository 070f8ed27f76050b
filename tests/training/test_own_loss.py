"""The loss of a loop of one's own: what couples the examples of a lot is refused, what does not is left alone."""

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import TensorDataset

import fodp
from fodp.own_loop import make_private


@pytest.fixture(autouse=True)
def no_loop_of_another_test():
    """A loader that a test has dropped in an exception listens until it is collected."""
    gc.collect()


WEIGHT = torch.tensor([1.0, 10.0, 1.0])
CLIP = 0.5


def plan(**changes):
    base = dict(sampling_rate=0.3, steps=3, lot_size=12, clip_norm=CLIP, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**{**base, **changes}, method="dp-sgd")


def problem(rows=40):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(rows, 5), torch.arange(rows) % 7 % 3)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), data


def loop(the_plan=None, data=None, model=None, **options):
    ordinary, records = problem()
    model = ordinary if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, data or records, the_plan or plan(), **options)


def train(loss, *, by_example=False, **options):
    """All steps; `loss(model, inputs, labels)` is what backward begins from."""
    model, optimizer, loader = loop(**options)
    for inputs, labels in loader:
        optimizer.zero_grad()
        found = loss(model, inputs, labels)
        if by_example:
            loader.backward(found)
        else:
            found.backward()
        optimizer.step()
    return loader


def refused(words):
    return pytest.raises(fodp.ConfigurationError, match=words)


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def first_sum(data, loss):
    """The first release without a word of what it was made of; the same noise and masks whoever is in the data."""
    model, optimizer, loader = loop(plan(sampling_rate=1.0, steps=1, lot_size=1), data=data)
    for inputs, labels in loader:
        loss(loader, model, inputs, labels)
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


# --- PyTorch's own losses with counts ------------------------------------------------------------------------


def weighted(model, x, y):
    return F.cross_entropy(model(x), y, weight=WEIGHT)


def _linear():
    return getattr(F, "linear_cross_entropy", None) or pytest.skip("this version of PyTorch does not have it")


COUNTED = {
    "cross_entropy": weighted,
    "a module, with smoothing": lambda m, x, y: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(m(x), y),
    "linear": lambda m, x, y: _linear()(m(x), torch.eye(3), y, weight=WEIGHT),
    "nll_loss": lambda m, x, y: F.nll_loss(m(x).log_softmax(1), y, weight=WEIGHT),
    "ignored": lambda m, x, y: F.cross_entropy(m(x), torch.where(y == 1, -100, y)),
    "ignored tokens": lambda m, x, y: F.cross_entropy(
        m(x)[:, :, None].expand(-1, -1, 2), torch.stack([y, torch.where(y == 1, -100, y)], 1)
    ),
}


@pytest.mark.rule(27)
@pytest.mark.parametrize("case", COUNTED)
def test_a_mean_by_weights_or_counts_of_the_lot_is_refused(case):
    with refused(r"loader\.backward\(losses\)"):
        train(COUNTED[case])


@pytest.mark.rule(27)
def test_a_weighted_mean_would_break_the_bound_and_losses_one_by_one_keep_it(monkeypatch):
    """One record of the rare class more, where nobody looks at the loss."""
    inputs, _ = problem()[1].tensors
    common, rare = torch.zeros(40, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    data = TensorDataset(inputs, common)
    more = TensorDataset(torch.cat([inputs, inputs[:1]]), torch.cat([common, rare]))

    def moved(loss):
        return (first_sum(more, loss) - first_sum(data, loss)).norm().item()

    heavy = WEIGHT**2

    def by_example(loader, model, x, y):
        loader.backward(F.cross_entropy(0.5 * model(x), y, weight=heavy, reduction="none"))

    def mean(loader, model, x, y):
        F.cross_entropy(0.5 * model(x), y, weight=heavy).backward()

    assert 0.9 * CLIP < moved(by_example) <= CLIP * (1 + 1e-5)
    with refused("weights of the whole lot"):
        moved(mean)
    monkeypatch.setattr("fodp.sources.between._WITH_COUNTS", ())
    with refused("mixes the examples of the lot"):
        moved(mean)
    monkeypatch.setattr("fodp.sources.coupling.Coupling.refuse", lambda *_: None)
    assert moved(mean) > 3 * CLIP


@pytest.mark.rule(27)
def test_losses_of_pytorch_that_do_not_couple_pass_and_so_do_evaluations():
    def loss(model, x, y):
        with torch.no_grad():
            weighted(model, x[:2], y[:2])  # a score
        weighted(model, x[:3], y[:3])  # of which no backward is made
        hot = F.one_hot(y, 3).float()
        scores = model(x)
        return (
            F.cross_entropy(scores, y, weight=torch.full((3,), 2.0))
            + F.cross_entropy(scores, hot, weight=WEIGHT)
            + F.binary_cross_entropy_with_logits(scores, hot, weight=WEIGHT, pos_weight=WEIGHT)
            + F.multi_margin_loss(scores, y, weight=WEIGHT)
            + F.kl_div(scores.log_softmax(1), hot, reduction="batchmean")
            + F.mse_loss(scores, torch.zeros(len(y), 3).scatter_(1, y[:, None], 1.0))
        )

    assert train(loss).step == 3
    assert _get_current_function_mode_stack() == []


@pytest.mark.rule(27)
def test_a_sum_may_have_weights_and_ignored_targets():
    loss = lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHT, ignore_index=2, reduction="sum")  # noqa: E731
    assert train(loss, loss_reduction="sum").step == 3


# --- losses made by hand -------------------------------------------------------------------------------------


def by_hand(model, x, y):
    return (losses(model, x, y) * WEIGHT[y]).sum() / WEIGHT[y].sum()


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs):
        ctx.save_for_backward(outputs)
        return outputs.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class OwnRows(OwnBackward):
    @staticmethod
    def forward(ctx, outputs):
        ctx.save_for_backward(outputs)
        return outputs.square().sum(1, keepdim=True)


MIXES, REDUCTION = "mixes the examples of the lot", "not the mean of its examples' own losses"
COUPLED = {
    "weights": (by_hand, MIXES),
    "weights as a number": (
        lambda m, x, y: (losses(m, x, y) * WEIGHT[y]).sum() / WEIGHT[y].sum().item(),
        f"{MIXES}|{REDUCTION}",
    ),
    "normalised": (lambda m, x, y: F.cross_entropy((m(x) - m(x).mean(0)) / m(x).std(0), y), MIXES),
    "batch norm": (lambda m, x, y: F.cross_entropy(F.batch_norm(m(x), None, None, training=True), y), MIXES),
    "pairs": (lambda m, x, y: F.cross_entropy(m(x) @ m(x).T, torch.arange(len(y))), MIXES),
    "hardest": (lambda m, x, y: losses(m, x, y).topk((len(y) + 1) // 2).values.mean(), MIXES),
    "masked": (lambda m, x, y: losses(m, x, y)[x[:, 0] > 0].mean(), MIXES),
    "counts of the lot": (lambda m, x, y: (losses(m, x, y) / y.bincount(minlength=3)[y]).mean(), MIXES),
    "a sum": (lambda m, x, y: losses(m, x, y).sum(), REDUCTION),
    "one too few": (lambda m, x, y: losses(m, x, y).sum() / (len(y) - 1), REDUCTION),
    "by a public size": (lambda m, x, y: losses(m, x, y).sum() / 12, REDUCTION),
    "a backward of its own": (lambda m, x, y: OwnBackward.apply(m(x)), "cannot be followed"),
}


@pytest.mark.rule(27)
@pytest.mark.parametrize("case", COUPLED)
def test_a_loss_that_couples_the_lot_is_refused_before_anything_is_released(case):
    loss, words = COUPLED[case]
    model, optimizer, loader = loop()
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    x, y = next(iter(loader))
    loss(model, x, y).backward()
    with refused(words):
        optimizer.step()
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    loader.close()


@pytest.mark.rule(27)
def test_a_hand_made_weighted_mean_is_refused():
    with refused("mixes the examples of the lot"):
        train(by_hand)


@pytest.mark.rule(27)
def test_a_reduction_that_only_two_lots_of_two_sizes_show_is_refused():
    """The number of rows is a plain number in it, so that it cannot be told from one lot."""
    with refused("not the mean of its examples' own losses"):
        train(lambda m, x, y: losses(m, x, y).sum() / len(y) ** 2, the_plan=plan(steps=10))
    with refused("not the sum of its examples' own losses"):
        train(lambda m, x, y: losses(m, x, y).sum() / len(y), the_plan=plan(steps=10), loss_reduction="sum")


@pytest.mark.rule(27)
@pytest.mark.rule(20)
def test_a_loss_that_mixes_from_the_second_step_on_is_refused():
    steps = itertools.count()
    with refused("Earlier lots did not show it"):
        train(lambda m, x, y: by_hand(m, x, y) if next(steps) else losses(m, x, y).mean())


@pytest.mark.rule(27)
def test_parts_of_a_lot_are_looked_at_in_two_steps():
    model, optimizer, loader = loop(microbatch=5)
    with refused("Earlier lots did not show it"):
        for step, lot in enumerate(loader):
            for x, y in lot:
                (by_hand if step else lambda *a: losses(*a).mean())(model, x, y).backward()
            optimizer.step()
    assert loader.step == 1


def harmless():
    count, total, kept = itertools.count(), torch.zeros(()), []

    def told(m, x, y):
        loss = losses(m, x, y).mean()
        total.add_(loss.detach())
        kept.append(loss.item() / len(y))
        return loss

    def in_place(m, x, y):
        scores = m(x)
        scores[:, 0] *= 2
        return F.cross_entropy(scores.add_(1), y)

    focal = lambda v: (1 - (-v).exp()) ** 2 * v  # noqa: E731
    yield "weights, one by one", lambda m, x, y: (losses(m, x, y) * WEIGHT[y]).mean()
    yield "a sum by the rows", lambda m, x, y: losses(m, x, y).sum() / len(y)
    yield "focal, and a penalty", lambda m, x, y: focal(losses(m, x, y)).mean() + 0.1 * m(x).square().mean()
    yield "a weight that grows", lambda m, x, y: losses(m, x, y).mean() + next(count) / 9 * m(x).square().mean()
    yield "a weight in a tensor", lambda m, x, y: losses(m, x, y).mean() * torch.tensor(1.0 + next(count))
    yield "labels by hand", lambda m, x, y: F.cross_entropy(m(x), torch.tensor([int(v) for v in y]))
    yield (
        "one by one",
        lambda m, x, y: sum(F.cross_entropy(o[None], t[None]) for o, t in zip(m(x), y, strict=True)) / len(y),
    )
    yield "vmap", lambda m, x, y: torch.vmap(lambda o, t: F.cross_entropy(o[None], t[None]))(m(x), y).mean()
    yield "indices", lambda m, x, y: -m(x).log_softmax(1)[torch.arange(len(y)), y].mean()
    yield "a distribution", lambda m, x, y: -torch.distributions.Categorical(logits=m(x)).log_prob(y).mean()
    yield "rows with a backward of their own", lambda m, x, y: OwnRows.apply(m(x)).mean()
    yield "two passes", lambda m, x, y: losses(m, x, y).mean() + losses(m, -x, y).mean()
    yield "told", told
    yield "in place", in_place
    yield "nothing to learn", lambda m, x, y: F.relu(m(x) - 100).mean()


@pytest.mark.rule(27)
@pytest.mark.parametrize(("case", "loss"), list(harmless()), ids=lambda v: v if isinstance(v, str) else "")
def test_an_ordinary_loss_is_not_refused(case, loss):
    assert train(loss).step == 3


@pytest.mark.rule(27)
def test_small_lots_do_not_raise_an_alarm():
    """Of none, one and two rows."""
    mean = lambda m, x, y: losses(m, x, y).sum() / max(1, len(y))  # noqa: E731
    assert train(mean, the_plan=plan(sampling_rate=0.04, steps=12)).step == 12


# --- what the model is given ---------------------------------------------------------------------------------


def in_place(model, x, y):
    x -= x.mean(0)
    return losses(model, x, y)


MIXED_ROWS = {
    "normalised": lambda m, x, y: losses(m, (x - x.mean(0)) / x.std(0), y),
    "in place": in_place,
    "mixup": lambda m, x, y: losses(m, 0.5 * x + 0.5 * x.flip(0), y),
    "by a module": lambda m, x, y: losses(m, nn.BatchNorm1d(5)(x), y),
}


@pytest.mark.rule(27)
@pytest.mark.parametrize("case", MIXED_ROWS)
def test_rows_that_are_mixed_before_the_model_are_refused(case):
    with refused("what the model is given mixes the examples of the lot"):
        train(MIXED_ROWS[case], by_example=True)


@pytest.mark.rule(27)
@pytest.mark.filterwarnings("error")
def test_rows_that_are_made_one_by_one_are_taken():
    public, kept = torch.ones(5), torch.zeros(5)

    def loss(model, x, y):
        model(x[:2])  # a score
        x = ((x - public) / 2).to(torch.float32) + y[:, None]
        x[:, 0] = kept[0] + x[:, 1]
        return losses(model, x.reshape(len(y), 5), y)

    assert train(loss, by_example=True).step == 3


@pytest.mark.rule(27)
def test_rows_that_come_from_outside_of_pytorch_are_warned_of(recwarn):
    train(lambda m, x, y: losses(m, torch.from_numpy(x.numpy() * 2), y), by_example=True)
    assert [w.filename for w in recwarn if "nothing that the model is given" in str(w.message)] == [__file__]


# --- one loss per example ------------------------------------------------------------------------------------


@pytest.mark.rule(27)
@pytest.mark.parametrize(("reduction", "microbatch"), [("mean", None), ("sum", 4)])
def test_losses_one_by_one_are_the_trainers_run_whatever_is_declared(reduction, microbatch):
    the_plan = plan(sampling_rate=0.1, steps=6)
    model, optimizer, loader = loop(the_plan, microbatch=microbatch, loss_reduction=reduction)
    for lot in loader:
        for x, y in [lot] if microbatch is None else lot:
            loader.backward(F.cross_entropy(model(x), y, weight=WEIGHT, reduction="none"))
        optimizer.step()
    other, data = problem()
    weighted_losses = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHT, reduction="none")  # noqa: E731
    fodp.Trainer(other, weighted_losses, data, the_plan, torch.optim.SGD(other.parameters(), lr=0.1)).fit()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


WRONG = {
    "a mean": (lambda m, x, y: losses(m, x, y).mean(), "one loss per example"),
    "a matrix": (lambda m, x, y: m(x), "one loss per example"),
    "a number": (lambda m, x, y: 1.0, "one loss per example"),
    "no gradient": (lambda m, x, y: losses(m, x, y).detach(), "do not depend on any trainable"),
    "not the model's": (lambda m, x, y: x[:, 0] * torch.ones(1, requires_grad=True), "do not depend on the model"),
    "a mean, repeated": (lambda m, x, y: losses(m, x, y).mean().expand(len(y)), "outputs for others"),
    "by their mean": (lambda m, x, y: losses(m, x, y) / losses(m, x, y).mean(), "outputs for others"),
    "by others' labels": (lambda m, x, y: losses(m, x, y) * WEIGHT[y] / WEIGHT[y].mean(), MIXES),
}


@pytest.mark.rule(27)
@pytest.mark.parametrize("case", WRONG)
def test_losses_that_are_not_one_per_example_are_refused(case):
    loss, words = WRONG[case]
    with refused(words):
        train(loss, by_example=True)


@pytest.mark.rule(2)
def test_an_empty_lot_has_empty_losses_and_a_lot_must_be_in_hand():
    model, optimizer, loader = loop(plan(sampling_rate=1e-9))
    for x, y in loader:
        loader.backward(losses(model, x, y))
        optimizer.step()
    assert loader.step == 3
    with refused("without a lot in hand"):
        loader.backward(torch.zeros(0))


@pytest.mark.rule(27)
def test_a_second_backward_is_refused_here_too():
    model, _, loader = loop()
    x, y = next(iter(loader))
    loader.backward(losses(model, x, y))
    with refused("a second backward"):
        loader.backward(losses(model, x, y))
    loader.close()


# --- what listens --------------------------------------------------------------------------------------------


def test_devices_around_parts_of_the_loop_and_loops_that_break_off_leave_no_mode_behind():
    model, optimizer, loader = loop()
    lots = iter(loader)
    with torch.device("cpu"):
        x, y = next(lots)
    with torch.device("cpu"):
        losses(model, x, y).mean().backward()
    with torch.device("cpu"):
        optimizer.step()
    next(lots)
    del lots, loader
    assert _get_current_function_mode_stack() == []


@pytest.mark.rule(27)
def test_a_mode_that_was_taken_away_is_noticed():
    model, _, loader = loop()
    x, y = next(iter(loader))
    stolen = torch.overrides._pop_mode()
    with refused("a function mode was taken away"):
        losses(model, x, y)
    assert stolen is loader._loop.push.recorder.between
