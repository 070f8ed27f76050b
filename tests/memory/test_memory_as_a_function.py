"""FO-DP-SGD mixes its memory in after the noise, in one pass: the same run as Algorithm 1 with every line apart."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp import testing
from fodp.data.models import cross_entropy
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.options import schedule

STEPS = 40
SETTINGS = {
    "defaults": {},
    "half memory, short window": dict(beta=0.5, window=4),
    "fixed kernel": dict(tau=0.0),
    "sum of exponentials": dict(compact="exponentials", tau=0.0, window=128),
    "schedule of beta": dict(beta=((0, 0.9), (15, 0.5), (30, 0.8))),
    "adaptive clipping": dict(quantile=0.5),
}
every_setting = pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
both_widths = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


class NoiseThenMemory(FODPSGD):
    """The release of β·s, then (1-β)·u from a reading of its own, then what it became is written."""

    name = "noise-then-memory"

    def step(self, step, memory):
        r, std, beta = self.query(step)
        release = step.release(r, std)
        u = memory.read()
        if u is not None:
            release = release + (1 - beta) * u.to(release.dtype)
        memory.write(release)
        return release

    def query(self, step):
        """β·s of a lot, the noise it needs, and β: lines 3 and 4."""
        beta = schedule.value_at(self.params.beta, step.number)
        lot = step.draw()
        gradients = step.gradients(lot)
        r = beta * gradients.clipped_sum(step.clip_norm)
        return r, step.adapt_clip(gradients, r, std=step.plan.noise_multiplier * step.clip_norm), beta


class MemoryThenNoise(NoiseThenMemory):
    """Algorithm 1 in the order of its lines: r = β·s + (1-β)·u has the bound of β·s, then its noise."""

    name = "memory-then-noise"

    def step(self, step, memory):
        r, std, beta = self.query(step)
        u = memory.read()
        if u is not None:
            r = r + (1 - beta) * u.to(r.dtype)
        release = step.release(r, std)
        memory.write(release)
        return release


class MixThenWrite(NoiseThenMemory):
    """Two passes over the window, one that mixes it in and one that remembers."""

    name = "mix-then-write"

    def step(self, step, memory):
        r, std, beta = self.query(step)
        release = memory.add_to_(step.release(r, std), 1 - beta)
        memory.write(release)
        return release


def trainer(params, dtype, step=None, **public):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    data = TensorDataset(torch.randn(200, 40, dtype=dtype), torch.randint(3, (200,)))
    numbers = dict(sampling_rate=0.2, lot_size=40, clip_norm=1.0, noise_multiplier=1.1, delta=1e-5, seed=7)
    with nullcontext() if step is None else testing.registered(step):
        method = "fo-dp-sgd" if step is None else step.name
        plan = fodp.Plan(method=method, params={"lr": 0.7} | params, steps=STEPS, **numbers | public)
        return fodp.Trainer(model, cross_entropy, data, plan)


def trajectory(*args, **public):
    made, points = trainer(*args, **public), []
    for _ in range(STEPS):
        made.take_step()
        points.append(made.session.parameters().clone())
    return torch.stack(points)


@every_setting
@both_widths
@pytest.mark.parametrize("step", [NoiseThenMemory, MemoryThenNoise])
def test_the_step_is_algorithm_1_whichever_addition_comes_first(params, dtype, step):
    """Equal but for the rounding of sums in another order."""
    found, expected = trajectory(params, dtype), trajectory(params, dtype, step)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_setting
@both_widths
def test_one_pass_is_to_the_last_bit_the_mixing_and_then_the_writing(params, dtype):
    assert torch.equal(trajectory(params, dtype), trajectory(params, dtype, MixThenWrite))


def test_exact_noise_gives_the_same_run_but_for_one_rounding():
    found, expected = (trajectory({}, torch.float32, step, exact_noise=True) for step in (None, MemoryThenNoise))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every_setting
def test_the_memory_does_not_hold_the_vector_it_was_given(params):
    memory = trainer(params, torch.float32).session.method.params.memory(1.0)
    for number in range(5):
        given = torch.randn(100, generator=torch.Generator().manual_seed(number))
        assert memory.mix_in_(given, 0.1) is given
        before = memory.read()
        given.zero_()
        assert torch.equal(memory.read(), before)


@every_setting
def test_what_is_remembered_is_the_result_or_what_it_began_as(params):
    def memory():
        return trainer(params, torch.float32).session.method.params.memory(1.0)

    result, start, by_hand = memory(), memory(), (memory(), memory())
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        z = torch.randn(100, generator=generator)
        mixed, scaled = result.mix_in_(z.clone(), 0.3), start.remember_then_mix_(z.clone(), 0.7, 0.3)
        expected = [by_hand[0].add_to_(z.clone(), 0.3), by_hand[1].add_to_(0.7 * z, 0.3)]
        assert torch.equal(mixed, expected[0])
        assert torch.equal(scaled, expected[1])
        by_hand[0].write(mixed)
        by_hand[1].write(z)
        for memory_, other in zip((result, start), by_hand, strict=True):
            assert torch.equal(memory_.read(), other.read())
            assert torch.equal(memory_.weights, other.weights)
