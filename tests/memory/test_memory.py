"""The memories against a plain float64 transcription of the paper's equations, and their other promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fodp
from fodp.memory import noise_floor
from fodp.memory.passes import BLOCK

# --- the paper, transcribed --------------------------------------------------------------------------------
# `history` is h_t = (s̃_0, …, s̃_{t-1}), the list of all releases so far; nothing is kept between steps but the
# list of trends, since eq. fodpsgd_ema is itself recursive.


def paper_trends(history, gamma):
    """s̄_1, …, s̄_t (eq. fodpsgd_ema): s̄_1 = s̃_0, then s̄_t = γ·s̃_{t-1} + (1-γ)·s̄_{t-1}."""
    trends = [history[0]]
    for release in history[1:]:
        trends.append(gamma * release + (1 - gamma) * trends[-1])
    return trends


def paper_scores(history, trend, *, alpha, window, lam, tau, gamma, kappa, zeta, eps):
    """ν_{t,1}, …, ν_{t,K_t-1} and χ_t (eqs. fodpsgd_inconsistency, fodpsgd_confidence)."""
    t = len(history)
    k_t = min(window, t + 1)
    length = np.linalg.norm(trend)
    nu = [np.linalg.norm(history[t - j] - trend) / (max(length, kappa) + eps) for j in range(1, k_t)]
    return np.array(nu), length / (length + zeta)


def paper_weights(history, trend, **p):
    """â_{t,1}, …, â_{t,K_t-1} (eqs. fodpsgd_kernel, fodpsgd_norm_weights)."""
    nu, chi = paper_scores(history, trend, **p)
    j = np.arange(1, len(nu) + 1)
    exponents = -(p["lam"] + chi * p["tau"] * nu) * j
    # a common factor leaves the normalised weights alone and keeps the kernel from underflowing
    a = (j + 1.0) ** (p["alpha"] - 1) * np.exp(exponents - exponents.max())
    return a / a.sum()


def paper_state(history, weights):
    """u_{t-1} = Σ_j â_{t,j}·s̃_{t-j} (eq. fodpsgd_memory_state)."""
    return sum(w * history[len(history) - j] for j, w in enumerate(weights, start=1))


def paper_uniform(window, t):
    """Eq. uniform_memory_design."""
    return np.full(min(window, t + 1) - 1, 1 / max(1, min(window, t + 1) - 1))


def paper_exponential(window, decay, t):
    """Eq. exponential_weights_memory_design."""
    kernel = [decay ** (j - 1) for j in range(1, min(window, t + 1))]
    return np.array(kernel) / sum(kernel)


# --- helpers -----------------------------------------------------------------------------------------------

DEFAULTS = dict(alpha=0.8, window=8, lam=0.05, tau=0.1, gamma=0.1, kappa=1.0, zeta=1.0, eps=1e-12)
MEMORIES = {
    "fractional": lambda window: fodp.FractionalMemory(window=window),
    "fixed kernel": lambda window: fodp.FractionalMemory(window=window, tau=0.0),
    "uniform": lambda window: fodp.UniformMemory(window=window),
    "exponential": lambda window: fodp.ExponentialMemory(window=window),
}
SUM = {"sum of exponentials": lambda window: fodp.ExponentialSumMemory(window=window, lam=1.0, tolerance=0.1)}
every_memory = pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
also_without_ring = pytest.mark.parametrize("make", (MEMORIES | SUM).values(), ids=MEMORIES | SUM)


def releases(count, size, *, seed=0, scale=1.0, signal=1.0, dtype=torch.float32):
    """Noise around a slowly turning direction: what a run produces."""
    rng = np.random.default_rng(seed)
    start, end = signal * rng.normal(size=(2, size))
    drift = [start + (end - start) * t / count for t in range(count)]
    return [torch.from_numpy(scale * (d + rng.normal(size=size))).to(dtype) for d in drift]


def filled(memory, transcript):
    for release in transcript:
        memory.write(release)
    return memory


def assert_same_weights(found, expected):
    """Each weight to a relative 1e-4; those that no release can feel need only be as small."""
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-9)
    assert found.dtype == torch.float64


def assert_same_vector(found, expected, history):
    """To a relative 1e-4; an average in which the releases happen to cancel is measured against them."""
    apart = np.linalg.norm(found.double().numpy() - expected)
    largest = max(np.linalg.norm(release) for release in history[-40:])
    assert apart <= 1e-4 * max(np.linalg.norm(expected), 0.01 * largest)


def same_state(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(a, right[k]) if isinstance(a, torch.Tensor) else a == right[k] for k, a in left.items())


@st.composite
def memory_parameters(draw, max_window=40):
    positive = st.floats(1e-3, 1e3)
    return dict(
        alpha=draw(st.floats(0.01, 1.0)),
        window=draw(st.integers(1, max_window)),
        lam=draw(st.floats(0.0, 1.0)),
        tau=draw(st.one_of(st.just(0.0), st.floats(1e-3, 5.0))),
        gamma=draw(st.one_of(st.just(1.0), st.floats(1e-3, 1.0))),
        kappa=draw(positive),
        zeta=draw(positive),
        eps=draw(st.sampled_from([1e-12, 0.1, 10.0])),
    )


def follow(memory, transcript, p, *, save_at=None, make=None):
    """Write a transcript and compare with the paper at every step; optionally go on in a loaded copy."""
    history = [release.double().numpy() for release in transcript]
    trends = paper_trends(history, p["gamma"])
    for t in range(len(transcript) + 1):
        if t == save_at:
            state, old = memory.state_dict(), memory
            memory = make()
            memory.load_state_dict(state)
            assert torch.equal(memory.weights, old.weights)
        u = memory.read()
        if min(p["window"], t + 1) == 1:
            assert u is None
            assert memory.weights.numel() == 0
        else:
            weights = paper_weights(history[:t], trends[t - 1], **p)
            assert_same_weights(memory.weights, weights)
            assert_same_vector(u, paper_state(history[:t], weights), history[:t])
        if t < len(transcript):
            memory.write(transcript[t])
    return memory


# --- equal to the paper ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    p=memory_parameters(),
    steps=st.integers(1, 250),
    size=st.sampled_from([1, 2, 7, 64, 500]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    signal=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
    when=st.floats(0, 1),
)
@example(DEFAULTS, 400, 64, 1.0, 1.0, torch.float32, 1, 0.5)
@example(DEFAULTS | {"window": 1}, 50, 7, 1.0, 1.0, torch.float32, 2, 0.5)
@example(DEFAULTS | {"window": 2}, 300, 7, 1.0, 1.0, torch.float32, 2, 0.5)
# The trend equals or nearly equals a release: the scores must not drown in the rounding of inner products.
@example(DEFAULTS | {"gamma": 1.0, "tau": 5.0}, 100, 500, 1.0, 1.0, torch.float32, 3, 0.5)
@example(DEFAULTS | {"gamma": 1e-3, "tau": 5.0}, 100, 500, 1.0, 1.0, torch.float32, 4, 0.5)
@example(DEFAULTS | {"tau": 5.0, "window": 40}, 100, 500, 1.0, 300.0, torch.float32, 5, 0.5)
def test_fractional_memory_equals_the_paper(p, steps, size, scale, signal, dtype, seed, when):
    transcript = releases(steps, size, seed=seed, scale=scale, signal=signal, dtype=dtype)
    follow(
        fodp.FractionalMemory(**p),
        transcript,
        p,
        save_at=round(when * steps),
        make=lambda: fodp.FractionalMemory(**p),
    )


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_longer_than_a_block(size, dtype):
    p = DEFAULTS | {"window": 5, "tau": 1.0, "gamma": 0.3}
    follow(fodp.FractionalMemory(**p), releases(12, size, dtype=dtype), p)


def test_one_block_more_than_the_others_counts():
    """Energy in the last entries only: a block that is left out would be seen."""
    p = DEFAULTS | {"tau": 1.0}
    transcript = releases(10, BLOCK + 3)
    for release in transcript:
        release[:BLOCK] = 0
    follow(fodp.FractionalMemory(**p), transcript, p)


def test_scores_equal_the_paper():
    p = DEFAULTS | {"tau": 1.0, "eps": 0.5}
    transcript = releases(30, 100, dtype=torch.float64)
    memory = fodp.FractionalMemory(**p)
    history = [release.numpy() for release in transcript]
    for t, trend in enumerate(paper_trends(history, p["gamma"]), start=1):
        memory.write(transcript[t - 1])
        nu, chi = paper_scores(history[:t], trend, **p)
        np.testing.assert_allclose(memory.inconsistency.numpy(), nu, rtol=1e-12)
        assert memory.confidence.item() == pytest.approx(chi, rel=1e-12)
        assert 0 <= memory.confidence < 1


@settings(max_examples=20)
@given(
    window=st.integers(1, 40),
    decay=st.floats(0.01, 0.99),
    steps=st.integers(1, 250),
    size=st.sampled_from([1, 7, 500]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
    when=st.floats(0, 1),
)
def test_ablation_memories_equal_the_paper(window, decay, steps, size, scale, dtype, seed, when):
    transcript = releases(steps, size, seed=seed, scale=scale, dtype=dtype)
    history = [release.double().numpy() for release in transcript]
    kinds = [
        (lambda: fodp.UniformMemory(window=window), lambda t: paper_uniform(window, t)),
        (
            lambda: fodp.ExponentialMemory(window=window, decay=decay),
            lambda t: paper_exponential(window, decay, t),
        ),
    ]
    for make, expected in kinds:
        memory = make()
        for t in range(steps + 1):
            if t == round(when * steps):
                state, memory = memory.state_dict(), make()
                memory.load_state_dict(state)
            if min(window, t + 1) == 1:
                assert memory.read() is None
            else:
                assert_same_weights(memory.weights, expected(t))
                assert_same_vector(memory.read(), paper_state(history[:t], expected(t)), history[:t])
            if t < steps:
                memory.write(transcript[t])


@settings(max_examples=15)
@given(
    p=memory_parameters(),
    beta=st.floats(0.05, 1.0),
    sigma=st.sampled_from([0.0, 0.5, 1.1, 5.0]),
    clip_norm=st.sampled_from([0.1, 1.0, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31 - 1),
)
@example(DEFAULTS, 0.9, 1.1, 1.0, torch.float32, 0)
@example(DEFAULTS | {"gamma": 1.0, "tau": 1.0}, 0.3, 1.1, 1.0, torch.float32, 0)
def test_algorithm_1_as_a_whole(p, beta, sigma, clip_norm, dtype, seed):
    """The recursion s̃ = β·s + (1-β)·u + Z feeds on itself: GaussianMechanism against lines 5 to 25."""
    steps, size = 200, 60
    sums = releases(steps, size, seed=seed, scale=clip_norm, signal=3.0, dtype=dtype)
    mechanism = fodp.GaussianMechanism(
        clip_norm=clip_norm,
        noise_multiplier=sigma,
        beta=beta,
        memory=fodp.FractionalMemory(**p),
        generator=torch.Generator().manual_seed(seed),
    )
    same_noise = torch.Generator().manual_seed(seed)
    buffer, trend = [], None
    for t, s in enumerate(sums):
        z = sigma * clip_norm * torch.empty(size, dtype=dtype).normal_(generator=same_noise).double().numpy()
        k_t = min(p["window"], t + 1)
        if k_t == 1:
            r = beta * s.double().numpy()
        else:
            u = paper_state(buffer, paper_weights(buffer, trend, **p))
            r = beta * s.double().numpy() + (1 - beta) * u
        expected = r + z
        buffer.append(expected)
        assert_same_vector(mechanism.release(s), expected, buffer)
        trend = expected if t == 0 else p["gamma"] * expected + (1 - p["gamma"]) * trend


# --- the start, the window ---------------------------------------------------------------------------------


@every_memory
def test_nothing_to_read_before_the_first_release(make):
    memory = make(8)
    assert memory.read() is None
    assert memory.weights.shape == (0,)
    memory.write(torch.tensor([3.0, 4.0]))
    assert memory.weights.tolist() == [1.0]
    assert memory.read().tolist() == [3.0, 4.0]


@every_memory
def test_window_one_never_remembers(make):
    memory = make(1)
    for release in releases(5, 3):
        memory.write(release)
        assert memory.read() is None
        assert memory.weights.shape == (0,)


@every_memory
@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_it_holds_one_release_less_than_the_window(make, window):
    """K counts the present: the last K-1 releases, each once, and none older."""
    memory = make(window)
    transcript = releases(20, 5)
    for t, release in enumerate(transcript, start=1):
        memory.write(release)
        kept = memory.state_dict()["releases"]
        assert memory.filled == len(memory.weights) == min(window - 1, t)
        expected = transcript[max(0, t - window + 1) : t][::-1] if window > 1 else []
        assert kept.shape == (memory.filled, 5)
        assert kept.tolist() == [release.to(kept.dtype).tolist() for release in expected]


@pytest.mark.parametrize("kind", ["fixed kernel", "uniform", "exponential"])
def test_releases_beyond_the_window_are_forgotten(kind):
    fresh, old = MEMORIES[kind](8), MEMORIES[kind](8)
    filled(old, releases(30, 5, seed=9))
    transcript = releases(7, 5)
    # the ring starts elsewhere, so the sum is taken in another order
    torch.testing.assert_close(filled(old, transcript).read(), filled(fresh, transcript).read())


def test_the_trend_reaches_beyond_the_window():
    p = DEFAULTS | {"window": 3, "tau": 1.0}
    tail = releases(2, 5)
    one = filled(fodp.FractionalMemory(**p), [torch.ones(5), *tail])
    other = filled(fodp.FractionalMemory(**p), [-torch.ones(5), *tail])
    assert torch.equal(one.state_dict()["releases"], other.state_dict()["releases"])
    assert not torch.equal(one.weights, other.weights)


# --- reading is pure, releases are never aliased -----------------------------------------------------------


@also_without_ring
def test_reading_changes_nothing(make):
    memory = filled(make(5), releases(9, 20))
    before, weights, u = memory.state_dict(), memory.weights, memory.read()
    for _ in range(3):
        assert torch.equal(memory.read(), u)
        assert torch.equal(memory.weights, weights)
        if isinstance(memory, fodp.FractionalMemory):
            _ = memory.inconsistency, memory.confidence
    assert same_state(memory.state_dict(), before)


@also_without_ring
def test_read_into_a_given_buffer(make):
    memory = filled(make(5), releases(9, 20))
    buffer = torch.full((20,), math.nan)
    assert memory.read(out=buffer) is buffer
    assert torch.equal(buffer, memory.read())


@also_without_ring
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_a_release_is_copied(make, steps):
    transcript = releases(steps, 20)
    kept, mutated = make(5), make(5)
    for release in transcript:
        kept.write(release)
        handed_over = release.clone()
        mutated.write(handed_over)
        handed_over.zero_()  # optimizers clip and zero what they are given
    assert same_state(kept.state_dict(), mutated.state_dict())
    assert torch.equal(kept.read(), mutated.read())


@also_without_ring
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_what_is_read_is_a_copy(make, steps):
    memory = filled(make(5), releases(steps, 20))
    before = memory.state_dict()
    memory.read().fill_(math.nan)
    memory.weights.fill_(math.nan)
    if isinstance(memory, fodp.FractionalMemory):
        memory.inconsistency.fill_(math.nan)
        memory.confidence.fill_(math.nan)
    assert same_state(memory.state_dict(), before)
    assert memory.read().isfinite().all()


# --- save and load -----------------------------------------------------------------------------------------


@also_without_ring
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at", [0, 1, 4, 5, 50])
def test_a_loaded_memory_goes_on_bit_for_bit(make, dtype, at):
    transcript = releases(60, 33, dtype=dtype)
    memory = filled(make(5), transcript[:at])
    copy = make(5)
    copy.load_state_dict(memory.state_dict())
    for release in transcript[at:]:
        memory.write(release)
        copy.write(release)
        assert torch.equal(copy.weights, memory.weights)
        assert torch.equal(copy.read(), memory.read())
    assert same_state(copy.state_dict(), memory.state_dict())


def spoil(state):
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(math.nan)


@also_without_ring
def test_a_saved_state_stands_by_itself(make, tmp_path):
    """It survives a file, and neither writing on nor changing the saved tensors reaches across."""
    first, more = releases(9, 20), releases(3, 20, seed=1)
    expected = filled(make(5), [*first, *more])
    memory, loaded = filled(make(5), first), make(5)
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    spoil(memory.state_dict())
    state = torch.load(tmp_path / "memory.pt", weights_only=True)
    loaded.load_state_dict(state)
    spoil(state)
    for one in (memory, loaded):
        assert same_state(filled(one, more).state_dict(), expected.state_dict())
        assert torch.equal(one.read(), expected.read())


@also_without_ring
def test_a_state_of_another_window_is_refused(make):
    memory = make(5)
    with pytest.raises(fodp.PrivacyError, match="window 8, this one 5"):
        memory.load_state_dict(filled(make(8), releases(3, 4)).state_dict())
    assert memory.read() is None


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("alpha", [0, 1.5, -0.1, math.nan, math.inf, "0.8", True, None], r"lie in \(0, 1\]|a finite number"),
        ("window", [0, -1, 2.5, 8.0, "8", True, None, math.nan], "a whole number of at least 1"),
        ("lam", [-0.01, math.nan, math.inf, "0"], "at least 0|a finite number"),
        ("tau", [-0.01, math.nan, math.inf, "0"], "at least 0|a finite number"),
        ("gamma", [0, 1.5, -0.1, math.nan], r"lie in \(0, 1\]|a finite number"),
        ("kappa", [0, -1, math.nan, math.inf], "above 0|a finite number"),
        ("zeta", [0, -1, math.nan, math.inf], "above 0|a finite number"),
        ("eps", [0, -1, math.nan, math.inf], "above 0|a finite number"),
    ],
)
def test_parameters_out_of_range_are_refused(name, values, rule):
    for value in values:
        with pytest.raises(fodp.PrivacyError, match=f"{name} must .*({rule})") as refusal:
            fodp.FractionalMemory(**{name: value})
        assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("edge", [{"alpha": 1}, {"gamma": 1}, {"lam": 0}, {"tau": 0}, {"window": 1}])
def test_the_edges_of_the_ranges_are_allowed(edge):
    filled(fodp.FractionalMemory(**edge), releases(3, 4)).read()


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, math.nan])
def test_decay_out_of_range_is_refused(decay):
    with pytest.raises(fodp.PrivacyError, match="decay must"):
        fodp.ExponentialMemory(window=8, decay=decay)


@every_memory
@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(5), torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_a_release_of_another_size_is_refused(make, window, wrong):
    memory = filled(make(window), releases(3, 4))
    before = memory.state_dict()
    with pytest.raises(fodp.PrivacyError, match="does not fit a memory of 4 entries"):
        memory.write(wrong)
    assert same_state(memory.state_dict(), before)


# --- the kernel at its ends --------------------------------------------------------------------------------


def test_tau_zero_is_the_limit_of_small_tau():
    """τ = 0 skips trend and scores; the kernel must be the same as with hardly any tempering."""
    transcript = releases(30, 20)
    none, tiny = (filled(fodp.FractionalMemory(lam=0.1, tau=tau), transcript) for tau in (0.0, 1e-12))
    torch.testing.assert_close(none.weights, tiny.weights, rtol=1e-9, atol=0)
    torch.testing.assert_close(none.read(), tiny.read())


@settings(max_examples=60)
@given(
    p=memory_parameters(),
    steps=st.integers(1, 60),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_are_an_average(p, steps, scale, seed):
    memory = filled(fodp.FractionalMemory(**p), releases(steps, 10, seed=seed, scale=scale))
    weights = memory.weights
    assert len(weights) == min(p["window"], steps + 1) - 1
    assert (weights >= 0).all()
    if len(weights):
        assert weights.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("tau", [1e3, 1e100, 1.7e308])
@pytest.mark.parametrize("lam", [0.0, 1e300])
@pytest.mark.parametrize("kappa", [1e-300, 1.0])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_extreme_tempering_stays_an_average(tau, lam, kappa, scale):
    memory = fodp.FractionalMemory(lam=lam, tau=tau, kappa=kappa, zeta=1e-300, eps=1e-300)
    # the trend nearly vanishes while the releases do not, so ν is as large as it gets
    for t in range(20):
        memory.write(torch.full((3,), scale * (-1) ** t))
        assert memory.weights.isfinite().all()
        assert memory.weights.sum().item() == pytest.approx(1, abs=1e-12)
        assert memory.read().isfinite().all()


def test_extreme_tempering_keeps_the_most_consistent():
    """γ = 1 makes the newest release the trend itself: only ν = 0 survives a huge τ."""
    memory = filled(fodp.FractionalMemory(gamma=1.0, tau=1e9, zeta=1e-9), releases(20, 50))
    assert memory.inconsistency[0] == 0
    assert memory.weights.tolist() == [1.0] + [0.0] * 6


def test_releases_of_zero():
    """No trend and no distance: χ = ν = 0, and the kernel is the fixed one."""
    memory = filled(fodp.FractionalMemory(tau=5.0), [torch.zeros(4)] * 10)
    assert memory.confidence == 0
    assert memory.inconsistency.tolist() == [0.0] * 7
    torch.testing.assert_close(memory.weights, filled(fodp.FractionalMemory(tau=0.0), [torch.ones(4)] * 10).weights)


# --- the scale of the noise --------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "std"), [(0.05, 1.1), (0.1, 1.0), (0.5, 30.0), (1.0, 0.01)])
def test_noise_floor_is_the_trend_of_pure_noise(gamma, std):
    """Monte Carlo: the trend's norm on noise, once it has forgotten its start, and so χ = ½ at ζ = floor."""
    size, forgotten = 20_000, round(5 / gamma)
    floor = noise_floor(std, size, gamma)
    memory = fodp.FractionalMemory(window=2, gamma=gamma, kappa=floor, zeta=floor)
    generator = torch.Generator().manual_seed(0)
    norms, confidences = [], []
    for t in range(forgotten + 100):
        memory.write(std * torch.randn(size, generator=generator))
        if t >= forgotten:
            norms.append(memory.state_dict()["trend"].norm().item())
            confidences.append(memory.confidence.item())
    assert np.mean(norms) == pytest.approx(floor, rel=0.02)
    assert np.mean(confidences) == pytest.approx(0.5, rel=0.01)


def test_noise_floor_at_gamma_one_is_a_release():
    assert noise_floor(2.0, 9, 1.0) == pytest.approx(6.0)


@pytest.mark.parametrize("size", [63, 65, 10**6])
def test_a_vector_of_another_size_is_refused_before_it_is_touched(size):
    memory = fodp.FractionalMemory(window=3)
    for _ in range(3):
        memory.write(torch.randn(64))
    given = torch.ones(size)
    for use in (memory.read, lambda out: memory.add_to_(out, 0.1), lambda out: memory.mix_in_(out, 0.1)):
        with pytest.raises(fodp.PrivacyError, match="64 entries"):
            use(given)
    assert torch.equal(given, torch.ones(size))


@pytest.mark.parametrize("seed", range(40))
def test_a_trend_that_cancels_to_nothing_has_length_zero(seed):
    memory = fodp.FractionalMemory(window=3, gamma=0.5)
    release = torch.randn(5, generator=torch.Generator().manual_seed(seed))
    for sign in (1, -1, 1, -1, 1):
        memory.write(sign * release)
        assert memory.read().isfinite().all()
        assert 0 <= float(memory.confidence) <= 1
