"""The noise as an outsider sees it: scale, tails and independence of what a run really releases.

`test_noise.py` tests the streams' parts. Here the same questions are put to the secure and the seeded stream as
runs use them: over steps, names, processes and resumes. Each test is shown to reject what it is there to reject.
"""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback
from fodp.ledger import Ledger
from fodp.noise import Streams
from fodp.noise.streams import PAIRS
from sessions_for_tests import session
from statistics_for_tests import ACCEPT, REJECT, correlation_p, exceedance_p, variance_p, variance_power

SIZE = 100_000
STD = 1.7
MODES = {"secure": (Streams.secure, REJECT), "seeded": (lambda: Streams.seeded(2026), ACCEPT)}


@pytest.fixture(params=MODES)
def mode(request):
    make, level = MODES[request.param]
    return make(), level


def draw(streams: Streams, step: int = 0, name: str = "noise", count: int = SIZE, std: float = STD) -> np.ndarray:
    return streams.normal_(torch.empty(count), std, step, name).double().numpy()


# ---- scale ---------------------------------------------------------------------------------------------------


@pytest.mark.rule(13)
def test_both_streams_have_the_right_scale_and_a_scale_three_percent_off_is_seen(mode):
    streams, level = mode
    sample = draw(streams)
    assert variance_p(sample, STD) > level
    for wrong in (0.97, 1.03):
        assert variance_p(sample, STD * wrong) < REJECT
        assert variance_p(draw(streams, step=1 + (wrong > 1), std=STD * wrong), STD) < REJECT


@pytest.mark.parametrize("wrong", [0.97, 1.03])
def test_the_power_of_the_test_of_scale(wrong):
    """A scale 3% off is missed less than once in ten million, by the formula; and by trial, never in 200 times."""
    assert variance_power(SIZE, wrong, REJECT) > 1 - 1e-7
    streams = Streams.seeded(1)
    missed = [variance_p(draw(streams, step, count=SIZE, std=wrong), 1.0) >= REJECT for step in range(200)]
    assert sum(missed) == 0


def test_the_smallest_error_of_scale_that_is_seen():
    """What the number of draws can and cannot tell: 2% in most trials, 0.5% hardly ever."""
    assert variance_power(SIZE, 1.02, REJECT) > 0.99
    assert variance_power(SIZE, 1.005, REJECT) < 0.01


def test_both_streams_are_normal(mode):
    streams, level = mode
    sample = draw(streams, count=2 * SIZE) / STD
    assert stats.kstest(sample, "norm").pvalue > level
    assert stats.ttest_1samp(sample, 0.0).pvalue > level
    assert stats.kstest(sample * 1.03, "norm").pvalue < 1e-4 < ACCEPT


# ---- tails ---------------------------------------------------------------------------------------------------


class ChosenBits:
    """A keystream whose radius words begin with `zero_bits` zero bits: it makes far tails common enough to count."""

    def __init__(self, zero_bits: int, narrow_bits: int = 0):
        self._words, self._step = Streams.seeded(zero_bits), itertools.count()
        self._zero_bits, self._narrow = zero_bits, narrow_bits

    def fill(self, buffer: np.ndarray, size: int) -> None:
        pairs = size // 12  # float32: 8 bytes for the radius, 4 for the angle
        raw = self._words.words(-(-size // 8), next(self._step), "bits").copy()
        radius = raw[:pairs].view(np.int64) >> self._zero_bits  # keeps the sign
        if self._narrow:
            radius |= (1 << (63 - self._narrow)) - 1
        raw[:pairs] = radius.view(np.uint64)
        buffer[:size] = raw.view(np.uint8)[:size]


def far_draws(std: float, zero_bits: int, narrow_bits: int = 0) -> np.ndarray:
    """Absolute values of normals whose radius words begin with zero bits, made as every release is."""
    streams = Streams.seeded(0)
    streams._keystream = lambda *place: ChosenBits(zero_bits, narrow_bits)
    return streams.normal_(torch.empty(40 * PAIRS), std, 0, "noise").abs().double().numpy()


def tail_p(sigmas: float, zero_bits: int, draws: np.ndarray) -> float:
    """P-value of the number of draws beyond `sigmas`."""
    assert 2.0**-zero_bits > np.exp(-(sigmas**2) / 2)  # the condition takes in every word that could exceed
    return exceedance_p(int((draws > sigmas).sum()), draws.size, float(2 * stats.norm.sf(sigmas)) * 2.0**zero_bits)


@pytest.mark.parametrize(("sigmas", "zero_bits"), [(6.0, 22), (6.5, 28), (7.0, 33), (8.0, 44)])
def test_tails_beyond_six_sigma_occur_as_they_should(sigmas, zero_bits):
    assert tail_p(sigmas, zero_bits, far_draws(1.0, zero_bits)) > ACCEPT


@pytest.mark.parametrize(("sigmas", "zero_bits"), [(6.0, 22), (7.0, 33), (8.0, 44)])
def test_tails_of_narrow_uniforms_are_rejected(sigmas, zero_bits):
    narrow = far_draws(1.0, zero_bits, narrow_bits=24)  # the bits of PyTorch's float32 normals
    assert tail_p(sigmas, zero_bits, narrow) < REJECT


def test_tails_three_percent_off_are_rejected():
    assert tail_p(6.0, 22, far_draws(1.03, 22)) < REJECT
    assert tail_p(6.0, 22, far_draws(0.97, 22)) < REJECT


# ---- independence --------------------------------------------------------------------------------------------


def test_steps_and_names_are_independent(mode):
    streams, level = mode
    samples = [draw(streams, step, name) for step in range(3) for name in ("noise", "noise.1", "count")]
    for first, second in itertools.combinations(samples, 2):
        assert correlation_p(first, second) > level / 10
        assert correlation_p(np.abs(first), np.abs(second)) > level / 10
    assert correlation_p(samples[0], samples[1] + 0.03 * samples[0]) < REJECT  # what the test can see


# Nothing but the system's entropy tells the processes apart.
CHILD = """
import json, os, time, torch
os.getpid, time.time, time.time_ns, time.monotonic_ns, time.perf_counter_ns = (lambda: 7,) * 5
from fodp.noise import Streams
draws = {s.__repr__(): s.normal_(torch.empty(20000), 1.0, 0, "noise").tolist() for s in (Streams(), Streams(7))}
print(json.dumps(draws))
"""


@pytest.mark.rule(13)
def test_processes_draw_independently_when_secure_and_alike_when_seeded():
    running = [subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) for _ in range(2)]
    drawn = [json.loads(process.communicate()[0]) for process in running]
    first, second = (np.array(one["Streams.secure()"]) for one in drawn)
    assert correlation_p(first, second) > REJECT
    assert np.mean(first == second) < 1e-3
    assert drawn[0]["Streams.seeded(7)"] == drawn[1]["Streams.seeded(7)"]


def tiny_run(steps: int = 6, seed: int | None = None, **changes):
    """A model of 20,000 parameters with no data to speak of: what it releases is the noise."""
    plan = fodp.Plan(
        sampling_rate=1e-9, steps=steps, lot_size=1, clip_norm=1.0, noise_multiplier=STD, delta=1e-5, method="dp-sgd",
        seed=seed, **changes,
    )  # fmt: skip
    data = TensorDataset(torch.zeros(2, 20_000), torch.zeros(2, dtype=torch.long))
    return nn.Linear(20_000, 1, bias=False), lambda model, batch: model(batch[0]).squeeze(1), data, plan


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_releases_noise_of_the_promised_scale_and_fresh_in_each_step(exact):
    run = session(*tiny_run(exact_noise=exact))
    releases = [run.take_step().double().numpy() for _ in range(6)]
    everything = np.concatenate(releases)
    assert variance_p(everything, STD) > REJECT
    assert variance_p(everything, STD * 1.03) < REJECT
    for first, second in itertools.combinations(releases, 2):
        assert correlation_p(first, second) > REJECT


class StopAfterThree(Callback):
    def on_step(self, trainer):
        if trainer.step == 3:
            trainer.interrupt()


@pytest.mark.rule(11)
def test_a_resumed_secure_run_draws_independent_noise(tmp_path):
    """The same step number after a resume is a fresh draw under a fresh key."""
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def trainer():
        model, loss, data, plan = tiny_run()
        made = fodp.Trainer(model, loss, data, plan, ledger=ledger, callbacks=[StopAfterThree()])
        seen = []
        take_step = made.session.take_step
        made.session.take_step = lambda: seen.append(take_step()) or seen[-1]
        return made, seen

    first, before = trainer()
    assert first.fit().reason == "interrupted"
    first.save(tmp_path / "checkpoint.pt")
    second, after = trainer()
    second.resume(tmp_path / "checkpoint.pt")
    second.fit()
    samples = [release.double().numpy() for release in before + after]
    assert len(samples) == 6
    for a, b in itertools.combinations(samples, 2):
        assert correlation_p(a, b) > REJECT
        assert not np.any(a == b) or np.mean(a == b) < 1e-3


@pytest.mark.rule(11)
def test_a_seeded_run_draws_the_same_whether_or_not_it_was_interrupted():
    whole = session(*tiny_run(seed=3))
    releases = [whole.take_step() for _ in range(6)]
    cut = session(*tiny_run(seed=3))
    cut.go_to(3)
    assert all(torch.equal(cut.take_step(), expected) for expected in releases[3:])
    assert correlation_p(releases[0].double().numpy(), releases[3].double().numpy()) > ACCEPT
