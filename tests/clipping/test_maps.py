"""Mapped gradients: every layer kind, fast, against maps of gradients that were computed one by one."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fodp.clipping import Engine
from fodp.clipping.batches import Keyed
from fodp.clipping.maps import RANK, WHOLE, Kronecker, Side, factors_of, share, whitening
from fodp.draws import Source
from fodp.gradients import ByLayer, Normalised
from fodp.noise import Streams
from gradients_for_tests import gradients_of
from models_for_tests import FAST, LAYERS, build, clip_norm_for, clipped, gradients_by_hand, probe, size_of, trainable

ROWS = 5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-5}
KINDS = ("both", "left", "right", "diagonal", "numbers")


def side(size: int, kind: str, seed: int) -> Side:
    generator = torch.Generator().manual_seed(seed)
    if kind == "diagonal":
        return Side(torch.rand(size, generator=generator, dtype=torch.float64) + 0.2)
    return whitening(torch.randn(2 * size + 3, size, generator=generator, dtype=torch.float64) ** 3, 0.1)


def maps_of(model: nn.Module, kind: str) -> list[Any]:
    """A map for every parameter, whether or not it has a cheap form."""
    found: list[Any] = []
    for seed, parameter in enumerate(trainable(model)):
        if parameter.dim() == 0 or kind == "numbers":  # as fan-in has them, or people of their own
            found.append(0.7 + 0.2 * (seed % 3))
            continue
        left = None if kind == "right" else side(parameter.shape[0], kind, seed)
        right = (
            None if kind in ("left", "diagonal") or parameter.dim() == 1 else side(parameter.shape[1], kind, seed + 9)
        )
        found.append(Kronecker(tuple(parameter.shape), left, right, 0.8))
    return found


def as_matrix(factor: Any, parameter: Tensor) -> Tensor:
    """The map as one matrix on the flat parameter, by hand."""
    ones = torch.eye(parameter.numel(), dtype=torch.float64)
    if isinstance(factor, float):
        return factor * ones

    def dense(part: Side | None, size: int) -> Tensor:
        if part is None:
            return torch.eye(size, dtype=torch.float64)
        matrix = torch.diag(part.diagonal.double().expand(size))
        return matrix if part.basis is None else matrix + part.basis @ torch.diag(part.gains) @ part.basis.t()

    sizes = [parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1]
    rest = parameter.numel() // (sizes[0] * sizes[1])
    matrix = torch.kron(dense(factor.left, sizes[0]), dense(factor.right, sizes[1]))
    return factor.factor * torch.kron(matrix, torch.eye(rest, dtype=torch.float64))


def by_hand(model: nn.Module, x: Any, maps: list[Any]) -> tuple[Tensor, Tensor]:
    """Mapped gradients, one row for each example, and the matrix that maps."""
    matrix = torch.block_diag(*(as_matrix(f, p) for f, p in zip(maps, trainable(model), strict=True)))
    return gradients_by_hand(model, probe, x) @ matrix, matrix


def compare(table: Any, name: str, kind: str, dtype: torch.dtype, **options: Any) -> Engine:
    model, x = build(table, name, ROWS, dtype)
    maps = maps_of(model, kind)
    truth, matrix = by_hand(model, x, maps)
    clip_norm = clip_norm_for(truth)
    engine = Engine(model, probe, options.pop("engine", "auto"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Using padding='same'")
        query = gradients_of(engine, x, factors=maps, **options).clipped_sum(clip_norm)
    expected = clipped(truth, clip_norm).sum(0)
    assert query.bound == clip_norm
    assert (query.value.double() - expected).norm() <= TOLERANCES[dtype] * clip_norm
    release = query.map_back_(query.value.clone())
    assert (release.double() - expected @ matrix).norm() <= 10 * TOLERANCES[dtype] * clip_norm * matrix.norm()
    return engine


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_mapped_is_the_map_of_its_gradients(name: str) -> None:
    for kind in KINDS:
        assert compare(LAYERS, name, kind, torch.float64).path != "loop"
    compare(LAYERS, name, "both", torch.float32)
    compare(LAYERS, name, "both", torch.float32, exact=True)


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", FAST)
def test_every_fast_model_mapped_is_the_map_of_its_gradients(name: str) -> None:
    assert compare(FAST, name, "both", torch.float64).path != "loop"


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_brought_to_the_clip_norm_after_the_map(name: str) -> None:
    model, x = build(LAYERS, name, ROWS, torch.float64)
    maps = maps_of(model, "both")
    truth, _ = by_hand(model, x, maps)
    norms = truth.norm(dim=1, keepdim=True)
    found = gradients_of(Engine(model, probe), x, factors=maps, rule=Normalised(0.3)).clipped_sum(2.0)
    assert found.bound == 2.0
    assert (found.value - (2.0 * truth / (norms + 0.3)).sum(0)).norm() <= 1e-11


@pytest.mark.rule(9)
@pytest.mark.parametrize("name", ["linear", "linear-3d-ghost", "conv2d", "conv2d-groups", "embedding", "layer-norm"])
@pytest.mark.parametrize("options", [dict(microbatch=2), dict(engine="loop")], ids=str)
def test_parts_and_the_loop_change_nothing(name: str, options: dict[str, Any]) -> None:
    for kind in KINDS:
        compare(LAYERS, name, kind, torch.float64, **options)


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", ["linear", "linear-3d-ghost", "linear-3d-direct", "conv2d", "embedding", "group-norm"])
def test_copies_and_owners_are_mapped_as_wholes(name: str) -> None:
    sizes = [1, 3, 2]
    model, x = build(LAYERS, name, sum(sizes), torch.float64)
    maps = maps_of(model, "both")
    truth, _ = by_hand(model, x, maps)
    owners = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    owned = Keyed(x, torch.arange(sum(sizes)), Source(Streams.seeded(0), 0, "test"), owners, False)
    of_owners = torch.stack([part.mean(0) for part in truth.split(sizes)])
    of_copies = truth.unflatten(0, (-1, 2)).mean(1)
    for batch, copies, whole in ((owned, 1, of_owners), (x, 2, of_copies)):
        clip_norm = clip_norm_for(whole)
        found = gradients_of(Engine(model, probe), batch, copies=copies, factors=maps).clipped_sum(clip_norm).value
        assert (found - clipped(whole, clip_norm).sum(0)).norm() <= 1e-12 * clip_norm


@pytest.mark.rule(3)
def test_layers_are_clipped_to_their_shares_after_the_map() -> None:
    model, x = build(LAYERS, "linear", ROWS, torch.float64)
    maps = maps_of(model, "both")
    truth, _ = by_hand(model, x, maps)
    shares = ((((0,)), 0.6), (((1,)), 0.8))
    found = gradients_of(Engine(model, probe), x, factors=maps, rule=ByLayer(shares)).clipped_sum(0.3).value
    parts = zip(truth.split([20, 4], 1), shares, strict=True)
    assert torch.allclose(found, torch.cat([clipped(part, 0.3 * s).sum(0) for part, (_, s) in parts]), atol=1e-13)


@pytest.mark.rule(5)
def test_an_example_that_is_not_finite_counts_as_zero() -> None:
    model, x = build(LAYERS, "linear", ROWS, torch.float32)
    maps = maps_of(model, "both")
    x[2, 1] = float("inf")
    rest = torch.arange(size_of(x)) != 2
    found, others = (
        gradients_of(Engine(model, probe), part, factors=maps).clipped_sum(0.1).value for part in (x, x[rest])
    )
    assert torch.allclose(found, others, atol=1e-6)
    assert found.norm() > 0


def test_whitening_is_the_damped_inverse_root_with_mean_square_one() -> None:
    rows = torch.randn(300, 6, dtype=torch.float64) * torch.tensor([5.0, 2, 1, 0.5, 0.1, 0.0])
    moment = rows.t() @ rows
    relative = moment / moment.trace() * 6 + 0.3 * torch.eye(6)
    values, vectors = torch.linalg.eigh(relative)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.t()
    expected = root * (6 / root.square().sum()).sqrt()
    found = whitening(rows, 0.3)
    assert torch.allclose(found.along(torch.eye(6, dtype=torch.float64), 0), expected, atol=1e-9)
    assert found.mean_square(6) == pytest.approx(1)


def test_whitening_of_many_dimensions_tells_the_largest_apart() -> None:
    size = WHOLE + 40
    rows = torch.randn(60, size, dtype=torch.float64)
    rows[:, 0] *= 100
    found = whitening(rows, 0.1)
    assert found.basis is not None
    assert found.basis.shape == (size, RANK)
    assert found.mean_square(size) == pytest.approx(1)
    one = found.along(torch.eye(size, dtype=torch.float64), 0)
    assert one[0, 0] < 0.1 * one[1:, 1:].diagonal().min()
    assert share(Kronecker((2, size), None, found, 0.5)) == pytest.approx(0.25)


def test_nothing_to_whiten_by_leaves_everything_as_it_is() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(whitening(torch.zeros(9, 4), 0.1).along(x, 1), x)


def test_a_use_without_two_factors_has_none() -> None:
    model, x = build(LAYERS, "conv2d-groups", ROWS, torch.float32)
    uses = Engine(model, probe).recorded(x)
    weight, bias = trainable(model)
    assert factors_of(uses[0], weight.shape) is None
    assert factors_of(uses[1], bias.shape) is not None
