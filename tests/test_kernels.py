"""Compiled loops: they give what the reference gives, and whatever goes wrong with them, the reference is used."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fodp
from fodp import kernels
from fodp.clipping.tables import Rows
from fodp.models import cross_entropy
from fodp.noise import PAIRS, Streams
from fodp.recall import BLOCK, Recall, mix

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):
    """Call it to go on without the compiled library."""

    def without() -> None:
        monkeypatch.setattr(kernels, "library", lambda: None)

    return without


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FODP_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "library", kernels.library.__wrapped__)
    return tmp_path / "fodp"


def normals(count: int, std: float = 1.1) -> torch.Tensor:
    return Streams.seeded(3).normal_(torch.full((count,), torch.nan), std, 5, "noise")


@needs_compiler
@pytest.mark.rule(9)
@pytest.mark.parametrize("count", [1, 2, 3, 31, 33, 2047, 2049, 4095, 2 * PAIRS - 1, 2 * PAIRS, 2 * PAIRS + 1, 199_082])
def test_normals_are_those_of_the_reference(count, reference):
    assert kernels.library() is not None
    compiled = normals(count)
    reference()
    torch.testing.assert_close(compiled, normals(count), rtol=0, atol=5e-6)  # of values up to 5: float rounding


@needs_compiler
@pytest.mark.parametrize(
    ("length", "width", "words"), [(1, 3, 2), (7, 4, 3), (64, 16, 20_000), (9, 1, 1), (33, 17, 40), (0, 3, 2)]
)
def test_an_embedding_has_the_norms_and_sums_of_the_reference(length, width, words, reference):
    generator = torch.Generator().manual_seed(length)
    indices = torch.randint(words, (40, length), generator=generator)
    back, weights = torch.randn(40, length, width, generator=generator), torch.rand(40, generator=generator)
    back[3] = torch.inf
    use = Rows(indices, back, words)
    start = torch.randn(words, width, generator=generator)

    def answers() -> list[torch.Tensor]:
        added, fresh = start.clone(), start.clone()
        finite = use.masked(torch.arange(40) != 3)
        finite.add_weighted(added, weights, True)
        finite.add_weighted(fresh, weights, False)
        return [use.squared_norms(), finite.squared_norms(), added, fresh]

    compiled = answers()
    reference()
    torch.testing.assert_close(compiled, answers(), rtol=1e-5, atol=1e-4, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("index", [-1, 5, 2**62])
def test_an_index_beyond_the_table_is_refused(index):
    use = Rows(torch.tensor([[index]]), torch.ones(1, 1, 2), 5)
    with pytest.raises((IndexError, RuntimeError)):
        use.add_weighted(torch.zeros(5, 2), torch.ones(1), True)


@needs_compiler
@pytest.mark.rule(9)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 32])
@pytest.mark.parametrize("size", [1, 15, 4095, 4096, 4097, BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pass_over_a_window_is_that_of_the_reference(rows, size, dtype, reference):
    generator = torch.Generator().manual_seed(rows + size)
    table = torch.randn(rows, size + 5, generator=generator).to(dtype)[:, :size]
    start, weights = torch.randn(size, generator=generator), np.linspace(-1, 2, rows)
    out = start.clone()
    products = mix(out, table, weights, out)
    exact = start.double() + torch.from_numpy(weights) @ table.double()
    expected = [*(table.double() @ exact).tolist(), float(exact @ exact)]
    tolerance = 1e-5 * float(exact.norm()) * max(1.0, float(table.double().norm(dim=1).max()))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(products, expected, rtol=1e-6, atol=tolerance)
    without = start.clone()
    assert mix(without, table, weights, None) is None
    assert torch.equal(without, out)
    other = torch.randn(size, generator=generator)
    about = [*(table.double() @ other.double()).tolist(), float(other.double() @ other.double())]
    np.testing.assert_allclose(mix(without, table, weights, other), about, rtol=1e-5, atol=tolerance)
    reference()
    np.testing.assert_allclose(mix(start.clone(), table, weights, other), about, rtol=1e-5, atol=tolerance)
    slow = start.clone()
    np.testing.assert_allclose(mix(slow, table, weights, slow), expected, rtol=1e-6, atol=tolerance)
    torch.testing.assert_close(slow, out, rtol=1e-5, atol=1e-5)


def test_products_are_given_for_what_was_made_and_nothing_else():
    recall = Recall(torch.ones(2, 4), np.array([1.0, 2.0]), True)
    out = torch.zeros(4)
    recall.add_to(out, 0.5)
    assert out.tolist() == [1.5] * 4
    assert recall.products(out).tolist() == [6.0, 6.0, 9.0]
    assert recall.products(out.clone()) is None
    out.mul_(2)
    assert recall.products(out) is None


def memory_of(writes: int, fused: bool) -> fodp.FractionalMemory:
    """A memory after some releases s̃ = z + 0.3·u, with u mixed in on the way or read beforehand."""
    memory, generator = fodp.FractionalMemory(window=5, tau=1.0), torch.Generator().manual_seed(0)
    for _ in range(writes):
        release = torch.randn(5000, generator=generator)
        u = memory.recall() if fused else memory.read()
        if isinstance(u, Recall):
            u.add_to(release, 0.3)
        elif u is not None:
            release.add_(u, alpha=0.3)
        memory.write(release)
    return memory


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_a_fused_release_leaves_the_memory_of_a_plain_one(compiled, reference):
    if not compiled:
        reference()
    fused, plain = memory_of(12, True), memory_of(12, False)
    torch.testing.assert_close(fused.weights, plain.weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fused.read(), plain.read(), rtol=1e-4, atol=1e-5)


def trained(steps: int, path: Path | None = None, *, resume: Path | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    data = TensorDataset(torch.randn(80, 6), torch.randint(3, (80,)))
    public = dict(sampling_rate=0.2, lot_size=16, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=1)
    plan = fodp.Plan(method="fo-dp-sgd", steps=30, **public)
    trainer = fodp.Trainer(model, cross_entropy, data, plan)
    if resume is not None:
        trainer.resume(resume)
    for _ in range(steps):
        trainer._one_step()
    if path is not None:
        trainer.save(path)
    return trainer.run.parameters()


@needs_compiler
@pytest.mark.rule(9)
def test_a_seeded_run_is_the_same_to_float_tolerance_and_resuming_the_other_way_is_said(tmp_path, reference):
    compiled = trained(20, tmp_path / "half.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(1, resume=tmp_path / "half.pt")
    reference()
    torch.testing.assert_close(trained(20), compiled, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="began with compiled kernels"):
        trained(1, resume=tmp_path / "half.pt")


@needs_compiler
def test_the_library_is_compiled_once(fresh, monkeypatch):
    assert kernels.library() is not None
    (file,) = fresh.glob("kernels-*.so")
    before = file.stat().st_mtime_ns
    monkeypatch.setattr(kernels.subprocess, "run", None)  # a second compilation would fail
    assert kernels.library() is not None
    assert file.stat().st_mtime_ns == before


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("radius[i] = std * sqrtf", "radius[i] = 0.999f * std * sqrtf"),  # too little noise
        ("* 0x1p-63;", "* 0x1p-62;"),  # uniforms beyond one
        ("& 2) << 30));\n    *sine", "& 2) << 29));\n    *sine"),  # a quadrant's sign
        ("dots[r + j] += sum##j", "dots[r + j] = sum##j"),  # the last block only
        ("+ weight##j * WIDE", "- weight##j * WIDE"),
        ("define WIDE(entry) (entry)", "define WIDE(entry) (0.99f * entry)"),
        ("<< 16;", "<< 15;"),  # in what rounded rows are widened to
        ("define RECALL fodp_recall\n", "define RECALL another_name\n"),
        ("define RECALL fodp_recall_bfloat16\n", "define RECALL another_name\n"),
        ("#include <math.h>", "#include <no_such_file.h>"),
    ],
)
def test_a_library_that_errs_is_not_used(fresh, monkeypatch, right, wrong):
    changed = {name: text.replace(right, wrong) for name, text in kernels.SOURCES.items()}
    assert changed != kernels.SOURCES
    monkeypatch.setattr(kernels, "SOURCES", changed)
    assert kernels.library() is None


def test_without_compiler_or_by_wish_there_is_no_library(fresh, monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert kernels.library() is None
    monkeypatch.undo()
    monkeypatch.setenv("FODP_KERNELS", "0")
    assert kernels.library.__wrapped__() is None


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_used(fresh):
    assert kernels.library() is not None
    fresh.chmod(0o777)
    assert kernels.library() is None
