"""Every layer rule against gradients computed one example at a time, by hand; norms and sums in floats."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fodp.clipping import FLOAT_TOLERANCE, Engine, clipped_sum
from fodp.clipping import chunks as parts_of_lots
from fodp.clipping.layers import combine, convolutions, uses
from fodp.clipping.layers.combine import merged, scaled
from fodp.clipping.layers.convolutions import Convolution
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.rules import RULES, convolution
from fodp.clipping.layers.uses import Dense, Outer, Product, square_sums
from gradients_for_tests import gradients_of
from models_for_tests import FAST, LAYERS, build, clip_norm_for, clipped, gradients_by_hand, probe

COUNT = 5
# Relative to the clip norm. float32 sums differ by their roundings, and by the allowance for them.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """A rule that quietly gave way to the loop would pass every comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Using padding='same'")
        yield


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """At most a few entries in flight; the list collects how many chunks were made each time."""
    made: list[int] = []
    cut = uses.chunks

    def counted(count: int, entries: int) -> list[tuple[int, int]]:
        chunks = cut(count, entries)
        made.append(len(chunks))
        return chunks

    monkeypatch.setattr(uses, "CHUNK_ENTRIES", 64)
    monkeypatch.setattr(uses, "HELD_ENTRIES", 64)
    monkeypatch.setattr(parts_of_lots, "HELD_ENTRIES", 64)
    monkeypatch.setattr(uses, "chunks", counted)
    return made


def fast_sum(model: nn.Module, batch: Any, clip_norm: float) -> Tensor:
    engine = Engine(model, probe)
    result = gradients_of(engine, batch).clipped_sum(clip_norm).value
    assert engine._checked
    assert not engine._loop
    return result


def assert_close(found: Tensor, expected: Tensor, clip_norm: float, allowed: float = 0.0) -> None:
    error = (found.double() - expected).norm() / clip_norm
    assert error <= max(allowed, TOLERANCES[found.dtype]), f"off by {error:.1e} clip norms"


@pytest.mark.rule(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_gradients_by_hand(name: str, dtype: torch.dtype) -> None:
    model, x = build(LAYERS, name, COUNT, dtype)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    # Float32 ghost norms are raised by what rounding may do, which clips this layer 2e-5 of C more; no other needs it.
    allowed = 3e-5 if name == "conv2d-groups-ghost" and dtype == torch.float32 else 0.0
    assert_close(fast_sum(model, x, clip_norm), clipped(truth, clip_norm).sum(0), clip_norm, allowed)


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", LAYERS)
def test_the_reference_loop_equals_gradients_by_hand(name: str) -> None:
    model, x = build(LAYERS, name, COUNT, torch.float64, seed=1)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    found = clipped_sum(model, probe, x, clip_norm, engine="loop")
    assert_close(found, clipped(truth, clip_norm).sum(0), clip_norm)


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", LAYERS)
def test_each_norm_is_right(name: str) -> None:
    """A wrong norm can hide in a sum where nothing is clipped; here every example is."""
    model, x = build(LAYERS, name, COUNT, torch.float64, seed=2)
    truth = gradients_by_hand(model, probe, x).norm(dim=1)
    norms: list[Tensor] = []
    gradients_of(Engine(model, probe), x).sum(bound=1.0, weight=lambda n: norms.append(n) or n)
    torch.testing.assert_close(torch.cat(norms), truth, rtol=1e-12, atol=1e-14)


@pytest.mark.rule(9)
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith(("layer-norm", "group-norm"))])
def test_temporaries_in_chunks_change_nothing(name: str, tiny_chunks: list[int]) -> None:
    model, x = build(LAYERS, name, COUNT, torch.float64, seed=3)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    assert_close(fast_sum(model, x, clip_norm), clipped(truth, clip_norm).sum(0), clip_norm)


@pytest.mark.rule(4)
@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("chunk", [64, 1 << 21])
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv")])
def test_convolutions_place_by_place_equal_gradients_by_hand(
    name: str, chunk: int, microbatch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are taken where there are many channels."""
    monkeypatch.setattr(convolutions, "_WORTH_A_PRODUCT", 1)
    monkeypatch.setattr(uses, "CHUNK_ENTRIES", chunk)
    model, x = build(LAYERS, name, COUNT, torch.float64, seed=5)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    found = gradients_of(Engine(model, probe), x, microbatch=microbatch).clipped_sum(clip_norm).value
    assert_close(found, clipped(truth, clip_norm).sum(0), clip_norm)


def test_many_channels_are_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Convolution, "inputs", lambda self, *some: asked.append(some))
    for channels, unfolds in ((16, False), (15, True)):
        model, x = nn.Conv2d(channels, 3, 3), torch.randn(COUNT, channels, 9, 9)
        use = convolution(model, x, torch.randn_like(model(x)))["weight"]
        try:
            use.squared_norms()
        except AttributeError:
            assert unfolds
        assert bool(asked) == unfolds


def test_chunks_were_really_made(tiny_chunks: list[int]) -> None:
    for name in ("linear-3d-direct", "linear-3d-ghost", "conv2d", "conv2d-ghost"):
        tiny_chunks.clear()
        model, x = build(LAYERS, name, COUNT, torch.float64)
        fast_sum(model, x, 1.0)
        assert max(tiny_chunks) == COUNT, name


def branches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way the norms of outer products went."""
    taken: list[str] = []
    for name in ("_ghost_norms", "_direct_norms"):
        original = getattr(Outer, name)

        def spy(self: Outer, entries: int, name: str = name, original: Any = original) -> Tensor:
            taken.append(name)
            return original(self, entries)

        monkeypatch.setattr(Outer, name, spy)
    return taken


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", None),
        ("linear-3d-one-position", None),
        ("conv2d-one-position-groups", None),
        ("linear-3d-direct", "_direct_norms"),
        ("linear-3d-ghost", "_ghost_norms"),
        ("conv2d", "_direct_norms"),
        ("conv2d-ghost", "_ghost_norms"),
        ("conv2d-groups-ghost", "_ghost_norms"),
        ("conv1d", "_direct_norms"),
        ("conv1d-ghost", "_ghost_norms"),
    ],
)
def test_norms_take_the_cheaper_branch(name: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = branches(monkeypatch)
    model, x = build(LAYERS, name, COUNT, torch.float64)
    fast_sum(model, x, 1.0)
    assert set(taken) == ({expected} if expected else set())


@pytest.mark.rule(4)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ghost_and_direct_norms_agree(groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, back = torch.randn(4, groups, 6, 9, dtype=dtype), torch.randn(4, groups, 6, 7, dtype=dtype)
    use = Outer(inputs, back)
    truth = torch.matmul(back.double().mT, inputs.double()).flatten(1).square().sum(1)
    for norms in (use._ghost_norms(1), use._direct_norms(1), Dense(use.dense()).squared_norms()):
        torch.testing.assert_close(norms.double(), truth, rtol=2e-5 if dtype == torch.float32 else 1e-13, atol=0)


def random_uses(count: int) -> dict[str, Any]:
    shape = (6, 4)
    return {
        "dense": Dense(torch.randn(count, *shape)),
        "product": Product(torch.randn(count, 4), torch.randn(count, 6)),
        "outer": Outer(torch.randn(count, 1, 3, shape[1]), torch.randn(count, 1, 3, shape[0])),
        "grouped outer": Outer(torch.randn(count, 2, 3, shape[1]), torch.randn(count, 2, 3, shape[0] // 2)),
        "rows": Rows(torch.randint(0, 6, (count, 3)), torch.randn(count, 3, shape[1]), 6),
    }


@pytest.mark.rule(4)
@pytest.mark.parametrize("second", random_uses(1))
@pytest.mark.parametrize("first", random_uses(1))
def test_merged_uses_add_their_gradients(first: str, second: str) -> None:
    """Tied weights: norms of the sum, not sums of norms, for every pair of kinds of use."""
    torch.manual_seed(0)
    one, other = random_uses(4)[first], random_uses(4)[second]
    gradients = one.dense().flatten(1) + other.dense().flatten(1)
    both = merged([one, other])
    torch.testing.assert_close(both.squared_norms().float(), gradients.square().sum(1), rtol=1e-5, atol=0)
    weights, out = torch.randn(4), torch.ones(6, 4)
    both.add_weighted(out, weights, accumulate=True)
    torch.testing.assert_close(out.flatten(), 1 + weights @ gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.rule(4)
def test_products_of_the_same_inputs_are_merged_into_one() -> None:
    """A first layer at two points: half the work. Equal inputs elsewhere in memory, or other strides, are others."""
    torch.manual_seed(0)
    inputs = torch.randn(6, 6)
    firsts = [Product(inputs, torch.randn(6, 6)) for _ in range(3)]
    third = Product(inputs.t(), torch.randn(6, 6))
    one = merged(firsts)
    assert isinstance(one, Product)
    torch.testing.assert_close(one.dense(), sum(use.dense() for use in firsts), rtol=1e-5, atol=1e-5)
    for several in ([*firsts, third], [third, firsts[0], Product(inputs.clone(), torch.randn(6, 6)), firsts[1]]):
        both = merged(several)
        torch.testing.assert_close(both.dense(), sum(use.dense() for use in several), rtol=1e-5, atol=1e-5)


@pytest.mark.rule(4)
@pytest.mark.parametrize("kind", random_uses(1))
def test_each_use_sums_masks_and_groups_like_its_dense_gradients(kind: str) -> None:
    torch.manual_seed(0)
    use = random_uses(6)[kind]
    dense, weights = use.dense().flatten(1), torch.randn(6)
    for accumulate in (False, True):
        out = torch.full((6, 4), 2.0)
        use.add_weighted(out, weights, accumulate)
        torch.testing.assert_close(out.flatten(), 2.0 * accumulate + weights @ dense, rtol=1e-5, atol=1e-5)
    keep = torch.tensor([True, False, True, True, False, True])
    assert torch.equal(use.masked(keep).dense().flatten(1)[~keep], torch.zeros(2, 24))
    torch.testing.assert_close(use.masked(keep).dense().flatten(1)[keep], dense[keep])
    torch.testing.assert_close(use.grouped(3).dense().flatten(1), dense.unflatten(0, (2, 3)).mean(1))
    torch.testing.assert_close(scaled(use, -0.7).dense().flatten(1), -0.7 * dense)


# --- floats ---------------------------------------------------------------------------------------


def paired(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose back-signal is the second half of the batch: both factors are in our hands."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def cancelling_positions(width: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two positions whose gradients nearly cancel: scale² each, 3 together."""
    torch.manual_seed(seed)
    a, b = (scale * v / v.norm() for v in (torch.randn(1, width), torch.randn(1, width)))
    return torch.stack([a, a], 1), torch.stack([b, b * (3 / scale**2 - 1)], 1)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "groups", "unfolds"),
    [
        ((3, 3), (1, 1), (1, 1), 1, False),
        ((3, 3), (1, 1), (1, 1), 2, False),
        ((2, 4), (1, 1), (2, 1), 1, False),
        ((1, 1), (1, 1), (1, 1), 1, False),
        ((3, 3), (1, 2), (1, 1), 2, False),
        ((3, 3), (3, 2), (1, 1), 1, True),
        ((1, 1), (2, 2), (1, 1), 1, True),
    ],
)
def test_products_of_patches_come_from_products_of_pixels(kernel, stride, dilation, groups, unfolds, monkeypatch):
    """Unfolding is left to strides that leave many pixels out, where it is the cheaper way."""
    images = torch.randn(5, 4, 8, 11, dtype=torch.float64)
    out = nn.functional.conv2d(images, torch.randn(6, 4 // groups, *kernel).double(), None, stride, 0, dilation, groups)
    use = Convolution(images, torch.randn_like(out), groups, kernel, stride, dilation)
    expected, _ = Outer.gram(use, 1, 4, torch.float64)
    asked = []
    inputs = Convolution.inputs
    monkeypatch.setattr(Convolution, "inputs", lambda self, *some: asked.append(some) or inputs(self, *some))
    torch.testing.assert_close(use.gram(1, 4, torch.float64)[0], expected)
    assert bool(asked) == unfolds


@pytest.mark.rule(5)
@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("width", [2, 16])
def test_cancelling_positions_cannot_hide_a_norm(width: int, hold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram sums lose a norm of 3 in terms of 1e8; clipping to 1 must hold all the same.

    Width 16 takes the ghost branch, width 2 the direct one, with and without holding the gradients.
    """
    if not hold:
        monkeypatch.setattr(uses, "HELD_ENTRIES", 1)
    model = nn.Linear(width, width, bias=False)
    engine = Engine(model, paired)
    engine._checked = True
    for seed in range(30):
        batch = cancelling_positions(width, 100.0, seed)
        size = gradients_of(engine, batch).clipped_sum(1.0).value.norm().item()
        assert 0.9 <= size <= 1 + FLOAT_TOLERANCE


@pytest.mark.rule(5)
def test_cancelling_tokens_cannot_hide_a_norm() -> None:
    model = nn.Embedding(3, 8)
    engine = Engine(model, lambda m, batch: (m(batch[0]) * batch[1]).sum((1, 2)))
    engine._checked = True
    for seed in range(30):
        torch.manual_seed(seed)
        big = 1e6 * torch.randn(1, 8)
        back = torch.stack([big, torch.randn(1, 8), -big], 1)
        size = gradients_of(engine, (torch.ones(1, 3, dtype=torch.long), back)).clipped_sum(0.5).value.norm()
        assert size <= 0.5 * (1 + FLOAT_TOLERANCE)


@pytest.mark.rule(5)
def test_a_difference_of_two_points_is_clipped_by_its_own_norm() -> None:
    """Close points nearly cancel: the difference is a thousandth of either gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    engine, x = Engine(model, probe), torch.randn(6, 12)
    points = ((1.0, 1e-4 * torch.randn(engine.layout.size)), (-1.0, None))
    truth = torch.stack(list(engine.example_gradients(x, points)))
    clip_norm = float(truth.norm(dim=1).min() / 2)
    together = gradients_of(engine, x, points).clipped_sum(clip_norm).value
    assert not engine._loop
    for i in range(6):
        alone = gradients_of(engine, x[i : i + 1], points).clipped_sum(clip_norm).value
        assert alone.norm() <= clip_norm * (1 + FLOAT_TOLERANCE)
        assert alone.norm() >= clip_norm * 0.98
    # Both ways subtract gradients a thousand times larger, each with its own rounding.
    assert (together - clipped(truth.double(), clip_norm).sum(0)).norm() <= 0.02 * clip_norm


@pytest.mark.rule(5)
@pytest.mark.parametrize("length", [1, 8191, 8192, 8193, 3 * 8192 + 5, 4_000_000])
def test_norms_of_long_vectors_are_within_the_stated_tolerance(length: int) -> None:
    torch.manual_seed(0)
    values = torch.rand(2, length) + 0.5
    truth = values.double().square().sum(1)
    assert ((square_sums(values).double() / truth).sqrt() - 1).abs().max() <= FLOAT_TOLERANCE / 2


@pytest.mark.rule(9)
@pytest.mark.parametrize("width", [0, 1, 7, 5003, 70_001])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_squares_neither_vanish_nor_overflow(width: int, scale: float) -> None:
    rows = scale * torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(square_sums(rows), rows.double().square().sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("index", [-1, 5, 2**62])
def test_an_index_beyond_the_table_is_refused(index: int) -> None:
    use = Rows(torch.tensor([[index]]), torch.ones(1, 1, 2), 5)
    with pytest.raises((IndexError, RuntimeError)):
        use.add_weighted(torch.zeros(5, 2), torch.ones(1), True)


@pytest.mark.rule(19)
@pytest.mark.parametrize("length", [8192, 50_000])
def test_many_squares_too_small_for_a_running_sum_are_counted(length: int) -> None:
    """One by one they are below half a unit of the first; together they are 3e-4 and more of the norm."""
    values = torch.full((2, length), 2.0**-12.01)
    values[:, 0] = 1
    truth = values.double().square().sum(1)
    assert ((Dense(values).squared_norms() / truth) - 1).abs().max() <= FLOAT_TOLERANCE


@pytest.mark.rule(19)
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_exact_sums_are_those_of_float64(name: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same float32 factors and weights: nothing but float64 rounding is left of the sum over examples."""
    if not held:
        monkeypatch.setattr(uses, "HELD_ENTRIES", 1)
    model, x = build(LAYERS, name, COUNT, torch.float32)
    engine = Engine(model, probe)
    engine._checked = True
    parts = [gradients_of(engine, x[i : i + 1], exact=True).clipped_sum(1.0) for i in range(COUNT)]
    whole = gradients_of(engine, x, exact=True).clipped_sum(1.0)
    assert whole.dtype == torch.float32  # of its release
    exact, added = (sum(f * t.double() for q in some for f, t in q._terms) for some in ([whole], parts))
    again = gradients_of(engine, x, exact=True).clipped_sum(1.0)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole._terms, again._terms, strict=True))
    rounded = gradients_of(engine, x).clipped_sum(1.0).value
    # Layers round, in their own pass, by the size of the lot; the sums themselves do not.
    assert (exact - added).norm() <= 2e-6
    assert (rounded - exact).norm() <= 1e-5


@pytest.mark.rule(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_float64(dtype: torch.dtype) -> None:
    """Squares of 300 overflow float16."""
    use = Dense(torch.full((2, 5), 300.0, dtype=dtype))
    torch.testing.assert_close(use.squared_norms(), torch.full((2,), 450000.0, dtype=torch.float64))
    outer = Outer(torch.full((2, 1, 1, 4), 300.0, dtype=dtype), torch.ones(2, 1, 1, 3, dtype=dtype))
    torch.testing.assert_close(outer.squared_norms(), torch.full((2,), 1080000.0, dtype=torch.float64))


@pytest.mark.rule(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear-3d-ghost", "conv2d", "embedding", "layer-norm-positions"])
def test_half_precision_models_give_float32_sums(name: str, dtype: torch.dtype) -> None:
    model, x = build(LAYERS, name, COUNT, dtype)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    found = fast_sum(model, x, clip_norm)
    assert found.dtype == torch.float32
    assert (found.double() - clipped(truth, clip_norm).sum(0)).norm() <= 0.02 * clip_norm


@pytest.mark.rule(9)
@pytest.mark.parametrize("name", ["mlp", "residual", "text-cnn", "convolution-called-twice", "own-layer"])
def test_autocast_in_the_loss_keeps_the_fast_path(name: str) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return probe(model, batch).float()

    model, x = build(FAST, name, COUNT, torch.float32)
    truth = gradients_by_hand(model, loss_fn, x)
    clip_norm = clip_norm_for(truth)
    engine = Engine(model, loss_fn)
    found = gradients_of(engine, x).clipped_sum(clip_norm).value
    assert not engine._loop
    assert (found - clipped(truth, clip_norm).sum(0)).norm() <= 0.02 * clip_norm


@pytest.mark.rule(4)
@pytest.mark.parametrize("double", [0, 1])
def test_a_model_of_two_float_types(double: int) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32 if double == 0 else torch.float64)

    torch.manual_seed(0)
    parts = [nn.Conv1d(2, 3, 2), nn.Linear(4, 4)]
    model = nn.Sequential(parts[0], Cast(), parts[1])
    parts[double].double()
    x = torch.randn(COUNT, 2, 5, dtype=torch.float64 if double == 0 else torch.float32)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    found = fast_sum(model, x, clip_norm)
    assert found.dtype == torch.float64
    assert (found - clipped(truth, clip_norm).sum(0)).norm() <= 2e-5 * clip_norm


def test_every_rule_has_layers_in_the_table() -> None:
    assert {type(make()) for make, _ in LAYERS.values()} == set(RULES)


@pytest.mark.rule(4)
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tied_table_by_cross_terms_is_what_it_is_when_held(dtype: torch.dtype, held: bool) -> None:
    torch.manual_seed(0)
    table = Rows(torch.randint(0, 9, (5, 7)), torch.randn(5, 7, 6, dtype=dtype), 9)
    outer = Outer(torch.randn(5, 1, 24, 6, dtype=dtype), torch.randn(5, 1, 24, 9, dtype=dtype))
    outer.back[0] = 0
    outer.back[0, 0, torch.arange(7), table.indices[0]] = -1
    outer._inputs[0, 0, :7] = table.back[0] * (1 - 1e-4)  # nearly cancels
    if not held:
        outer._direct_norms = outer._ghost_norms  # type: ignore[method-assign]
    tied = combine.Tied(table, outer)
    truth = tied.dense().double().flatten(1).norm(dim=1)
    norms = tied.squared_norms().sqrt()
    assert tied.slack is not None
    assert (norms + tied.slack >= truth * (1 - 1e-12)).all()
    torch.testing.assert_close(norms[1:], truth[1:], rtol=1e-5, atol=0)
    weights, found = torch.rand(5, dtype=dtype), torch.zeros(9, 6, dtype=dtype)
    tied.add_weighted(found, weights, False)
    torch.testing.assert_close(found, torch.einsum("i,ijk->jk", weights, tied.dense()))
    kept = torch.tensor([True, False, True, True, False])
    assert not tied.masked(kept).dense()[~kept].any()
    torch.testing.assert_close(combine.scaled(tied, 3.0).dense(), 3 * tied.dense())


def test_a_large_tied_table_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "HELD_ENTRIES", 1)
    model, x = build(FAST, "tied-embedding-linear", COUNT, torch.float64)
    engine = Engine(model, probe)
    found = engine.recorded(x)
    assert any(isinstance(use, combine.Tied) for use in found)
    truth = gradients_by_hand(model, probe, x)
    clip_norm = clip_norm_for(truth)
    assert_close(fast_sum(model, x, clip_norm), clipped(truth, clip_norm).sum(0), clip_norm)
