"""Compiled loops: they give what the reference gives, and whatever goes wrong with them, the reference is used."""

import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch.utils.data import TensorDataset

import fodp
from fodp import kernels
from fodp import memory as memory_module
from fodp.clipping.norms import add_squared_norms, limits, roots
from fodp.clipping.products import add_product
from fodp.clipping.tables import Rows
from fodp.clipping.uses import Dense, Outer, Product
from fodp.keystream import MARGIN, keystream
from fodp.models import cross_entropy
from fodp.noise import PAIRS, Streams
from fodp.recall import BLOCK, Products, Recall, Trend, inner_products, mix, mix_and_remember

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
def test_the_keystream_is_that_of_the_cryptographic_library():
    key, sizes = bytes(range(100, 132)), (16, 0, 512, 16 * 70_000, 33)  # over the third byte of the counter
    buffer = np.zeros(max(sizes) + MARGIN, np.uint8)

    def parts(secret: bool) -> list[bytes]:
        stream, found = keystream(key, secret=secret), []
        for size in sizes:
            stream.fill(buffer, size)
            found.append(buffer[:size].tobytes())
        return found

    public = parts(secret=False)
    assert public == parts(secret=True)
    assert b"".join(public) == Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(
        bytes(sum(sizes))
    )


def test_a_secret_key_is_given_to_no_code_but_the_librarys(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: pytest.fail("asked for compiled code"))
    keystream(bytes(32), secret=True).fill(np.zeros(32 + MARGIN, np.uint8), 32)
    Streams.secure().words(10, 0, "mask")


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


def mutual_products(table: torch.Tensor, order: list[int]) -> Products:
    """What is known of a window before a pass, each row having been written after those that follow it in order."""
    products, nobody = Products(len(table)), torch.zeros(table.shape[1])
    for place, row in enumerate(order):
        products.put(row, inner_products(table, order[place + 1 :], table[row].float(), nobody))
    return products


@needs_compiler
@pytest.mark.rule(9)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 32])
@pytest.mark.parametrize("size", [1, 15, 4095, 4096, 4097, BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pass_over_a_window_is_that_of_the_reference(rows, size, dtype, reference):
    generator = torch.Generator().manual_seed(rows + size)
    table = torch.randn(rows + 1, size + 5, generator=generator).to(dtype)[:, :size]
    start, trend = torch.randn(2, size, generator=generator)
    weights, order = np.linspace(-1, 2, rows), torch.randperm(rows + 1, generator=generator).tolist()
    *order, free = order
    memory = torch.from_numpy(weights) @ table[order].double()
    followed = trend.double() + 0.3 * (table[order[0]].double() - trend.double())
    for compiled in (True, False):
        if not compiled:
            reference()
        plain = start.clone()
        mix(plain, table, order, weights.tolist())
        torch.testing.assert_close(plain.double(), start.double() + memory, rtol=1e-5, atol=1e-5)
        for scale in (None, 0.7):  # what is remembered is the result itself, or with a scale what it began as
            out, kept, moved = start.clone(), table.clone(), Trend(trend.clone(), table[order[0]], 0.3)
            products = mutual_products(table, order)
            mix_and_remember(out, kept, order, weights.tolist(), free, moved, products, scale)
            exact = (scale or 1) * start.double() + memory
            assert torch.equal(out, plain) or scale is not None
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
            assert torch.equal(kept[free], (out if scale is None else start).to(dtype))
            assert torch.equal(kept[order], table[order])
            assert moved.newest is None
            torch.testing.assert_close(moved.value.double(), followed, rtol=1e-5, atol=1e-5)
            about = exact if scale is None else start.double()
            expected = [float(about @ about), float(followed @ about), *(table[order].double() @ about).tolist()]
            tolerance = 1e-5 * float(about.norm()) * max(1.0, float(table.double().norm(dim=1).max()))
            np.testing.assert_allclose(products.of(free, rows), expected, rtol=1e-6, atol=tolerance)
            alone = Trend(trend.clone(), table[order[0]], 0.3)
            assert torch.equal(alone.settle(), moved.value)  # a checkpoint in between changes no bit


@needs_compiler
@pytest.mark.rule(4)
@pytest.mark.parametrize("examples", [1, 2, 33])
@pytest.mark.parametrize("fan_in", [1, 47, 48, 49, 100, 3072])
@pytest.mark.parametrize("fan_out", [1, 7, 8, 9, 64])
def test_the_weighted_product_is_that_of_the_reference(examples, fan_in, fan_out, reference):
    generator = torch.Generator().manual_seed(examples + fan_in + fan_out)
    inputs, back = (
        torch.randn(examples, fan_in, generator=generator),
        torch.randn(examples, fan_out, generator=generator),
    )
    weights, start = torch.rand(examples, generator=generator), torch.randn(fan_out, fan_in, generator=generator)
    weights[::3] = 0  # these are left out
    flat = torch.full((fan_out * fan_in + 2,), 7.0)  # what lies beside the result stays
    exact = (weights.double().unsqueeze(1) * back.double()).t() @ inputs.double()
    for compiled in (True, False):
        if not compiled:
            reference()
        for accumulate in (False, True):
            out = flat[1:-1].view(fan_out, fan_in).copy_(start)
            add_product(out, inputs, back, weights, accumulate)
            expected = exact + start.double() if accumulate else exact
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
            assert flat[0] == flat[-1] == 7.0


@needs_compiler
def test_the_weighted_product_leaves_several_threads_and_large_layers_to_the_library(monkeypatch):
    """It has one thread, and its tiles must stay in the cache."""
    needs_wide_registers()
    calls, inner = [], kernels.library().fodp_product
    monkeypatch.setattr(kernels.library(), "fodp_product", lambda *given: calls.append(1) or inner(*given))

    def product(examples: int, width: int) -> int:
        calls.clear()
        one = torch.ones(examples, width)
        add_product(torch.empty(width, width), one, one, torch.ones(examples), False)
        return len(calls)

    assert product(20, 30) == 1
    assert product(20_000, 30) == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert product(20, 30) == 0


def norms(uses, squares: torch.Tensor) -> torch.Tensor:
    return roots(add_squared_norms(uses, squares.double()), torch.float32)[0]


@needs_compiler
@pytest.mark.rule(9)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-26, 1e15])
def test_norms_are_those_of_the_reference(scale, reference):
    """Rows, products of rows, and uses that have no compiled pass; also where their squares are no floats."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape, by=1.0):
        return by * torch.randn(6, *shape, generator=generator)

    uses = [
        (Product(rows(103, by=scale), rows(5, by=1 / scale)), 0.5),
        (Dense(rows(7)), 2.0),
        (Dense(rows(3, 4)), 1.0),
        (Dense(rows()), 1.0),
        (Dense(rows(9).t().contiguous().t()), 3.0),
        (Outer(rows(1, 4, 3), rows(1, 4, 2)), 1.0),
    ]
    truth = sum((b * use.dense().double().flatten(1)).square().sum(1) for use, b in uses).sqrt()
    fast = norms(uses, torch.zeros(6))
    torch.testing.assert_close(fast.double(), truth, rtol=1e-5, atol=0)
    reference()
    if scale > 1e-20:  # the reference, in float32, may only overstate the others
        torch.testing.assert_close(norms(uses, torch.zeros(6)), fast, rtol=1e-5, atol=0)


def test_norms_of_nobody_and_of_nothing():
    nobody = [(Product(torch.zeros(0, 3), torch.zeros(0, 2)), 1.0), (Dense(torch.zeros(0, 2)), 1.0)]
    assert norms(nobody, torch.zeros(0)).shape == (0,)
    nothing = [(Dense(torch.zeros(2, 0)), 1.0), (Product(torch.ones(2, 3), torch.zeros(2, 0)), 1.0)]
    assert norms(nothing, torch.zeros(2)).max() < 1e-15


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_norm_that_is_no_number_is_seen(bad):
    inputs = torch.ones(3, 4)
    inputs[1, 2] = bad
    uses = [(Product(inputs, torch.full((3, 2), 1e5)), 1.0)]
    found, all_finite = roots(add_squared_norms(uses, torch.zeros(3).double()), torch.float32)
    assert found.isfinite().tolist() == [True, False, True]
    assert not all_finite
    assert roots(torch.tensor([4.0, 9.0]).double(), torch.float32)[1]


@needs_compiler
@pytest.mark.rule(9)
@pytest.mark.parametrize("bound", [1e-3, 1.0, 37.0])
@pytest.mark.parametrize("most", [1.0, math.inf])
def test_limits_are_those_of_the_reference_and_keep_the_bound(bound, most, reference):
    found = torch.cat([torch.tensor([0.0, 1e-30, 1e-9, 1e19, 1.0]), torch.rand(1000) * 50])
    compiled = limits(found, bound, most)
    rounded = 1.5 * torch.finfo(torch.float32).eps  # three times by half a unit: norms are raised by more
    assert (compiled.double() * found.double() <= bound * (1 + rounded)).all()
    assert compiled.isfinite().all()
    assert (compiled <= most).all()
    reference()
    assert torch.equal(compiled, limits(found, bound, most))


@needs_compiler
def test_rows_are_rounded_as_pytorch_rounds(reference):
    ties = torch.arange(0, 1 << 12, dtype=torch.int32).add(0x3F80 << 16).mul(1 << 4).view(torch.float32)
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 3.4e38, -3.4e38, 1e-45, 2.0**-126])
    vector = torch.cat([ties, -ties, odd, torch.randn(1000)])
    table, trend = torch.zeros(2, len(vector), dtype=torch.bfloat16), Trend(torch.zeros(len(vector)))
    mix_and_remember(vector.clone(), table, [0], [1.0], 1, trend, Products(2), scale=0.5)
    expected = vector.to(torch.bfloat16)
    assert torch.equal(table[1].isnan(), expected.isnan())
    assert torch.equal(table[1].nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


def test_what_was_remembered_is_that_vector_and_no_other():
    table, products = torch.ones(3, 4), Products(3)
    products.put(0, [4.0, 0.0, 4.0])
    products.put(1, [4.0, 0.0])
    recall = Recall(table, [0, 1], [1.0, 2.0], 2, Trend(torch.zeros(4)), products)
    out = torch.zeros(4)
    recall.add_to(out, 0.5)
    assert out.tolist() == table[2].tolist() == [1.5] * 4
    assert products.of(2, 2) == [9.0, 0.0, 6.0, 6.0]
    assert recall.has_remembered(out)
    assert not recall.has_remembered(out.clone())
    Recall(table, [0], [1.0]).add_to(out, 1.0)  # of another memory, perhaps
    assert not recall.has_remembered(out)
    recall.add_to(out, 0.5)
    assert recall.has_remembered(out)
    out.mul_(2)
    assert not recall.has_remembered(out)
    before = out.clone()
    recall.add_to(out, 0.5, scale=0.1)  # remembers what was there
    assert torch.equal(table[2], before)
    torch.testing.assert_close(out, 0.1 * before + 1.5)
    assert recall.has_remembered(out)


def test_what_is_not_counted_is_not_taken_for_unchanged():
    """Tensors made in inference mode have no versions: their releases are remembered the long way."""
    with torch.inference_mode():
        fused, plain = memory_of(12, True), memory_of(12, False)
    torch.testing.assert_close(fused.read(), plain.read(), rtol=1e-4, atol=1e-5)


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
        u = memory.recall() if fused else memory.read()
        if isinstance(u, Recall):
            u.add_to(release, rest)
        elif u is not None:
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
@pytest.mark.parametrize("mutual", [512, 31])  # with the inner products of releases kept, and without
@pytest.mark.parametrize("writes", [31, 400])
def test_rounding_does_not_add_up_where_nearly_everything_is_memory(compiled, mutual, writes, reference, monkeypatch):
    """A release's inner products follow from those of earlier ones: their errors must not grow with every step."""
    if not compiled:
        reference()
    monkeypatch.setattr(memory_module, "_MUTUAL", mutual)
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
        ("products[j] += sum", "products[j] = sum"),  # the last chunk only
        ("total.part[p] += rows.weight[j]", "total.part[p] -= rows.weight[j]"),
        ("order[least(r + j, count - 1)]", "order[least(r, count - 1)]"),
        ("square += whole.part[p] *", "square += 1.01f * whole.part[p] *"),
        ("trend.part[p] + gamma * apart", "trend.part[p] + 0.99f * gamma * apart"),  # an average of its own
        ("newest.part[p] - (1 - gamma) * apart", "newest.part[p] - gamma * apart"),
        ("newest.part[p] = x[0]", "newest.part[p] = x[1]"),  # a trend that follows another release
        ("OF(keep)(kept + at, whole, m);", ""),
        ("trend, gamma, own, 1);", "trend, gamma, own, 0);"),  # remembers what was there before mixing
        ("trend, gamma, own, 0);", "trend, gamma, own, 1);"),  # remembers the mixture, not the release
        ("square * other", "square + other"),
        ("squares[i] = square_sum(rows", "squares[i] += square_sum(rows"),
        ("(double)l[s] * r[s]", "(double)l[s] * l[s]"),
        ("mass += roots * roots", "mass += roots"),
        ("r[t] > largest ? r[t] : largest", "largest"),
        ("(double)v[i] * v[i]", "v[i] * v[i]"),  # squares that vanish
        ("return isfinite(total)", "return 1"),  # examples that are not finite are summed
        ("sqrtf((float)(factor * squares[i]))", "(float)(factor * squares[i])"),  # squares for norms
        ("sqrtf((float)(factor * squares[i]))", "sqrtf((float)squares[i])"),  # norms that are not raised
        ("norms[i] > smallest", "norms[i] < smallest"),
        ("limit < most ? limit : most", "limit"),  # short gradients made long
        ("x << 16", "x << 15"),  # in what rounded rows are widened to
        ("5, 21, 6, 22", "5, 22, 6, 21"),  # entries that change places
        ("0x7FFF + ", "0xFFFF + "),  # rounded up
        ("define OF(name) name\n", "define OF(name) another_##name\n"),
        ("define OF(name) name##_bfloat16\n", "define OF(name) another_##name\n"),
        ("#include <math.h>", "#include <no_such_file.h>"),
    ],
)
def test_a_library_that_errs_is_not_used(fresh, monkeypatch, right, wrong):
    refuses(monkeypatch, right, wrong)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("TURN(14, 64)", "TURN(14, 32)"), ("block + 3, 0", "block + 2, 0")],  # a key of another round; a block twice
)
def test_a_keystream_that_errs_is_not_used(fresh, monkeypatch, right, wrong):
    if not kernels.library().fodp_keystream(None, 0, bytes(32), 0):
        pytest.skip("this processor lacks the instructions (VAES), so the loop is not compiled")
    refuses(monkeypatch, right, wrong)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("= weights[i] * back[i", "= back[i"),  # nobody clipped
        ("total[r][v] += back[i * stride + r]", "total[r][v] += back[i * stride]"),  # one row for eight
        ("if (accumulate) for", "if (0) for"),
        ("inputs + used[i] * fan_in + at, sizeof(float) * width", "inputs + used[i] * fan_in, sizeof(float) * width"),
        ("inputs + used[i] * width", "inputs + i * width"),  # of another example
        ("weights[i] == 0", "weights[i] <= 0"),
    ],
)
def test_a_product_that_errs_is_not_used(fresh, monkeypatch, right, wrong):
    needs_wide_registers()
    refuses(monkeypatch, right, wrong)


def needs_wide_registers() -> None:
    if not kernels.library().fodp_product(*[None] * 4, 0, 0, 0, 0, None):
        pytest.skip("this processor lacks AVX-512, so the loop is not compiled")


def refuses(monkeypatch, right: str, wrong: str) -> None:
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
