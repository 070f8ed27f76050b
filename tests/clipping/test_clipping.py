"""The clipping engine on whole models: structures, batches, queries, neighbouring lots, side effects."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fodp.clipping import FLOAT_TOLERANCE, Clipper, Engine, clipped_sum, self_check
from fodp.clipping.layers import rules
from fodp.clipping.layers.uses import Product
from fodp.errors import PrivacyError
from gradients_for_tests import gradients_of
from models_for_tests import (
    FAST,
    LAYERS,
    LOOPED,
    Apply,
    NoisyInside,
    Scale,
    build,
    clip_norm_for,
    clipped,
    gradients_by_hand,
    linear,
    points_by_hand,
    probe,
    rows,
    sequential,
    structure,
)

COUNT = 5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
LOOP_WARNING = "one example at a time"


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """An engine that quietly gave way to the loop would pass every comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Using padding='same'")
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        yield


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return build(FAST, "mlp", 1, dtype)[0]


def vectors(count: int = COUNT, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    return torch.randn(count, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, clip_norm: float) -> None:
    error = (found.double() - expected.double()).norm() / clip_norm
    assert error <= TOLERANCES[found.dtype], f"off by {error:.1e} clip norms"


def checked_engine(model: nn.Module, loss_fn: Callable[..., Tensor] = probe, batch: Any = None) -> Engine:
    """An engine that has passed its self-check and works fast."""
    engine = Engine(model, loss_fn)
    for _ in range(2):  # the first lots are looked at whole
        engine.uses(vectors() if batch is None else batch)
    assert engine._checked
    assert not engine._loop
    return engine


# --- structures -----------------------------------------------------------------------------------


@pytest.mark.rule(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", FAST)
def test_structure_equals_gradients_by_hand(name: str, dtype: torch.dtype) -> None:
    model, x = build(FAST, name, COUNT, dtype)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    engine = Engine(model, probe)
    for _ in range(2):  # the lot of the self-check, and a lot after it
        assert_close(gradients_of(engine, x).clipped_sum(clip_norm).value, clipped(truth, clip_norm).sum(0), clip_norm)
    assert engine._checked
    assert not engine._loop


@pytest.mark.rule(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LOOPED)
def test_what_mixes_examples_takes_the_loop_and_says_so(name: str, dtype: torch.dtype) -> None:
    """Each example's gradient comes from itself alone, as if it were the only one."""
    model, x = build(LOOPED, name, COUNT, dtype)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    with pytest.warns(UserWarning, match=LOOP_WARNING):
        found = clipped_sum(model, probe, x, clip_norm)
    assert_close(found, clipped(truth, clip_norm).sum(0), clip_norm)


MIXING_LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "times the mean loss": lambda m, x: (lambda losses: losses * losses.mean())(probe(m, x)),
    "worst for everyone": lambda m, x: probe(m, x).amax().expand(len(x)),
    "contrast": lambda m, x: (m(x) @ m(x).mT).logsumexp(1),
}


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_a_loss_that_mixes_examples_takes_the_loop(name: str) -> None:
    model, x, loss_fn = mlp(), vectors(), MIXING_LOSSES[name]
    truth = gradients_by_hand(model, loss_fn, x)
    clip_norm = clip_norm_for(truth)
    with pytest.warns(UserWarning, match=LOOP_WARNING):
        found = clipped_sum(model, loss_fn, x, clip_norm)
    assert_close(found, clipped(truth, clip_norm).sum(0), clip_norm)


@pytest.mark.rule(4)
def test_a_mean_repeated_for_everyone_takes_the_loop() -> None:
    """Each loss holds all examples, although the sum of the losses falls apart into examples again."""
    model, x = mlp(), vectors()
    truth = clipped(gradients_by_hand(model, probe, x), 0.3).sum(0)
    with pytest.warns(UserWarning, match="mixes the examples of a lot"):
        found = clipped_sum(model, lambda m, x: probe(m, x).mean().expand(len(x)), x, 0.3)
    assert_close(found, truth, 0.3)


@pytest.mark.rule(4)
@pytest.mark.parametrize("quiet", ["vanishing", "not finite"])
def test_a_pair_that_says_nothing_does_not_pass_the_self_check(quiet: str) -> None:
    """The first and last examples have gradient zero or NaN; the model mixes all the same."""
    model = Apply(lambda m, x: m.a(x - 0.5 * x.mean(0)), a=nn.Linear(6, 4)).double()
    x, weights = vectors(6), torch.ones(6, dtype=torch.float64)
    weights[[0, 5]] = 0.0 if quiet == "vanishing" else float("nan")
    truth = gradients_by_hand(model, probe, (x, weights))
    with pytest.warns(UserWarning, match=LOOP_WARNING):
        found = clipped_sum(model, probe, (x, weights), 0.3)
    assert_close(found, clipped(truth, 0.3).sum(0), 0.3)


@pytest.mark.rule(4)
def test_the_self_check_sees_exchanged_examples_of_equal_norm() -> None:
    model = Apply(lambda m, x: m.a(F.normalize(x, dim=1).flip(0)), a=nn.Linear(6, 1, bias=False)).double()
    with pytest.warns(UserWarning, match=LOOP_WARNING):
        clipped_sum(model, lambda m, x: m(x)[:, 0], vectors(), 1.0)


def last_bit_decides(model: Apply, x: Tensor) -> Tensor:
    """The larger of two equal products, where x[1] is zero; their last bit depends on the number of examples."""
    rounding = torch.finfo(x.dtype).eps * (1.5 - len(x))
    return torch.maximum(model.a(x[:, :1]), model.b(x[:, :1]) * (1 + rounding) + 1e-9 + x[:, 1:])


@pytest.mark.rule(4)
def test_a_tie_that_rounding_decides_is_no_disagreement() -> None:
    model = Apply(last_bit_decides, a=nn.Linear(1, 1, bias=False), b=nn.Linear(1, 1, bias=False))
    weights = [torch.ones(1, 1), torch.ones(1, 1)]
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight
    engine, x = Engine(model, lambda m, x: m(x)[:, 0]), torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    assert "disagree" in self_check.disagreement(engine, x[:2])
    assert self_check.problem(engine, x) is None  # no pair says anything, so the loop is taken and the next lot asked
    assert engine.uses(x) is None
    x[1, 1] = x[6, 1] = 1.0
    assert self_check.problem(engine, x) == ""  # the first pair says nothing, the second is clear
    assert engine.uses(x) is not None
    assert all(p.data_ptr() == w.data_ptr() for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.rule(4)
def test_a_mixing_model_is_no_tie() -> None:
    model = Apply(lambda m, x: m.a(x - 0.5 * x.mean(0)), a=nn.Linear(6, 4))
    with pytest.warns(UserWarning, match=LOOP_WARNING):
        clipped_sum(model, probe, vectors().float(), 0.3)


@pytest.mark.rule(4)
@pytest.mark.parametrize("part", ["norms", "sum"])
def test_the_self_check_sees_a_wrong_rule(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Product):
        def squared_norms(self) -> Tensor:
            return super().squared_norms() * (0.9 if part == "norms" else 1)

        def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
            super().add_weighted(out, weights * (1.1 if part == "sum" else 1), accumulate)

    monkeypatch.setattr(rules, "Product", Wrong)
    model, x = mlp(), vectors()
    with pytest.warns(UserWarning, match="for 0.weight the layer rules and the one-example loop disagree"):
        found = clipped_sum(model, probe, x, 0.3)
    assert_close(found, clipped(gradients_by_hand(model, probe, x), 0.3).sum(0), 0.3)


@pytest.mark.rule(4)
def test_a_lot_that_says_nothing_at_all_goes_through_the_loop_and_the_next_is_asked() -> None:
    model, x = mlp(), vectors(6)
    engine = Engine(model, probe)
    silent = gradients_of(engine, (x, torch.zeros(6).double())).clipped_sum(1.0).value
    assert torch.equal(silent, torch.zeros_like(silent))
    assert not engine._checked
    gradients_of(engine, (x, torch.ones(6).double())).clipped_sum(1.0)
    assert engine._checked
    assert not engine._loop


@pytest.mark.rule(4)
def test_a_mask_that_looks_like_a_batch_is_still_shared() -> None:
    """A [T, T] argument of a module without a rule, on a lot of exactly T examples."""
    model, x = build(FAST, "own-layer-with-mask", 7, torch.float64)
    engine = checked_engine(model, probe, x)
    for count in (4, 3, 7):
        truth = gradients_by_hand(model, probe, x[:count])
        assert_close(gradients_of(engine, x[:count]).clipped_sum(0.5).value, clipped(truth, 0.5).sum(0), 0.5)
    assert not engine._loop


@pytest.mark.rule(4)
def test_a_penalty_on_a_weight_belongs_to_every_example() -> None:
    model, x = mlp(), vectors()

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return probe(m, x) + m[0].weight.square().sum()

    truth = gradients_by_hand(model, loss_fn, x)
    clip_norm = clip_norm_for(truth)
    assert_close(clipped_sum(model, loss_fn, x, clip_norm), clipped(truth, clip_norm).sum(0), clip_norm)


@pytest.mark.rule(4)
def test_what_cannot_be_vectorised_goes_one_by_one_within_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from fodp.clipping import fallback

    called = []
    original = fallback._one_by_one
    monkeypatch.setattr(fallback, "_vectorised", lambda *args: None)
    monkeypatch.setattr(fallback, "_one_by_one", lambda *args: called.append(1) or original(*args))
    model, x = build(FAST, "bilinear", COUNT, torch.float64)
    truth = gradients_by_hand(model, probe, x)
    assert_close(clipped_sum(model, probe, x, 0.5), clipped(truth, 0.5).sum(0), 0.5)
    assert called


def test_a_parameter_used_only_by_some_lots() -> None:
    model = Apply(lambda m, x: m.a(x) if x[:, 0].min() < 50 else x + x.detach().requires_grad_(), a=nn.Linear(6, 6))
    engine = checked_engine(model.double())
    far = gradients_of(engine, vectors() + 100)
    assert torch.equal(far.clipped_sum(1.0).value, torch.zeros(42).double())
    assert far.count(lambda n: (n < 1).float()).value == COUNT / 2


# --- dropout --------------------------------------------------------------------------------------


def gradients_with_masks_of(seed: int, model: nn.Module, x: Tensor) -> Tensor:
    """Per-example gradients under the dropout masks of a whole batch."""
    found = []
    for i in range(len(x)):
        torch.manual_seed(seed)
        parts = torch.autograd.grad(probe(model, x)[i], list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in parts]))
    return torch.stack(found)


@pytest.mark.rule(4)
def test_dropout_layers_keep_the_fast_path_and_its_masks() -> None:
    make = sequential(linear(6, 20), nn.Dropout, nn.Tanh, linear(20, 9), nn.Dropout, linear(9, 4))
    torch.manual_seed(0)
    model, x = make().double(), vectors(6)
    truth = gradients_with_masks_of(7, model, x)
    clip_norm = clip_norm_for(truth)
    engine = Engine(model, probe)
    for _ in range(2):  # with and without the self-check, which must not draw from the same stream
        torch.manual_seed(7)
        found = gradients_of(engine, x).clipped_sum(clip_norm).value
        assert_close(found, clipped(truth, clip_norm).sum(0), clip_norm)
    assert not engine._loop
    assert all(module.training for module in model.modules())


RANDOM_INSIDE: dict[str, Callable[[], nn.Module]] = {
    "attention": structure(lambda m, x: m.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(6, 2, dropout=0.5)),
    "lstm": structure(lambda m, x: m.a(x)[0], a=lambda: nn.LSTM(6, 4, num_layers=2, dropout=0.5, batch_first=True)),
    "own layer around dropout": structure(
        lambda m, x: m.d(m.a(x)) * m.s,
        a=linear(),
        d=nn.Dropout,
        s=lambda: nn.Parameter(torch.randn(6)),
    ),
    "own randomness": sequential(linear(), lambda: NoisyInside(6)),
    "functional dropout in a layer without a rule": structure(
        lambda m, x: F.dropout(m.a(x) * m.s, 0.5, m.training), a=linear(), s=lambda: nn.Parameter(torch.randn(6))
    ),
}


@pytest.mark.rule(18)
@pytest.mark.parametrize("name", RANDOM_INSIDE)
def test_randomness_inside_is_drawn_once_and_by_record(name: str) -> None:
    """The recorded pass is the only one, so nothing has to be repeated; the loop draws the same for each record."""
    torch.manual_seed(0)
    model, x = RANDOM_INSIDE[name]().double(), torch.randn(6, 4, 6).double()
    if name == "attention":
        model.a.batch_first = True
    fast, slow = Clipper(model, probe, seed=1), Clipper(model, probe, seed=1, engine="loop")
    for _ in range(3):
        assert_close(fast.clipped_sum(x, 0.1), slow.clipped_sum(x, 0.1), 0.1)
    assert fast.path == "functions"


@pytest.mark.rule(18)
def test_a_layer_that_starts_to_draw_randomness_later_is_followed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), NoisyInside(6)).double().eval()
    fast, slow = Clipper(model, probe, seed=1), Clipper(model, probe, seed=1, engine="loop")
    for training in (False, False, True):
        model.train(training)
        assert_close(fast.clipped_sum(vectors(), 0.1), slow.clipped_sum(vectors(), 0.1), 0.1)
    assert fast.path == "functions"


@pytest.mark.rule(16)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_batch_norm_put_back_into_training_mode_is_refused_later_too(engine: str) -> None:
    """Trainers call model.train(), which wakes a frozen BatchNorm after the first check."""
    model, x = build(FAST, "frozen-batch-norm", COUNT, torch.float32)
    own = Engine(model, probe, engine)
    gradients_of(own, x).clipped_sum(1.0)
    model.train()
    mean = model[1].running_mean.clone()
    with pytest.raises(PrivacyError, match="BatchNorm1d in training mode mixes"):
        gradients_of(own, x).clipped_sum(1.0)
    assert torch.equal(model[1].running_mean, mean)


# --- batches --------------------------------------------------------------------------------------


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda x, y: torch.cat([x, y], 1),
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "nested": lambda x, y: {"inputs": (x, [x]), "y": y},
}


def classification(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        x, y = batch[:, :6], batch[:, 6:]
    elif isinstance(batch, dict):
        x, y = batch["x"] if "x" in batch else batch["inputs"][0], batch["y"]
    else:
        x, y = batch
    return F.cross_entropy(model(x), y[:, 0].long(), reduction="none")


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("kind", BATCHES)
def test_kinds_of_batches(kind: str, microbatch: int | None) -> None:
    model, x = mlp(), vectors(7)
    y = torch.randint(0, 3, (7, 1), generator=torch.Generator().manual_seed(0)).double()
    truth = clipped(gradients_by_hand(model, classification, (x, y)), 0.5).sum(0)
    found = clipped_sum(model, classification, BATCHES[kind](x, y), 0.5, microbatch=microbatch)
    assert_close(found, truth, 0.5)


@pytest.mark.parametrize(
    "batch",
    [
        (vectors(3), vectors(4)),
        (),
        torch.tensor(1.0),
        (vectors(3), torch.tensor(1.0)),
        "words",
        (vectors(3), ["a", "b", "c"]),
        None,
    ],
    ids=["lengths", "nothing", "number", "with a number", "text", "texts", "none"],
)
def test_what_is_not_a_batch_is_refused(batch: Any) -> None:
    with pytest.raises(PrivacyError, match="a batch"):
        clipped_sum(mlp(), probe, batch, 1.0)


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize(
    ("loss_fn", "advice"),
    [
        (lambda m, x: probe(m, x).mean(), "reduction='none'"),
        (lambda m, x: probe(m, x)[:, None], r"take \.mean\(1\)"),
        (lambda m, x: probe(m, x)[:-1], "reduction='none'"),
        (lambda m, x: torch.cat([probe(m, x)] * 2), "reduction='none'"),
        (lambda m, x: probe(m, x).sum().item(), "reduction='none'"),
        (lambda m, x: None, "return the losses"),
    ],
    ids=["scalar", "column", "too few", "too many", "number", "none"],
)
def test_a_loss_that_is_not_one_per_example_is_refused(loss_fn: Any, advice: str, engine: str) -> None:
    with pytest.raises(PrivacyError, match=f"one loss per example.*{advice}"):
        clipped_sum(mlp(), loss_fn, vectors(), 1.0, engine=engine)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_loss_without_gradient_is_refused(engine: str) -> None:
    with pytest.raises(PrivacyError, match="does not depend on any trainable parameter"):
        clipped_sum(mlp(), lambda m, x: probe(m, x).detach(), vectors(), 1.0, engine=engine)


@pytest.mark.rule(14)
@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), None, "1", True])
def test_a_clip_norm_that_bounds_nothing_is_refused(clip_norm: Any) -> None:
    with pytest.raises(PrivacyError, match="clip_norm"):
        clipped_sum(mlp(), probe, vectors(), clip_norm)


@pytest.mark.rule(14)
@pytest.mark.parametrize("field", ["microbatch", "copies"])
@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_nonsense_numbers_of_rows_are_refused(field: str, value: Any) -> None:
    with pytest.raises(PrivacyError, match=field):
        gradients_of(Engine(mlp(), probe), vectors(), **{field: value})


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(PrivacyError, match="auto or loop"):
        clipped_sum(mlp(), probe, vectors(), 1.0, engine="fast")


@pytest.mark.rule(2)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_an_empty_lot_is_a_zero_of_the_right_size(engine: str, microbatch: int | None) -> None:
    model = mlp(torch.float32)
    found = clipped_sum(model, probe, torch.empty(0, 6), 1.0, engine=engine, microbatch=microbatch)
    assert torch.equal(found, torch.zeros(sum(p.numel() for p in model.parameters())))
    gradients = gradients_of(Engine(model, probe, engine), (torch.empty(0, 6),), copies=2)
    assert gradients.count(lambda n: n).value == 0
    assert gradients.clipped_sum(2.0).bound == 2.0


@pytest.mark.rule(4)
def test_lots_of_one_example() -> None:
    model, x = mlp(), vectors(1)
    truth = clipped(gradients_by_hand(model, probe, x), 0.1).sum(0)
    assert_close(clipped_sum(model, probe, x, 0.1), truth, 0.1)
    engine = checked_engine(model)
    assert engine.uses(x) is not None
    assert_close(gradients_of(engine, x).clipped_sum(0.1).value, truth, 0.1)


# --- what is not finite ---------------------------------------------------------------------------

NONFINITE_LAYERS = [
    "linear", "linear-3d-ghost", "linear-3d-direct", "conv2d", "conv2d-ghost", "conv1d-groups", "embedding",
    "layer-norm-positions", "group-norm",
]  # fmt: skip
NONFINITE_STRUCTURES = ["tied-embedding-linear", "own-layer", "gru", "attention", "positional-table", "text-cnn"]
NONFINITE = [
    (name, where)
    for name in (*NONFINITE_LAYERS, *NONFINITE_STRUCTURES)
    for where in ("input", "loss")
    if where == "loss" or name not in ("embedding", "tied-embedding-linear", "text-cnn")  # tokens are finite
]
NAN, INF = float("nan"), float("inf")


@pytest.mark.rule(5)
@pytest.mark.parametrize(("name", "where"), NONFINITE)
def test_a_gradient_that_is_not_finite_contributes_exactly_zero(name: str, where: str) -> None:
    model, x = build(LAYERS if name in LAYERS else FAST, name, COUNT, torch.float64)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    others = torch.arange(COUNT) != 1
    expected = clipped(truth, clip_norm)[others].sum(0)
    engine, found = Engine(model, probe), []
    for poison in (NAN, INF, -INF):
        bad, weights = x.clone(), torch.ones(COUNT).double()
        (bad if where == "input" else weights)[1] = poison
        gradients = gradients_of(engine, (bad, weights))
        found.append(gradients.clipped_sum(clip_norm).value)
        assert_close(found[-1], expected, clip_norm)
        # Not in a count either.
        assert gradients.count(torch.ones_like).value == (COUNT - 1) / 2
    assert engine._checked
    assert not engine._loop
    assert torch.equal(found[0], found[1])  # bit for bit: what was masked does not matter
    assert torch.equal(found[0], found[2])


@pytest.mark.rule(5)
def test_infinite_loss_of_one_example_leaves_the_others_alone() -> None:
    model, x = mlp(), vectors()
    y = torch.tensor([0, 1, 2, 0, 1])

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        probabilities = m(batch[0]).softmax(1).gather(1, batch[1][:, None])[:, 0]
        return -torch.where(batch[1] == 2, probabilities * 0, probabilities).log()  # log 0: slope infinite

    truth = gradients_by_hand(model, loss_fn, (x, y))
    assert not truth[2].isfinite().all()
    assert_close(clipped_sum(model, loss_fn, (x, y), 0.2), clipped(truth, 0.2).sum(0), 0.2)


@pytest.mark.rule(5)
def test_no_finite_example_at_all() -> None:
    for engine in ("auto", "loop"):
        found = clipped_sum(mlp(), probe, vectors() * NAN, 1.0, engine=engine)
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.rule(5)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("size", [1e10, 1e25, 1e38])
def test_gradients_too_large_for_their_squares(engine: str, size: float) -> None:
    """float32 squares end at norms of 1.8e19: beyond, the example counts as not finite."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    x = vectors(COUNT, torch.float32)
    batch = (x, torch.tensor([1.0, size, 1.0, -size, 1.0]))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return m(b[0]).sum(1) * b[1]

    found = clipped_sum(model, loss_fn, batch, 0.5, engine=engine)
    truth = gradients_by_hand(model, loss_fn, batch)
    if size > 1e19:
        truth[[1, 3]] = 0
    assert_close(found, clipped(truth, 0.5).sum(0), 0.5)


def test_vanishing_gradients_stay_zero() -> None:
    model, x = mlp(), vectors()
    batch = (x, torch.tensor([1.0, 0, 1, 0, 1]).double())
    expected = clipped(gradients_by_hand(model, probe, batch), 0.3).sum(0)
    assert_close(clipped_sum(model, probe, batch, 0.3), expected, 0.3)


# --- queries --------------------------------------------------------------------------------------

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one": torch.ones_like,
    "negative": lambda n: -n,
    "huge": lambda n: torch.full_like(n, 1e30),
    "minus huge": lambda n: torch.full_like(n, -1e30),
    "normalising": lambda n: 1 / n,
    "nan": lambda n: n * NAN,
    "infinite": lambda n: n * INF,
    "a number": lambda n: torch.tensor(3.0),
    "true or false": lambda n: n > n.median(),
    "whole": lambda n: n.ceil().long(),
    "double": lambda n: n.double() + 5,
    "in place": lambda n: n.fill_(1e-6).reciprocal(),
}


@pytest.mark.rule(3)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_bound_of_a_weighted_sum_holds_whatever_the_weights_are(name: str, engine: str) -> None:
    model, x, bound = mlp(torch.float32), vectors(COUNT, torch.float32), 0.25
    x[2] = 0  # a small gradient
    own = Engine(model, probe, engine)
    everything = gradients_of(own, x).sum(bound=bound, weight=WEIGHTS[name])
    assert everything.bound == bound
    assert everything.value.isfinite().all()
    for i in range(COUNT):
        alone = gradients_of(own, x[i : i + 1]).sum(bound=bound, weight=WEIGHTS[name]).value
        assert alone.norm() <= bound * (1 + FLOAT_TOLERANCE)


@pytest.mark.rule(3)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e-23, 1e-15, 1e-8])
def test_weights_cannot_blow_up_gradients_too_small_for_their_squares(size: float, engine: str) -> None:
    """float32 squares of 1e-23 are zero: the norm looks smaller than it is."""
    model = nn.Linear(6, 4, bias=False)
    own = Engine(model, lambda m, b: m(b[0]).sum(1) * b[1], engine)
    own._checked = True
    batch = (torch.ones(2, 6), torch.full((2,), size))
    for weight in (lambda n: torch.full_like(n, 1e38), lambda n: 1 / n):
        found = gradients_of(own, batch).sum(bound=1.0, weight=weight).value
        assert found.norm() <= 2 * (1 + FLOAT_TOLERANCE)


@pytest.mark.rule(19)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_weight_that_raises_leaves_the_precision_as_it_was(engine: str) -> None:
    """At once, and not when somebody lets go of the traceback."""

    def raising(norms: Tensor) -> Tensor:
        raise KeyError("in the weight")

    asked = gradients_of(Engine(mlp(torch.float32), probe, engine), vectors(COUNT, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for question in (lambda: asked.sum(bound=1.0, weight=raising), lambda: asked.count(raising)):
            with pytest.raises(KeyError) as held:
                question()
            assert torch.is_autocast_enabled("cpu")
            del held


@pytest.mark.rule(3)
def test_a_weighted_sum_is_what_it_says() -> None:
    model, x = mlp(), vectors()
    truth = gradients_by_hand(model, probe, x)
    norms = truth.norm(dim=1)
    weights = (0.4 / (norms + 0.1)).clamp(max=0.3) * torch.where(norms > norms.median(), -1.0, 1.0)
    query = gradients_of(Engine(model, probe), x).sum(
        bound=10.0, weight=lambda n: (0.4 / (n + 0.1)).clamp(max=0.3) * torch.where(n > n.median(), -1.0, 1.0)
    )
    assert_close(query.value, weights @ truth, 1.0)


@pytest.mark.rule(3)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_counts_are_centred_and_bounded_by_one_half(engine: str) -> None:
    model, x = mlp(), vectors(7)
    norms = gradients_by_hand(model, probe, x).norm(dim=1)
    own = Engine(model, probe, engine)
    gradients = gradients_of(own, x)
    for share in (0.0, 0.3, 0.8, 1.0):
        threshold = float(norms.quantile(share)) * 1.0001
        query = gradients.count(lambda n, threshold=threshold: (n <= threshold).float())
        assert query.bound == 0.5
        assert query.value.shape == ()
        assert query.value == (norms <= threshold).sum() - 3.5
    for wild in (1e30, -1e30, NAN, INF):
        for i in range(7):
            alone = gradients_of(own, x[i : i + 1]).count(lambda n, wild=wild: n * wild)
            assert abs(alone.value) <= 0.5
    assert gradients.count(lambda n: n * NAN).value == 0


@pytest.mark.rule(3)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_sum_of_norms_is_cut_at_its_bound(engine: str) -> None:
    model, x = mlp(), vectors(7)
    norms = gradients_by_hand(model, probe, x).norm(dim=1)
    bound = float(norms.median())
    x[3] = NAN
    norms[3] = 0
    for microbatch in (None, 2):
        query = gradients_of(Engine(model, probe, engine), x, microbatch=microbatch).norm_sum(bound)
        assert query.bound == bound
        torch.testing.assert_close(query.value, norms.clamp(max=bound).sum())


def test_several_questions_of_one_lot_cost_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), vectors()
    engine, lot = checked_engine(model), object()
    calls: list[int] = []
    original = engine.recorded
    monkeypatch.setattr(engine, "recorded", lambda *args: calls.append(1) or original(*args))
    gradients = gradients_of(engine, x, lot=lot)
    first, second = gradients.clipped_sum(0.5), gradients.clipped_sum(0.2)
    count = gradients.count(lambda n: (n < 1).double())
    assert len(calls) == 1
    assert first.lot is second.lot is count.lot is lot
    truth = gradients_by_hand(model, probe, x)
    for query in (first, second):
        assert_close(query.value, clipped(truth, query.bound).sum(0), query.bound)


POINTED = ["mlp", "tied-embedding-linear", "convolution-called-twice", "text-cnn", "residual", "positional-table",
           "parameter-as-input", "gru", "norm-called-twice", "tied-convolutions-other-groups"]  # fmt: skip


@pytest.mark.rule(4)
@pytest.mark.parametrize("kind", ["shifted", "mixed", "extrapolated", "difference", "three"])
@pytest.mark.parametrize("name", POINTED)
def test_gradients_at_shifted_points_and_combinations_are_clipped_once(name: str, kind: str) -> None:
    model, x = build(FAST, name, COUNT, torch.float64)
    engine = checked_engine(model, probe, x)
    one, other = 0.3 * torch.randn(2, engine.layout.size, dtype=torch.float64)
    points = {
        "shifted": ((1.0, one),),
        "mixed": ((0.4, one), (0.6, None)),
        "extrapolated": ((1.7, one), (-0.7, None)),
        "difference": ((1.0, one), (-1.0, None)),
        "three": ((0.5, one), (0.25, None), (0.25, other)),
    }[kind]
    before = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    found = gradients_of(engine, x, points).clipped_sum(0.5).value
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert places == [p.data_ptr() for p in model.parameters()]
    truth = points_by_hand(model, probe, x, points)
    error = (found - clipped(truth, 0.5).sum(0)).norm() / 0.5
    assert error <= 1e-9
    looped = gradients_of(Engine(model, probe, "loop"), x, points).clipped_sum(0.5).value
    assert (looped - clipped(truth, 0.5).sum(0)).norm() / 0.5 <= 1e-9


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_parameters_come_back_from_a_shifted_point_after_an_error(engine: str) -> None:
    model, x = mlp(torch.float32), vectors(COUNT, torch.float32)
    before = [p.detach().clone() for p in model.parameters()]

    def loss_fn(m: nn.Module, batch: Tensor) -> Tensor:
        if not torch.equal(m[0].weight, before[0]):
            raise KeyError("shifted")
        return probe(m, batch)

    own = Engine(model, loss_fn, engine)
    points = ((0.5, None), (0.5, torch.full((own.layout.size,), 0.1)))
    with pytest.raises(KeyError, match="shifted"):
        gradients_of(own, x, points).clipped_sum(1.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(PrivacyError, match="flat vector"):
        gradients_of(own, x, ((1.0, torch.zeros(3)),)).clipped_sum(1.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.rule(4)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", ["mlp", "text-cnn", "frozen-first", "positional-table"])
def test_blocks_are_scaled_before_clipping(name: str, engine: str) -> None:
    model, x = build(FAST, name, COUNT, torch.float64)
    own = Engine(model, probe, engine)
    sizes = [p.numel() for p in own.layout.parameters]
    blocks = [0.5 + 1.3 * i for i in range(len(sizes))]
    each = torch.repeat_interleave(torch.tensor(blocks).double(), torch.tensor(sizes))
    truth = gradients_by_hand(model, probe, x) * each
    clip_norm = clip_norm_for(truth)
    query = gradients_of(own, x, factors=blocks).clipped_sum(clip_norm)
    assert query.bound == clip_norm
    assert (query.value - clipped(truth, clip_norm).sum(0)).norm() <= 1e-6 * clip_norm
    # Without factors all is as it was.
    plain = gradients_by_hand(model, probe, x)
    assert_close(gradients_of(own, x).clipped_sum(clip_norm).value, clipped(plain, clip_norm).sum(0), clip_norm)


@pytest.mark.parametrize("blocks", [(), (1.0,), (1, 1, 1, 1, 1, 0), (1, 1, 1, 1, 1, NAN), (1,) * 7])
def test_wrong_blocks_are_refused(blocks: tuple[float, ...]) -> None:
    with pytest.raises(PrivacyError, match="factor"):
        gradients_of(Engine(mlp(), probe), vectors(), factors=blocks).clipped_sum(1.0)


@pytest.mark.rule(4)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "residual", "text-cnn", "convolution-called-twice", "gru", "own-layer"])
def test_augmented_copies_are_averaged_before_clipping(name: str, copies: int, engine: str) -> None:
    model, x = build(FAST, name, 4 * copies, torch.float64)
    truth = gradients_by_hand(model, probe, x).unflatten(0, (4, copies)).mean(1)
    clip_norm = clip_norm_for(truth)
    own = Engine(model, probe, engine)
    for microbatch in (None, 1, 3):
        gradients = gradients_of(own, x, copies=copies, microbatch=microbatch)
        query = gradients.clipped_sum(clip_norm)
        assert_close(query.value, clipped(truth, clip_norm).sum(0), clip_norm)
        below = gradients.count(lambda n: (n < clip_norm).double()).value
        assert below == (truth.norm(dim=1) < clip_norm).sum() - 2


def test_copies_must_divide_the_rows() -> None:
    with pytest.raises(PrivacyError, match="the rows of the batch are not 2 copies of each example"):
        gradients_of(Engine(mlp(), probe), vectors(5), copies=2).clipped_sum(1.0)


@pytest.mark.rule(9)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", ["mlp", "text-cnn", "unused-parameter", "tied-embedding-linear"])
def test_micro_batches_change_nothing(name: str, engine: str, dtype: torch.dtype) -> None:
    model, x = build(FAST, name, 7, dtype)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth, 0.4)
    own = Engine(model, probe, engine)
    for microbatch in (None, 1, 2, 3, 7, 50):
        gradients = gradients_of(own, x, microbatch=microbatch)
        query = gradients.clipped_sum(clip_norm)
        assert query.bound == clip_norm
        assert_close(query.value, clipped(truth, clip_norm).sum(0), clip_norm)
        threshold = float(truth.norm(dim=1).quantile(0.6))
        below = gradients.count(lambda n, threshold=threshold: (n < threshold).to(n)).value
        assert below == (truth.norm(dim=1) < threshold).sum() - 3.5
        assert len(gradients.chunks._kept) == (engine == "auto" and microbatch in (None, 7, 50))  # bounded memory


@pytest.mark.rule(9)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("at_once", "passes"), [(0, [1] * 6), (1, [1] * 6), (4, [4, 2]), (6, [6]), (99, [6])])
def test_a_lot_that_would_record_too_much_goes_through_in_parts(monkeypatch, at_once, passes, copies) -> None:
    from fodp.clipping import engine as module

    model, x = mlp(), vectors(6 * copies)
    own, sizes = Engine(model, probe), []
    per_row = sum(layer.in_features + layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear))
    monkeypatch.setattr(module, "_RECORDED_AT_ONCE", at_once * copies * per_row)
    assert own.most_rows(x) == max(1, at_once * copies)
    original = own.recorded
    monkeypatch.setattr(
        own, "recorded", lambda batch, *more: sizes.append(len(batch) // copies) or original(batch, *more)
    )
    truth = gradients_by_hand(model, probe, x).unflatten(0, (6, copies)).mean(1)
    assert_close(gradients_of(own, x, copies=copies).clipped_sum(0.3).value, clipped(truth, 0.3).sum(0), 0.3)
    assert sizes == passes


@pytest.mark.rule(9)
@pytest.mark.parametrize("broken", [False, True], ids=["all finite", "one not finite"])
@pytest.mark.parametrize("kind", ["positions", "convolution"])
def test_positions_that_cancel_move_a_sum_no_further_than_was_measured(kind: str, broken: bool) -> None:
    """Huge terms that cancel exactly in the measured gradient must not come back by other roundings in the sum."""
    torch.manual_seed(0)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    if kind == "positions":
        model: nn.Module = nn.Linear(2, 1, bias=False)
        x = torch.randn(41, 4, 2)
    else:
        model = nn.Conv2d(1, 1, 2, bias=False)
        x = torch.randn(41, 1, 3, 3)

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        return (m(batch).flatten(1) * signs).sum(1)

    own = Engine(model, loss)
    own.most_rows(x)  # the self-check, on ordinary data
    x[39] = 1e9
    if broken:
        x[40] = torch.nan
    everyone, others = (gradients_of(own, x[rows]).clipped_sum(1.0).value for rows in (slice(None), [*range(39), 40]))
    assert (everyone - others).norm() <= 1 + 1e-5


@pytest.mark.rule(9)
@pytest.mark.parametrize("positions", [1, 2, 40])
def test_back_signals_too_small_for_their_squares_are_clipped_all_the_same(positions: int) -> None:
    model = nn.Linear(60, 50, bias=False)
    x = torch.zeros(4, positions, 60)
    x[:, :, 0] = 1e19

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[1] * m(batch[0]).flatten(1).sum(1)

    own = Engine(model, loss)
    own.most_rows((torch.randn(4, positions, 60), torch.ones(4)))  # the self-check, on ordinary data
    found = gradients_of(own, (x, torch.full((4,), 2e-23))).clipped_sum(1e-5).value
    assert found.norm() <= 4e-5 * (1 + 1e-5)


@pytest.mark.rule(9)
def test_the_loop_holds_few_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fodp.clipping import chunks as module

    model, x = mlp(), vectors(7)
    truth = clipped(gradients_by_hand(model, probe, x), 0.3).sum(0)
    held: list[int] = []
    original = module.UsesChunk.of_rows

    def spy(layout, rows, *rest):
        return held.append(len(rows)) or original(layout, rows, *rest)

    monkeypatch.setattr(module.UsesChunk, "of_rows", staticmethod(spy))
    for entries, expected in ((1, [1] * 7), (3 * len(truth), [3, 3, 1]), (1 << 23, [7])):
        held.clear()
        monkeypatch.setattr(module, "HELD_ENTRIES", entries)
        assert_close(clipped_sum(model, probe, x, 0.3, engine="loop"), truth, 0.3)
        assert held == expected


# --- random architectures -------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([k for k in range(1, number + 1) if number % k == 0])


@st.composite
def group_norm(draw: st.DrawFn, shape: tuple[int, ...]) -> nn.Module:
    groups = draw(divisors(shape[0]))
    assume(math.prod(shape) > groups)  # PyTorch refuses to normalise single numbers
    return nn.GroupNorm(groups, shape[0])


@st.composite
def vector_layer(draw: st.DrawFn, shape: tuple[int, ...]) -> nn.Module:
    """A layer for inputs [..., width]: vectors and sequences."""
    width = shape[-1]
    kinds = ["linear", "layer norm", "tanh", "residual", "scale", "linear and relu", "twice", "prelu"]
    kind = draw(st.sampled_from(kinds + ["group norm", "conv1d", "conv1d"] * (len(shape) == 2)))
    bias = draw(st.booleans())
    if kind == "linear":
        return nn.Linear(width, draw(st.integers(1, 9)), bias=bias)
    if kind == "layer norm":
        return nn.LayerNorm(shape[draw(st.integers(0, len(shape) - 1)) :], bias=bias)
    if kind == "residual":
        return Residual(nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()))
    if kind == "twice":
        same = nn.Linear(width, width, bias=bias)
        return nn.Sequential(same, nn.Tanh(), same)
    if kind == "group norm":
        return draw(group_norm(shape))
    if kind == "conv1d":
        return draw(convolution(shape, nn.Conv1d))
    if kind == "linear and relu":
        return nn.Sequential(nn.Linear(width, width + 1), nn.ReLU(inplace=bias))
    return {"tanh": nn.Tanh, "scale": lambda: Scale(width), "prelu": nn.PReLU}[kind]()


@st.composite
def convolution(draw: st.DrawFn, shape: tuple[int, ...], kind: type[nn.Module]) -> nn.Module:
    groups = draw(divisors(shape[0]))
    kernel = tuple(draw(st.integers(1, min(3, size))) for size in shape[1:])
    spaced = draw(st.booleans())
    dilation = tuple(1 if k == 1 or (k - 1) * 2 >= size else 2 for k, size in zip(kernel, shape[1:], strict=True))
    padding = draw(st.one_of(st.just("same"), st.just("valid"), st.integers(0, min(1, min(shape[1:]) - 1))))
    return kind(
        shape[0],
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=1 if padding == "same" else draw(st.integers(1, 3)),
        padding=padding,
        dilation=dilation if spaced else 1,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode="zeros" if padding == "same" else draw(st.sampled_from(["zeros", "circular", "replicate"])),
    )


@st.composite
def image_layer(draw: st.DrawFn, shape: tuple[int, ...]) -> nn.Module:
    kind = draw(st.sampled_from(["conv", "conv", "conv", "group norm", "layer norm", "tanh", "flatten"]))
    if kind == "conv":
        return draw(convolution(shape, nn.Conv2d))
    if kind == "group norm":
        return draw(group_norm(shape))
    if kind == "layer norm":
        return nn.LayerNorm(shape[draw(st.integers(0, 2)) :])
    return nn.Flatten() if kind == "flatten" else nn.Tanh()


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A stack of one to five layers, some of its parameters frozen, and a batch of two to six examples."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    count, start = draw(st.integers(2, 6)), draw(st.sampled_from(["vector", "sequence", "image", "tokens"]))
    layers: list[nn.Module] = []
    if start == "tokens":
        length = draw(st.integers(1, 5))
        x = torch.randint(0, 4, (count, length))
        layers.append(nn.Embedding(4, draw(st.integers(1, 5)), padding_idx=draw(st.sampled_from([None, 0]))))
    else:
        most = {"vector": 1, "sequence": 2, "image": 3}[start]
        x = torch.randn(count, *draw(st.lists(st.integers(1, 6), min_size=most, max_size=most)))
    for _ in range(draw(st.integers(1, 4))):
        with torch.no_grad():
            shape = tuple(nn.Sequential(*layers)(x).shape[1:])
        layers.append(draw(image_layer(shape) if len(shape) == 3 else vector_layer(shape)))
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
    assume(any(p.requires_grad for p in model.parameters()))
    with torch.no_grad():
        assume(model(x).numel() > 0)
    return model, x


def depends_on_parameters(model: nn.Module, x: Tensor) -> bool:
    return probe(model, x).requires_grad


@pytest.mark.rule(4)
@settings(max_examples=60)
@given(network=networks(), share=st.floats(0, 1))
def test_random_networks_equal_gradients_by_hand(network: tuple[nn.Module, Tensor], share: float) -> None:
    model, x = network
    assume(depends_on_parameters(model, x))
    model, x = model.double(), x.double() if x.is_floating_point() else x
    truth = gradients_by_hand(model, probe, x)
    assume(truth.norm() > 1e-6)  # a norm over single numbers leaves nothing but rounding
    clip_norm = clip_norm_for(truth, share)
    found = clipped_sum(model, probe, x, clip_norm)
    assert (found - clipped(truth, clip_norm).sum(0)).norm() <= 1e-8 * clip_norm * len(x)


@pytest.mark.rule(3)
@settings(max_examples=60)
@given(network=networks(), share=st.floats(0, 1), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_one_example_moves_the_sum_by_at_most_the_bound(
    network: tuple[nn.Module, Tensor], share: float, scale: float
) -> None:
    """Measured in float32 on neighbouring lots: with and without each example."""
    model, x = network
    assume(depends_on_parameters(model, x))
    clip_norm = clip_norm_for(gradients_by_hand(model, probe, x), share) * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which path was taken does not matter here
        engine = Engine(model, probe)
        whole = gradients_of(engine, x).clipped_sum(clip_norm).value.double()
        for i in range(len(x)):
            without = gradients_of(engine, rows(x, torch.arange(len(x)) != i)).clipped_sum(clip_norm).value.double()
            alone = gradients_of(engine, x[i : i + 1]).clipped_sum(clip_norm).value.double()
            assert alone.norm() <= clip_norm * (1 + FLOAT_TOLERANCE)
            assert (whole - without).norm() <= clip_norm * (1 + FLOAT_TOLERANCE)


@pytest.mark.rule(3)
@given(seed=st.integers(0, 1000), exponents=st.tuples(*[st.integers(-12, 12)] * 3))
@example(seed=0, exponents=(9, 9, -9))
def test_the_bound_holds_over_many_orders_of_magnitude(seed: int, exponents: tuple[int, int, int]) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(12, 3))
    x, weight = torch.randn(2, 3, 4) * 10.0 ** exponents[0], torch.full((2,), 10.0 ** exponents[1])
    clip_norm = 10.0 ** exponents[2]
    engine = Engine(model, lambda m, b: m(b[0]).sum(1) * b[1])
    engine._checked = True
    for i in range(2):
        alone = gradients_of(engine, (x[i : i + 1], weight[:1])).clipped_sum(clip_norm).value
        assert alone.double().norm() <= clip_norm * (1 + FLOAT_TOLERANCE)


# --- side effects and speed -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", ["mlp", "frozen-batch-norm", "gru", "attention", "bias-only", "own-layer"])
def test_asking_changes_nothing(name: str, engine: str, mode: bool) -> None:
    model, x = build(FAST, name, COUNT, torch.float32)
    if name != "frozen-batch-norm":
        model.train(mode)
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.grad = torch.full_like(parameter, i)
    kept = {id(p): p.grad for p in model.parameters()}
    before = (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p._version for p in model.parameters()],
    )
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random, inputs = torch.get_rng_state(), x.clone()
    gradients = gradients_of(Engine(model, probe, engine), x)
    results = [gradients.clipped_sum(1.0).value, gradients.count(torch.ones_like).value]
    assert all(r.grad_fn is None and not r.requires_grad for r in results)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(inputs, x)
    assert before == (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p._version for p in model.parameters()],
    )
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert all(p.grad is kept[id(p)] for p in model.parameters())
    assert all(bool((p.grad == i).all()) for i, p in enumerate(q for q in model.parameters() if q.requires_grad))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_the_self_check_leaves_buffers_as_they_were() -> None:
    """A forward function that counts: the engine's extra passes must not show."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen += 1
        return m.a(x)

    model = Apply(forward, a=nn.Linear(6, 3), seen=torch.zeros(1)).double()
    clipped_sum(model, probe, vectors(), 1.0)
    assert model.seen == 1


def test_the_self_check_draws_nothing_from_the_stream_of_the_model() -> None:
    model = Apply(lambda m, x: m.a(x) + 0 * torch.rand(1), a=nn.Linear(6, 3)).double()
    expected = torch.get_rng_state()
    clipped_sum(model, probe, vectors(), 1.0)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("lot", [1, 2])
def test_hooks_and_modes_come_back_after_an_error(lot: int) -> None:
    model = sequential(linear(), nn.Dropout, linear())().double()
    calls: list[int] = []

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        losses = probe(m, x)
        calls.append(1)
        if len(calls) >= (1 if lot == 1 else 6):
            raise KeyError("in the loss")
        return losses

    engine, random = Engine(model, loss_fn), torch.get_rng_state()

    def lots() -> None:
        for _ in range(3):
            gradients_of(engine, vectors()).clipped_sum(1.0)

    with pytest.raises(KeyError, match="in the loss"):
        lots()
    assert not any(m._forward_hooks for m in model.modules())
    assert all(m.training for m in model.modules())
    if lot == 1:
        assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_works_inside_no_grad(engine: str) -> None:
    model, x = mlp(), vectors()
    expected = clipped_sum(model, probe, x, 0.5)
    with torch.no_grad():
        assert_close(clipped_sum(model, probe, x, 0.5, engine=engine), expected, 0.5)


class Operations(TorchDispatchMode):
    """Counts what really reaches the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        if func is torch.ops.aten.convolution_backward.default:
            self.masks.append(list(args[-1]))
        return func(*args, **(kwargs or {}))

    def products(self) -> dict[str, int]:
        kinds = ("mm.", "addmm", "bmm", "baddbmm")
        return {name: n for name, n in self.counts.items() if name.split("aten.")[-1].startswith(kinds)}


@pytest.mark.rule(9)
def test_the_backward_pass_skips_ordinary_weight_gradients() -> None:
    """Three products forward, two back-signals (the first layer needs none), three re-weighted sums."""
    model, x = mlp(torch.float32), vectors(COUNT, torch.float32)
    engine = checked_engine(model, probe, x)
    with Operations() as seen:
        gradients_of(engine, x).clipped_sum(0.5)
    assert seen.products() == {"aten.addmm.default": 3, "aten.mm.default": 2, "aten.mm.out": 3}
    with Operations() as ordinary:
        probe(model, x).sum().backward()
    assert sum(ordinary.products().values()) == 8  # what is compared with has the same number


@pytest.mark.rule(9)
def test_the_backward_pass_of_convolutions_asks_for_inputs_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 2))
    x = torch.randn(COUNT, 2, 8, 8)
    engine = checked_engine(model, probe, x)
    with Operations() as seen:
        engine.uses(x)
    assert seen.masks == [[True, False, False]] * 2


def test_a_frozen_start_is_not_differentiated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    x = vectors(COUNT, torch.float32)
    engine = checked_engine(model, probe, x)
    with Operations() as seen:
        engine.uses(x)
    assert seen.products() == {"aten.addmm.default": 3, "aten.mm.default": 1}


def test_the_result_is_laid_out_like_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2, bias=False)).double()
    model[0].bias.requires_grad_(False)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    found = clipped_sum(model, lambda m, b: m(b).sum(1), x, 1e6)
    outer, hidden = model[1].weight.sum(), model[0](x).item()
    expected = torch.cat([outer.detach() * x[0], torch.tensor([hidden, hidden]).double()])
    torch.testing.assert_close(found, expected)
