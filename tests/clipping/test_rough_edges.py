"""Odd calls, empty lots, lower precision, compiled models: the loop at worst, never the end."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.clipping import Engine
from gradients_for_tests import gradients_of
from models_for_tests import Apply, clipped, gradients_by_hand

ROWS = 6


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).double(), batch[1], reduction="none")


def labels() -> Tensor:
    return torch.arange(ROWS) % 2


def bag(**options: Any) -> nn.Module:
    """Ragged bags in one row of words, which begin at offsets; zeros are no words."""

    def run(model: Any, words: Tensor) -> Tensor:
        lengths = (words > 0).sum(1)
        inside = words[words > 0]
        weights = torch.ones(len(inside), dtype=model.bag.weight.dtype) if options.get("mode") == "sum" else None
        return model.head(model.bag(inside, lengths.cumsum(0) - lengths, per_sample_weights=weights))

    return Apply(run, bag=nn.EmbeddingBag(20, 4, **options), head=nn.Linear(4, 2))


def words() -> Tensor:
    return torch.randint(0, 20, (ROWS, 5), generator=torch.Generator().manual_seed(0))


def floats() -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def two_rows() -> nn.Module:
    """A layer that is called on two rows which are no examples."""
    return Apply(lambda m, x: m.head(x) @ m.mix(torch.ones(2, 3).to(x)), head=nn.Linear(4, 2), mix=nn.Linear(3, 2))


# model, inputs, which paths are fine
ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "bags at offsets": (bag, words, {"functions"}),
    "largest of bags at offsets": (lambda: bag(mode="max"), words, {"functions", "loop"}),
    "weighted bags at offsets": (lambda: bag(mode="sum"), words, {"functions", "loop"}),
    "two rows that are no examples": (two_rows, floats, {"functions"}),
    "two arguments": (lambda: Apply(lambda m, x: m.a(x, x.sin()), a=nn.Bilinear(4, 4, 2)), floats, {"functions"}),
}


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:per-example gradients run one")
def test_an_odd_call_means_the_loop_at_worst_and_not_the_end(name: str) -> None:
    make, inputs, paths = ODD[name]
    torch.manual_seed(0)
    model, batch = make().double(), (inputs(), labels())
    clipper = fodp.Clipper(model, losses)
    found = clipper.clipped_sum(batch, 0.5)
    assert clipper.path in paths
    torch.testing.assert_close(found, clipped(gradients_by_hand(model, losses, batch), 0.5).sum(0))


LOWER: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)),
    "functions": lambda: nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.PReLU(8), nn.Linear(8, 2)),
    "without a rule": ODD["two arguments"][0],
}


@pytest.mark.rule(19)
@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LOWER)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_lower_precision_is_fast_and_keeps_the_bound(name: str, how: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    model, inputs = LOWER[name](), floats().float()
    if how != "autocast":
        model, inputs = model.to(dtype), inputs.to(dtype)
    clipper, loop = (fodp.Clipper(model, losses, engine=engine, seed=0) for engine in ("auto", "loop"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        sums = [each.clipped_sum((inputs, labels()), 0.1) for each in (clipper, loop)]
        one = clipper.clipped_sum((inputs[:1], labels()[:1]), 0.1)
    assert clipper.path in ("layers", "functions")
    assert sums[0].dtype == torch.float32
    torch.testing.assert_close(sums[0], sums[1], rtol=0.05, atol=5e-3)
    assert one.double().norm() <= 0.1 * (1 + 1e-9)


@pytest.mark.rule(3)
def test_a_scaled_loss_is_clipped_as_it_is_given() -> None:
    """Loss scaling moves no bound: gradients are clipped after it."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2).half(), (floats().half(), labels())
    found = fodp.clipped_sum(model, lambda m, b: losses(m, b) * 2.0**10, batch, 0.1)
    truth = clipped(gradients_by_hand(model, lambda m, b: losses(m, b) * 2.0**10, batch), 0.1).sum(0)
    torch.testing.assert_close(found.double(), truth.double(), rtol=5e-3, atol=1e-3)


def refuses_nothing(model: nn.Module, batch: Any) -> Tensor:
    if len(batch[0]) == 0:
        raise RuntimeError("cannot reshape tensor of 0 elements")
    return losses(model, batch)


@pytest.mark.rule(2)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_an_empty_lot_is_not_shown_to_a_model_that_cannot_take_it(engine: str) -> None:
    model, batch = nn.Linear(4, 2).double(), (floats(), labels())
    clipper = fodp.Clipper(model, refuses_nothing, engine=engine)
    for rows in (0, ROWS, 0):
        found = clipper.clipped_sum(tuple(part[:rows] for part in batch), 0.5)
        assert found.norm() > 0 if rows else not found.any()


@pytest.mark.rule(2)
def test_an_empty_lot_does_not_crash_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="takes transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    clipper = fodp.Clipper(model, lambda m, b: F.cross_entropy(m(b[0]).logits, b[1], reduction="none"))
    assert not clipper.clipped_sum((words()[:0], labels()[:0]), 0.5).any()
    assert clipper.clipped_sum((words(), labels()), 0.5).norm() > 0


@pytest.mark.rule(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_the_layers_of_a_compiled_model_are_seen(backend: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), (floats(), labels())
    expected = clipped(gradients_by_hand(model, losses, batch), 0.5).sum(0)
    clipper = fodp.Clipper(torch.compile(model, backend=backend), losses)
    torch.testing.assert_close(clipper.clipped_sum(batch, 0.5), expected)
    assert clipper.path == "layers"


def test_sound_models_stay_on_the_fast_path_in_float32() -> None:
    """A second opinion is asked for in float64, of ties and roundings: it must not fail for its own reasons."""
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2),
        )  # fmt: skip
        images = (torch.rand(ROWS, 1, 8, 8) * 3).round() / 3  # many are equal
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fodp.clipped_sum(model, losses, (images, labels()), 0.5)


@pytest.mark.parametrize("text", [False, True])
def test_rows_without_a_gradient_do_not_end_a_loop_of_ones_own(text: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        if text:
            inputs: Tensor = torch.randint(1, 20, (60, 6))
            parts = [nn.Embedding(20, 8, padding_idx=0), nn.Flatten(), nn.ReLU(), nn.Linear(48, 2, bias=False)]
        else:
            inputs = torch.randn(60, 8)
            parts = [nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False)]
        inputs[torch.rand(60) < 0.9] = 0
        plan = fodp.Plan(
            sampling_rate=0.1, steps=3, lot_size=6, clip_norm=1.0, noise_multiplier=1.0, delta=1e-3, method="dp-sgd"
        )
        model = nn.Sequential(*parts)
        data = TensorDataset(inputs, torch.randint(0, 2, (60,)))
        model, optimizer, loader = fodp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan)
        for lot, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(lot), classes).backward()
            optimizer.step()


def test_spectral_norm_in_bfloat16_goes_back_in_closed_form() -> None:
    """Its sums are float32, and met weights in bfloat16."""
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)).eval().to(torch.bfloat16)
    batch, seen = torch.randn(4, 6).bfloat16(), []
    for method in ("auto", "loop"):
        engine = Engine(model, lambda m, b: m(b).float().square().sum(1), method)
        engine._checked = True  # no way out by the loop
        gradients_of(engine, batch).sum(bound=1.0, weight=lambda norms: seen.append(norms) or norms)
    torch.testing.assert_close(seen[0], seen[1], rtol=0.02, atol=0)
