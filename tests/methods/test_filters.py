"""Filters on the transcript: DOPPLER's low-pass, memory after the release, and what they make of the noise."""

import math

import pytest
import torch
from scipy.signal import lfilter

import fodp
from fodp.memory import ExponentialMemory, FractionalMemory, UniformMemory
from fodp.options.filter import LowPass, MemoryAfterRelease, feedback_gains

# Coefficients published with DOPPLER and DP-PMLF, and their noise gain Σ h² (BASELINES.md 9.1).
PUBLISHED = [
    ((-0.9,), (0.1,), 0.0526),
    ((-0.9,), (0.05, 0.05), 0.0500),
    ((-0.9,), (0.15, -0.05), 0.0605),
    ((-0.7, -0.2), (0.05, 0.05), 0.0417),
    ((-0.6,), (0.4,), 0.25),
    ((-0.6,), (0.2, 0.2), 0.20),
    ((-0.6,), (0.5, -0.1), 0.3125),
]
OTHERS = [((), (1.0,)), ((), (0.5, 0.3, 0.2)), ((-1.5, 0.6), (0.1,))]
# The default of DOPPLER's own code; its digits leave a gain of 0.9986, which the start-up correction takes out.
OTHERS.append(((-1.98343, 0.98550), (1.633e-4, 3.267e-4, 1.633e-4)))


def signal(steps: int = 40, size: int = 3) -> torch.Tensor:
    return torch.randn(steps, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def through(filter, inputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([filter(x) for x in inputs])


class TestLowPass:
    @pytest.mark.parametrize(("a", "b"), [(a, b) for a, b, _ in PUBLISHED] + OTHERS)
    def test_is_scipys_filter_with_start_up_correction(self, a, b):
        inputs = signal()
        raw = lfilter(b, (1.0, *a), inputs.numpy(), axis=0)
        correction = lfilter(b, (1.0, *a), torch.ones(len(inputs)).double().numpy())
        expected = torch.from_numpy(raw / correction[:, None])
        assert torch.allclose(through(LowPass(a, b), inputs), expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(("a", "b"), [(a, b) for a, b, _ in PUBLISHED] + OTHERS)
    def test_a_constant_passes_unchanged_from_the_first_step(self, a, b):
        inputs = torch.full((30, 2), 3.5, dtype=torch.float64)
        assert torch.allclose(through(LowPass(a, b), inputs), inputs)

    @pytest.mark.parametrize(("a", "b", "gain"), PUBLISHED)
    def test_noise_gain_of_the_published_coefficients(self, a, b, gain):
        low_pass = LowPass(a, b)
        through(low_pass, signal(400, 1))
        assert sum(low_pass.noise_gains()) == pytest.approx(gain, abs=5e-5)

    @pytest.mark.parametrize("steps", [1, 2, 5, 20])
    @pytest.mark.parametrize(("a", "b"), [((-0.9,), (0.1,)), ((-0.6,), (0.5, -0.1)), *OTHERS])
    def test_noise_gains_are_the_shares_of_the_noise_so_far(self, a, b, steps):
        """Exactly: each unit impulse's share of the output, squared, the newest first."""
        low_pass = LowPass(a, b)
        shares = through(low_pass, torch.eye(steps, dtype=torch.float64))[-1]
        gains = [*low_pass.noise_gains(), *[0.0] * steps][:steps]
        assert gains == pytest.approx(shares.square().flip(0).tolist(), rel=1e-6)

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            ((-0.9,), (0.2,), "unit gain"),
            ((-0.9,), (), "unit gain"),
            ((0.9,), (0.1,), "unit gain"),
            ((-1.0,), (0.0,), "not stable"),
            ((-2.1, 1.2), (0.1,), "not stable"),
            ((-0.9,), (0.0, 0.1), "above 0 from the first step"),
            ((), (-1.0, 2.0), "above 0 from the first step"),
            ((-0.9,), (math.nan,), "finite number"),
            ((-0.9,), ("0.1",), "finite number"),
        ],
    )
    def test_what_is_not_a_low_pass_filter_is_refused(self, a, b, message):
        with pytest.raises(fodp.PrivacyError, match=message):
            LowPass(a, b)


def memory(window: int = 4) -> MemoryAfterRelease:
    return MemoryAfterRelease(0.7, FractionalMemory(window=window, tau=0.0))


class TestMemoryAfterRelease:
    def test_mixes_the_release_with_the_memory_of_earlier_releases(self):
        inputs = signal()
        kernel = [(j + 1) ** -0.2 * math.exp(-0.05 * j) for j in (1, 2, 3)]  # α = 0.8, λ = 0.05
        for t, output in enumerate(through(memory(), inputs)):
            weights = kernel[:t]
            u = sum((w / sum(weights) * inputs[t - j] for j, w in enumerate(weights, 1)), torch.zeros(3))
            assert torch.allclose(output, 0.7 * inputs[t] + 0.3 * u)

    @pytest.mark.parametrize("steps", [1, 2, 3, 10])
    def test_noise_gains_are_those_of_the_last_mix(self, steps):
        mixing = memory()
        shares = through(mixing, torch.eye(steps, dtype=torch.float64))[-1]
        gains = [*mixing.noise_gains(), *[0.0] * steps][:steps]
        assert gains == pytest.approx(shares.square().flip(0).tolist())

    def test_beta_out_of_range_is_refused(self):
        with pytest.raises(fodp.PrivacyError, match="beta"):
            MemoryAfterRelease(1.5, FractionalMemory())


@pytest.mark.parametrize("make", [lambda: LowPass((-0.7, -0.2), (0.05, 0.05)), memory])
class TestEveryFilter:
    def test_goes_on_elsewhere_bit_for_bit(self, make):
        inputs = signal()
        expected = through(make(), inputs)
        first, second = make(), make()
        through(first, inputs[:7])
        second.load_state_dict(first.state_dict())
        through(first, -inputs)  # must not reach what was saved
        assert torch.equal(through(second, inputs[7:]), expected[7:])

    def test_later_changes_of_an_input_or_output_change_nothing(self, make):
        inputs = signal()
        expected = through(make(), inputs)
        careless = make()
        for t, x in enumerate(inputs):
            mine = x.clone()
            output = careless(mine)
            assert torch.equal(output, expected[t])
            mine.fill_(99.0)
            output.fill_(99.0)


@pytest.mark.parametrize("beta", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("make", [lambda: UniformMemory(5), lambda: ExponentialMemory(8, 0.6)])
def test_feedback_gain_is_what_fo_makes_of_pure_noise(make, beta):
    """Monte Carlo: s̃_t = z_t + (1-β)·u with z standard normal, long after the start."""
    generator = torch.Generator().manual_seed(1)
    remembered = make()
    for _ in range(150):
        noise = torch.randn(40_000, generator=generator)
        u = remembered.read()
        release = noise if u is None else noise + (1 - beta) * u
        remembered.write(release)
    assert sum(feedback_gains(beta, remembered.weights)) == pytest.approx(release.var().item(), rel=0.04)


def test_feedback_gain_without_feedback_is_one():
    assert sum(feedback_gains(1.0, torch.ones(3) / 3)) == 1
    assert sum(feedback_gains(0.3, torch.ones(0))) == 1
