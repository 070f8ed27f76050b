"""Compiled loops: they give what the reference gives, and whatever goes wrong with them, the reference is used."""

import ctypes
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import fodp
from fodp import kernels
from fodp.data.models import cross_entropy
from fodp.kernels.checks import is_right
from fodp.kernels.library import Library
from fodp.memory.passes import BLOCK, mix, mix_and_remember
from fodp.noise import Streams
from fodp.noise.streams import PAIRS

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
@pytest.mark.rule(9)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 32])
@pytest.mark.parametrize("size", [1, 15, 2047, 2048, 2049, BLOCK + 3])
@pytest.mark.parametrize("scale", [None, 0.7])  # what is remembered is the result, or with a scale what it began as
def test_the_pass_over_a_window_is_that_of_the_reference(rows, size, scale, reference):
    generator = torch.Generator().manual_seed(rows + size)
    wide = torch.randn(rows + 1, size + 5, generator=generator)
    start, trend = torch.randn(2, size, generator=generator)
    weights = torch.linspace(-1, 2, rows).tolist()
    newest = rows // 2  # over a row that is mixed in

    def passed() -> tuple[torch.Tensor, ...]:
        alone, out, moved, table = start.clone(), start.clone(), trend.clone(), wide.clone()
        mix(alone, table[:, :size], weights)
        arguments = weights, scale, moved, 0.3, newest, max(rows, 1)
        squares = mix_and_remember(out, table[:, :size], *arguments)
        assert torch.equal(out, alone) or scale is not None
        assert torch.equal(table[newest, :size], out if scale is None else start)
        assert torch.equal(table[:, size:], wide[:, size:])  # what lies beside it stays
        return alone, out, moved, table, torch.tensor(squares)

    compiled = passed()
    reference()
    torch.testing.assert_close(compiled, passed(), rtol=1e-5, atol=2e-5)


def test_a_memory_of_one_width_takes_releases_of_another():
    releases = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    memory, exact = fodp.FractionalMemory(window=5, tau=1.0), fodp.FractionalMemory(window=5, tau=1.0)
    for number, release in enumerate(releases):
        exact.write(release)
        memory.write(release.float() if number % 2 else release)
    torch.testing.assert_close(memory.read(), exact.read(), rtol=1e-5, atol=1e-5)


def memory_of(writes: int, fused: bool, window: int = 5, rest: float = 0.3) -> fodp.FractionalMemory:
    """A memory after some releases s̃ = z + 0.3·u, with u mixed in on the way or read beforehand."""
    memory, generator = fodp.FractionalMemory(window=window, tau=1.0), torch.Generator().manual_seed(0)
    for _ in range(writes):
        release = torch.randn(5000, generator=generator)
        if fused:
            memory.mix_in_(release, rest)
            continue
        u = memory.read()
        if u is not None:
            release.add_(u, alpha=rest)
        memory.write(release)
    return memory


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_a_fused_release_leaves_the_memory_of_a_plain_one(compiled, reference):
    if not compiled:
        reference()
    fused, plain = memory_of(12, True), memory_of(12, False)
    torch.testing.assert_close(fused.weights, plain.weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fused.read(), plain.read(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("writes", [31, 400])
def test_rounding_does_not_add_up_where_nearly_everything_is_memory(compiled, writes, reference):
    if not compiled:
        reference()
    memory = memory_of(writes, True, window=32, rest=0.99)
    state = memory.state_dict()
    releases, trend = state["releases"].double(), state["trend"].double()
    expected = (releases - trend).norm(dim=1) / (trend.norm().clamp(min=1) + 1e-12)
    torch.testing.assert_close(memory.inconsistency, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(memory.confidence, trend.norm() / (trend.norm() + 1), rtol=1e-5, atol=0)


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
        trainer.take_step()
    if path is not None:
        trainer.save(path)
    return trainer.session.parameters()


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
def test_the_library_is_compiled_once_and_not_used_if_others_could_have_written_it(fresh, monkeypatch):
    assert kernels.library() is not None
    (file,) = fresh.glob("kernels-*.so")
    before = file.stat().st_mtime_ns
    monkeypatch.setattr(kernels.subprocess, "run", None)  # a second compilation would fail
    assert kernels.library() is not None
    assert file.stat().st_mtime_ns == before
    fresh.chmod(0o777)
    assert kernels.library() is None


MISTAKES = [
    ("radius[i] = std * sqrtf", "radius[i] = 0.999f * std * sqrtf"),  # too little noise
    ("* 0x1p-63;", "* 0x1p-62;"),  # uniforms beyond one
    ("(sine ^ ((quadrant & 2) << 30))", "(sine ^ ((quadrant & 2) << 29))"),  # a quadrant's sign
    ("memcpy(second, &s, 4 * m)", "memcpy(second, &s, 4 * n)"),  # one number more than there is room for
    ("EIGHT total += by[j]", "EIGHT total -= by[j]"),
    ("EIGHT rows[j] = table + least(r + j, count - 1) * stride", "EIGHT rows[j] = table + r * stride"),
    ("r + j < count ? weights[r + j] : 0", "weights[least(r + j, count - 1)]"),  # the last row again and again
    ("squares[r + j] += sums[j]", "squares[r + j] = sums[j]"),  # the last chunk only
    ("d += SQUARE(3)", "d += 1.001f * SQUARE(3)"),
    ("trend[i] + gamma * (v[i]", "trend[i] + 0.99f * gamma * (v[i]"),  # an average of its own
    ("v[i] - (1 - gamma) *", "v[i] - gamma *"),
    ("memcpy(table + row * stride", "memcpy(table + (row + 1) * stride"),  # remembered in another row
    ("v = earlier ? memcpy(", "v = earlier && 0 ? memcpy("),  # remembers the mixture, not the release
    ("if (scale != 1) for", "if (0) for"),
    ("squares[kept] += square", "squares[kept] = square"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Path:
    """All mistakes in one library, compiled at once: the loops of the first end in _0, of the second in _1, …"""
    folder = tmp_path_factory.mktemp("wrong")
    for number, mistake in enumerate(MISTAKES):
        assert kernels.SOURCE.count(mistake[0]) == 1, mistake
        renamed = re.sub(r"\b(fodp_\w+)", rf"\1_{number}", kernels.SOURCE.replace(*mistake))
        Path(folder, f"{number}.c").write_text(renamed)
    files = sorted(map(str, folder.glob("*.c")))
    command = ["cc", *kernels._FLAGS.replace("-O3", "-O1").split(), *files, "-o", str(folder / "wrong.so"), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "wrong.so"


@needs_compiler
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[after for _, after in MISTAKES])
def test_a_library_that_errs_is_not_used(wrong, number):
    library, loops = Library(kernels._compiled()), ctypes.CDLL(str(wrong))
    assert is_right(library)
    for name in ("normals", "recall"):
        loop, right = getattr(loops, f"fodp_{name}_{number}"), getattr(library, f"_{name}")
        loop.argtypes, loop.restype = right.argtypes, right.restype
        setattr(library, f"_{name}", loop)
    assert not is_right(library)


@needs_compiler
def test_a_library_that_lacks_a_loop_or_does_not_compile_is_not_used(wrong, fresh, monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", lambda: wrong)  # all its loops have other names
    assert kernels.library() is None
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "_FLAGS", "--no-such-flag")
    assert kernels.library.__wrapped__() is None


def test_without_compiler_or_by_wish_there_is_no_library(fresh, monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert kernels.library() is None
    monkeypatch.undo()
    monkeypatch.setenv("FODP_KERNELS", "0")
    assert kernels.library.__wrapped__() is None
