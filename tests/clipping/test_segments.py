"""Ragged groups of rows: every layer against the gradients of whole groups, by hand."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fodp.clipping import Engine
from fodp.clipping.batches import Keyed, examples_in, take_examples
from fodp.clipping.layers import uses
from fodp.clipping.layers.convolutions import Convolution
from fodp.clipping.layers.segments import Segments, by_owner, picked
from fodp.clipping.layers.uses import Dense, Product
from fodp.draws import Source
from fodp.noise import Streams
from gradients_for_tests import gradients_of
from models_for_tests import FAST, LAYERS, build, clip_norm_for, clipped, gradients_by_hand, probe

SIZES = [1, 3, 2, 1, 5]
OWNERS = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-5}


def owned(batch: Any, summed: bool = False) -> Keyed:
    return Keyed(batch, torch.arange(len(OWNERS)), Source(Streams.seeded(0), 0, "test"), OWNERS, summed)


def by_hand(model: nn.Module, x: Any, summed: bool) -> Tensor:
    """The gradient of each owner."""
    parts = gradients_by_hand(model, probe, x).split(SIZES)
    return torch.stack([rows.sum(0) if summed else rows.mean(0) for rows in parts])


def compare(model: nn.Module, x: Any, summed: bool, **options: Any) -> Engine:
    truth = by_hand(model, x, summed)
    clip_norm = clip_norm_for(truth)
    engine = Engine(model, probe, options.pop("engine", "auto"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Using padding='same'")
        found = gradients_of(engine, owned(x, summed), **options).clipped_sum(clip_norm).value
    error = (found.double() - clipped(truth, clip_norm).sum(0)).norm() / clip_norm
    assert error <= TOLERANCES[found.dtype]
    return engine


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_the_gradients_of_owners_by_hand(name: str) -> None:
    for number, dtype in enumerate(TOLERANCES):
        model, x = build(LAYERS, name, len(OWNERS), dtype)
        assert compare(model, x, summed=bool(number)).path != "loop"


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", FAST)
def test_every_fast_model_equals_the_gradients_of_owners_by_hand(name: str) -> None:
    model, x = build(FAST, name, len(OWNERS), torch.float64)
    assert compare(model, x, summed=False).path != "loop"


@pytest.mark.rule(9)
@pytest.mark.parametrize("name", ["linear", "linear-3d-ghost", "linear-3d-direct", "conv2d", "embedding", "layer-norm"])
@pytest.mark.parametrize("options", [dict(microbatch=1), dict(microbatch=4), dict(engine="loop")], ids=str)
def test_parts_and_the_loop_change_nothing(name: str, options: dict[str, Any]) -> None:
    model, x = build(LAYERS, name, len(OWNERS), torch.float64)
    compare(model, x, summed=True, **options)


@pytest.mark.rule(9)
def test_temporaries_in_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "CHUNK_ENTRIES", 64)
    monkeypatch.setattr(uses, "HELD_ENTRIES", 64)
    for name in ("conv2d", "conv2d-ghost", "linear-3d-direct", "linear-3d-ghost"):
        model, x = build(LAYERS, name, len(OWNERS), torch.float64)
        compare(model, x, summed=False)


def test_owners_of_about_as_many_rows_are_taken_together_and_padded_to_less_than_twice() -> None:
    sizes = torch.tensor([1, 9, 2, 3, 64, 4, 7, 1, 33, 8])
    seen = []
    for owners, rows, there in Segments(sizes, sizes).classes():
        assert there.sum(1).tolist() == sizes[owners].tolist()
        assert rows.shape[1] < 2 * sizes[owners].min()
        seen += owners.tolist()
        for owner, its, have in zip(owners.tolist(), rows, there, strict=True):
            first = int(sizes[:owner].sum())
            assert its[have].tolist() == list(range(first, first + int(sizes[owner])))
    assert sorted(seen) == list(range(len(sizes)))


def test_one_row_each_is_left_as_it_is() -> None:
    use, ones = Dense(torch.randn(4, 3)), torch.ones(4, dtype=torch.int64)
    assert by_owner(use, Segments(ones, ones)) is use


def test_convolutions_are_not_unfolded_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfolded patches of all layers at once would be many times what was recorded."""
    unfolded: list[int] = []
    original = Convolution.inputs
    monkeypatch.setattr(
        Convolution, "inputs", lambda self, start=0, stop=None: unfolded.append(1) or original(self, start, stop)
    )
    images, back = torch.randn(11, 3, 8, 8), torch.randn(11, 4, 6, 6)
    sizes = torch.tensor([1, 3, 2, 1, 4])
    use = by_owner(Convolution(images, back, 1, (3, 3), (1, 1), (1, 1)), Segments(sizes, sizes))
    assert not unfolded
    use.squared_norms()
    assert unfolded


def test_a_use_of_a_kind_that_is_not_known_is_held() -> None:
    class Other(Product):
        pass

    use = Other(torch.randn(3, 2), torch.randn(3, 4))
    rows = torch.tensor([2, 0])
    assert isinstance(picked(use, rows, torch.ones(2)), Dense)
    assert torch.equal(picked(use, rows, torch.ones(2)).dense(), use.dense()[rows])


@pytest.mark.rule(5)
def test_an_owner_with_a_row_that_is_not_finite_counts_as_zero() -> None:
    model, x = build(LAYERS, "linear-3d-ghost", len(OWNERS), torch.float64)
    x[4] = float("nan")  # of the third owner
    truth = by_hand(model, x, False)
    clip_norm = clip_norm_for(truth[[0, 1, 3, 4]])
    found = gradients_of(Engine(model, probe), owned(x)).clipped_sum(clip_norm).value
    assert torch.allclose(found, clipped(truth, clip_norm).sum(0), atol=1e-10)


def test_examples_are_taken_with_all_of_their_rows() -> None:
    batch = owned(torch.arange(len(OWNERS)))
    assert examples_in(batch) == len(SIZES)
    assert take_examples(batch, torch.tensor([2, 0])).rows.tolist() == [4, 5, 0]
