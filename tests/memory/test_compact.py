"""Memories that cost less: what they remember is off by no more than they say, and they are asked for by name."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fodp
from fodp.methods.fo_dp_sgd import FODPSGDParams


def releases(count, size, seed=0, dtype=torch.float32):
    """Noise around a slow drift, as releases are; every third one very large or very small."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(size=(count, size)).cumsum(0) / 10
    scale = np.array([1.0, 1e3, 1e-3])[np.arange(count) % 3, None]
    return [torch.from_numpy(row).to(dtype) for row in scale * (drift + rng.normal(size=(count, size)))]


def bytes_of(memory):
    return sum(v.numel() * v.element_size() for v in memory.state_dict().values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize(("saved", "loading"), list(itertools.permutations([dict(), dict(terms=True)], 2)), ids=str)
def test_a_state_in_another_form_is_refused(saved, loading):
    def make(terms=False):
        settings = dict(window=64, lam=0.1)
        return fodp.ExponentialSumMemory(**settings) if terms else fodp.FractionalMemory(tau=0.0, **settings)

    memory, other = make(**saved), make(**loading)
    memory.write(torch.ones(4))
    with pytest.raises(fodp.PrivacyError, match="another form"):
        other.load_state_dict(memory.state_dict())
    assert other.read() is None


# --- a sum of exponentials ---------------------------------------------------------------------------------

# Settings, and how many terms at most they may take.
SUMS = [
    (dict(), 2),
    (dict(tolerance=0.005), 5),
    (dict(window=64, lam=0.1), 2),
    (dict(window=8, lam=1.0, alpha=0.5), 3),
    (dict(window=200, lam=0.02, alpha=0.3), 4),
    (dict(window=300, lam=0.05, alpha=1.0), 1),
    (dict(window=50, lam=1e300), 1),
]


@pytest.mark.parametrize(("settings", "terms"), SUMS, ids=str)
def test_a_sum_of_exponentials_is_within_its_stated_error_at_every_step(settings, terms):
    """Weights by lag and what is read, against the exact memory, while the window fills and long after."""
    memory = fodp.ExponentialSumMemory(**settings)
    exact = fodp.FractionalMemory(memory.alpha, memory.window, lam=memory.lam, tau=0.0)
    assert 0 <= memory.error <= memory.tolerance
    assert len(memory.decays) <= terms
    largest = worst = 0.0
    for release in releases(700, 20, dtype=torch.float64):
        memory.write(release)
        exact.write(release)
        found, expected = memory.weights, exact.weights
        assert (found >= 0).all()
        assert found.sum().item() == pytest.approx(1, abs=1e-12)
        longest = max(len(found), len(expected))
        padded = [torch.nn.functional.pad(w, (0, longest - len(w))) for w in (found, expected)]
        worst = max(worst, (padded[0] - padded[1]).abs().sum().item())
        largest = max(largest, release.norm().item())
        assert (memory.read() - exact.read()).norm().item() <= (memory.error + 1e-9) * largest
    assert worst == pytest.approx(memory.error, abs=1e-5)  # it is reached: the statement is not an empty one


def test_a_sum_of_exponentials_reads_what_its_weights_say():
    memory, transcript = fodp.ExponentialSumMemory(window=64, lam=0.1), releases(150, 30)
    for t, release in enumerate(transcript, start=1):
        memory.write(release)
        past = torch.stack([transcript[t - j] for j in range(1, len(memory.weights) + 1)]).double()
        allowed = 3e-6 * past.abs().max().item()
        torch.testing.assert_close(memory.read().double(), memory.weights @ past, rtol=1e-4, atol=allowed)


def test_a_sum_of_exponentials_costs_the_same_whatever_the_window():
    sizes = set()
    for window in (128, 512, 5000):
        memory = fodp.ExponentialSumMemory(window=window)
        for release in releases(3, 1000):
            memory.write(release)
        sizes.add(bytes_of(memory))
    assert sizes == {2 * 1000 * 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(window=32), r"window=32, lam=0.05 by 0\.1\d\d, more than 0.05: raise window or lam"),
        (dict(window=500, lam=0.0), "by 0.4.*raise window or lam"),
        (dict(tolerance=1e-9), "more than 1e-09"),
        (dict(window=1), "window must be a whole number of at least 2"),
        (dict(window=10_001), "window must be at most 10000"),
        (dict(alpha=0.0), "alpha must"),
        (dict(lam=-1.0), "lam must"),
        (dict(tolerance=1.0), "tolerance must"),
    ],
    ids=str,
)
def test_kernels_that_a_few_exponentials_miss_are_refused(settings, message):
    with pytest.raises(fodp.PrivacyError, match=message):
        fodp.ExponentialSumMemory(**settings)


def test_the_table_in_the_docs_is_what_is_fitted():
    page = (Path(__file__).parents[2] / "docs/mechanism.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+|refused) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 4
    for alpha, lam, window, terms, error in rows:
        settings = dict(alpha=float(alpha), lam=float(lam), window=int(window))
        if terms == "refused":
            with pytest.raises(fodp.PrivacyError, match=f"by {error}, more"):
                fodp.ExponentialSumMemory(**settings)
        else:
            memory = fodp.ExponentialSumMemory(**settings)
            assert (len(memory.decays), f"{memory.error:.3f}") == (int(terms), error)


# --- asked for by name -------------------------------------------------------------------------------------


def test_compact_is_off_by_default():
    assert FODPSGDParams().compact is None
    assert type(FODPSGDParams().memory(1.0)) is fodp.FractionalMemory
    few = FODPSGDParams(compact="exponentials", tau=0.0, window=128, compact_error=0.005).memory(1.0)
    assert isinstance(few, fodp.ExponentialSumMemory)
    assert few.error <= 0.005


@pytest.mark.parametrize(
    ("params", "wrong", "message"),
    [
        (FODPSGDParams, dict(compact="float16"), "compact must be one of exponentials"),
        (FODPSGDParams, dict(compact=True), "compact must be one of"),
        (FODPSGDParams, dict(compact="exponentials"), "needs a fixed kernel: set tau=0, got 0.1"),
        (FODPSGDParams, dict(compact="exponentials", tau=0.0), "exponentials miss the weights"),
        (FODPSGDParams, dict(compact_error=0.0), "compact_error must"),
        (FODPSGDParams, dict(compact="exponentials", tau=0.0, window=0), "window must"),
    ],
    ids=str,
)
def test_a_compact_memory_that_cannot_be_is_refused(params, wrong, message):
    with pytest.raises(fodp.PrivacyError, match=message):
        params(**wrong)
