"""Streams: the right distribution, far tails included; independent; secret when secure; never used twice.

Every statistical test is a function that gives a p-value, and is shown to accept the streams and to reject
something wrong. Seeds are fixed, so the tests are deterministic: ACCEPT guards against bad luck once only.
"""

import copy
import io
import itertools
import os
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from fodp.errors import PrivacyError
from fodp.noise import Streams
from fodp.noise.streams import PAIRS, angles, radii
from statistics_for_tests import ACCEPT, REJECT, correlation_p, exceedance_p, variance_p, variance_power


def draw(seed: int = 0, count: int = 100_000, std: float = 1.0, step: int = 0, name: str = "noise"):
    return Streams.seeded(seed).normal_(torch.empty(count), std, step, name).double().numpy()


def normals_of(radius_words: np.ndarray, angle_words: np.ndarray) -> np.ndarray:
    """The r·cos(a) half of what the streams make of these words, in float32."""
    radius = radii(radius_words, np.empty(radius_words.size), np.empty(radius_words.size, np.float32))
    return radius * np.cos(angles(angle_words, np.empty(angle_words.size, np.float32)))


# ---- distribution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 1.1, 37.5, 1e-3])
def test_variance_accepts_the_scale_and_rejects_three_percent(std):
    count = 100_000
    assert variance_power(count, 1.03, REJECT) > 0.999
    assert variance_power(count, 0.97, REJECT) > 0.999
    sample = draw(seed=11, count=count, std=std)
    assert variance_p(sample, std) > ACCEPT
    assert variance_p(sample * 1.03, std) < REJECT
    assert variance_p(sample * 0.97, std) < REJECT
    assert variance_p(draw(seed=11, count=count, std=1.03 * std), std) < REJECT


def test_variance_of_many_streams_is_uniformly_distributed_in_its_p_value():
    p_values = [variance_p(draw(seed, 2_000), 1.0) for seed in range(300)]
    assert stats.kstest(p_values, "uniform").pvalue > ACCEPT


@pytest.mark.parametrize("count", [400_000, 2 * PAIRS, 2 * PAIRS + 1])
def test_kolmogorov_smirnov(count):
    assert stats.kstest(draw(5, count), "norm").pvalue > ACCEPT


def test_kolmogorov_smirnov_rejects_a_wrong_scale_and_a_wrong_shape():
    sample = draw(5, 400_000)
    assert stats.kstest(1.03 * sample, "norm").pvalue < REJECT
    bell = 2 * (np.random.default_rng(0).random((400_000, 3)).sum(axis=1) - 1.5)  # variance 1, not normal
    assert stats.kstest(bell, "norm").pvalue < REJECT


def test_mean_is_zero():
    sample = draw(8, 1_000_000)
    assert stats.ttest_1samp(sample, 0.0).pvalue > ACCEPT
    assert stats.ttest_1samp(sample + 0.01, 0.0).pvalue < REJECT


@pytest.mark.parametrize(("sigmas", "enough"), [(4.0, 1000), (5.0, 10)])
def test_tails_in_fifty_million_draws(fifty_million, sigmas, enough):
    count, tail_counts = fifty_million
    assert tail_counts[sigmas] > enough
    assert exceedance_p(tail_counts[sigmas], count, 2 * stats.norm.sf(sigmas)) > ACCEPT


def test_tail_test_rejects_three_percent(fifty_million):
    count, tail_counts = fifty_million
    assert exceedance_p(tail_counts[4.0 * 1.03], count, 2 * stats.norm.sf(4.0)) < REJECT


@pytest.fixture(scope="module")
def fifty_million():
    streams, buffer = Streams.seeded(21), torch.empty(500_000)
    tail_counts = dict.fromkeys((4.0, 4.0 * 1.03, 5.0), 0)
    for step in range(100):
        size = streams.normal_(buffer, 1.0, step, "tails").abs_()
        candidates = size[size > 4.0]
        for sigmas in tail_counts:
            tail_counts[sigmas] += int((candidates > sigmas).sum())
    return 100 * buffer.numel(), tail_counts


def deep_tail_p(transform: Callable[[np.ndarray], np.ndarray], sigmas: float, zero_bits: int) -> float:
    """P-value of the draws beyond `sigmas`, given that the radius word starts with `zero_bits` zero bits.

    Beyond 6σ lie two in a thousand million draws. But only radii beyond 6 get there, that is only words whose
    leading bits are zero, and given those bits exceeding is common enough to count.
    """
    streams, count = Streams.seeded(3), 1_000_000
    words = streams.words(count, zero_bits, "radius").view(np.int64)
    shifted = words >> zero_bits  # keeps the sign; |word| < 2^(63 - zero_bits)
    assert 2.0**-zero_bits > np.exp(-(sigmas**2) / 2)  # the condition takes in all that could exceed
    angle_words = streams.words(count, zero_bits, "angle").view(np.int32)[:count]
    found = int((np.abs(normals_of(transform(shifted), angle_words)) > sigmas).sum())
    return exceedance_p(found, count, float(2 * stats.norm.sf(sigmas)) * 2.0**zero_bits)


@pytest.mark.parametrize(("sigmas", "zero_bits"), [(5.0, 15), (6.0, 20), (7.0, 30), (8.0, 40)])
def test_tails_to_eight_sigma_have_the_right_frequency(sigmas, zero_bits):
    assert deep_tail_p(lambda words: words, sigmas, zero_bits) > ACCEPT


@pytest.mark.parametrize(("sigmas", "zero_bits"), [(6.0, 20), (7.0, 30), (8.0, 40)])
def test_tail_test_rejects_narrow_uniforms(sigmas, zero_bits):
    def narrow(words: np.ndarray) -> np.ndarray:  # 24-bit uniforms, as in PyTorch's float32 generator
        return words | ((1 << 39) - 1)

    assert deep_tail_p(narrow, sigmas, zero_bits) < REJECT


def test_extreme_words_give_finite_numbers():
    words = np.array([0, 1, -1, 2**63 - 1, -(2**63), 12345], dtype=np.int64)
    for dtype in (np.float32, np.float64):
        radius = radii(words, np.empty(6), np.empty(6, dtype))
        assert np.isfinite(radius).all()
        assert radius[0] == pytest.approx(np.sqrt(2 * 64 * np.log(2)))  # 9.42: the farthest there is
        assert radius[1] == radius[2] < radius[0]
        assert np.all(radius >= 0)
        assert radius[3] < 1e-6
        assert radius[4] < 1e-6
    for narrow in (np.int32, np.int64):
        ends = np.array([np.iinfo(narrow).min, 0, np.iinfo(narrow).max], dtype=narrow)
        assert angles(ends, np.empty(3)) == pytest.approx([-np.pi, 0, np.pi])


def test_angles_are_uniform_and_independent_of_radii():
    block = draw(17, 2 * PAIRS)
    cosine, sine = block[:PAIRS], block[PAIRS:]
    assert stats.kstest(np.arctan2(sine, cosine), "uniform", (-np.pi, 2 * np.pi)).pvalue > ACCEPT
    assert stats.kstest((cosine**2 + sine**2) / 2, "expon").pvalue > ACCEPT
    assert correlation_p(cosine, sine) > ACCEPT
    assert correlation_p(cosine**2, sine**2) > ACCEPT
    unit = np.hypot(cosine, sine)  # a radius that is always one would show
    assert correlation_p((cosine / unit) ** 2, (sine / unit) ** 2) < REJECT


def test_float64_normals_are_wide():
    sample = Streams.seeded(2).normal_(torch.empty(100_001, dtype=torch.float64), 2.0, 0, "noise").numpy()
    assert variance_p(sample, 2.0) > ACCEPT
    assert stats.kstest(sample / 2, "norm").pvalue > ACCEPT
    assert np.mean(sample == sample.astype(np.float32)) < 1e-3  # more than float32 digits


# ---- independence ----------------------------------------------------------------------------------------

PLACES = [
    (0, 0, "noise"),
    (0, 1, "noise"),
    (0, 2**32, "noise"),
    (0, 0, "mask"),
    (0, 0, "noise1"),
    (1, 0, "noise"),
]


def test_streams_of_different_seeds_steps_and_names_are_uncorrelated():
    samples = [draw(seed, 200_000, 1.0, step, name) for seed, step, name in PLACES]
    for first, second in itertools.combinations(samples, 2):
        assert correlation_p(first, second) > ACCEPT
        assert correlation_p(first**2, second**2) > ACCEPT
    assert correlation_p(samples[0], samples[1] + 0.03 * samples[0]) < REJECT  # what the test can see


def test_streams_do_not_overlap_at_any_shift():
    """All 64-bit words are different, but for a chance of 1e-8; streams with a common stretch would show."""
    streams = Streams.seeded(4)
    words = [streams.words(20_000, step, name) for step in range(5) for name in ("a", "b", "ab")]
    assert np.unique(np.concatenate(words)).size == 15 * 20_000


def test_consecutive_draws_are_uncorrelated():
    sample = draw(9, 500_000)
    for lag in (1, 2, PAIRS - 1, PAIRS, PAIRS + 1, 2 * PAIRS, 4 * PAIRS):
        assert correlation_p(sample[:-lag], sample[lag:]) > ACCEPT
        assert correlation_p(sample[:-lag] ** 2, sample[lag:] ** 2) > ACCEPT


def test_normals_words_and_keys_of_one_name_are_different_streams():
    streams = Streams.seeded(6)
    words = streams.words(1500, 3, "x")
    # normals made of these words, in the layout of a block of 2000
    from_words = normals_of(words[:1000].view(np.int64), words[1000:].view(np.int32))
    normals = streams.normal_(torch.empty(2000), 1.0, 3, "x")[:1000].numpy()
    assert not np.any(np.isclose(from_words, normals, rtol=1e-6))
    assert streams.record_key(3, "x") not in words.tobytes()


def test_words_are_uniform():
    words = Streams.seeded(7).words(100_000, 0, "mask")
    assert words.dtype == np.uint64
    assert stats.kstest(words / 2.0**64, "uniform").pvalue > ACCEPT
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(axis=0)  # each bit place by itself
    assert min(exceedance_p(int(k), words.size, 0.5) for k in ones) > ACCEPT / 64


def test_keys_for_records_are_wide_and_distinct():
    keys = {Streams.seeded(s).record_key(t, n) for s in range(10) for t in range(100) for n in ("mask", "other")}
    assert len(keys) == 2000
    assert all(len(key) == 32 for key in keys)


# ---- seeded: repeatable ----------------------------------------------------------------------------------


@pytest.mark.rule(11)
def test_a_seeded_stream_repeats_whatever_was_drawn_before():
    streams = Streams.seeded(3)
    streams.normal_(torch.empty(77), 1.0, 9, "noise")
    streams.words(10, 4, "noise")
    again = streams.normal_(torch.empty(1000), 1.0, 4, "noise")
    assert torch.equal(again, streams.normal_(torch.empty(1000), 1.0, 4, "noise"))
    assert torch.equal(again, Streams.seeded(3).normal_(torch.empty(1000), 1.0, 4, "noise"))


def test_seeded_streams_stay_what_they_were():
    """Recorded runs must stay repeatable: if this fails on purpose, the change log has to say so."""
    streams = Streams.seeded(0)
    assert streams.words(2, 0, "mask").tolist() == [6871906644077181798, 9954384223060935791]
    assert streams.record_key(5, "mask.record").hex()[:16] == "25f05e7e8f0cedbf"
    normals = [-1.173841, 0.166362, 0.60247, -0.23224, -0.389499]
    assert streams.normal_(torch.empty(5), 1.0, 1, "noise").tolist() == pytest.approx(normals, rel=1e-5)


def test_every_bit_of_the_seed_counts():
    """PyTorch's CPU generator keeps 32 bits of a seed; these keep all."""
    seeds = [5, 5 + 2**32, 5 + 2**63, 5 + 2**64, 5 + 2**200, 0, 256, 65536]
    first = {int(Streams.seeded(seed).words(1, 0, "mask")[0]) for seed in seeds}
    assert len(first) == len(seeds)
    assert [Streams.seeded(seed).seed for seed in seeds] == seeds


def test_shapes_and_layouts_draw_the_same():
    streams = Streams.seeded(1)
    flat = streams.normal_(torch.empty(60), 1.0, 0, "noise")
    assert torch.equal(streams.normal_(torch.empty(3, 4, 5), 1.0, 0, "noise").view(-1), flat)
    strided = torch.zeros(60, 2)[:, 0]
    assert streams.normal_(strided, 1.0, 0, "noise") is strided
    assert torch.equal(strided, flat)
    parameter = torch.nn.Parameter(torch.empty(60))
    assert torch.equal(streams.normal_(parameter, 1.0, 0, "noise").detach(), flat)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 2 * PAIRS - 1, 2 * PAIRS, 2 * PAIRS + 1, 4 * PAIRS + 3])
def test_every_place_is_filled(count):
    out = torch.full((count,), torch.nan)
    Streams.seeded(1).normal_(out, 1.0, 0, "noise")
    assert torch.isfinite(out).all()
    assert len(out.unique()) > 0.99 * count - 1


def test_scale_multiplies():
    unit = draw(3, 1000)
    np.testing.assert_allclose(draw(3, 1000, std=2.5), 2.5 * unit, rtol=1e-6)
    np.testing.assert_allclose(draw(3, 1000, std=1e-30), 1e-30 * unit, rtol=1e-5)
    np.testing.assert_allclose(draw(3, 1000, std=1e30), 1e30 * unit, rtol=1e-5)


def test_zero_scale_fills_zeros():
    assert torch.equal(Streams.secure().normal_(torch.ones(5), 0.0, 0, "noise"), torch.zeros(5))


def test_threads_do_not_disturb_each_other():
    streams, count = Streams.seeded(1), 300_000
    alone = [streams.normal_(torch.empty(count), 1.0, step, "noise") for step in range(4)]
    together = [torch.empty(count) for _ in range(4)]

    def work(step: int) -> None:
        for _ in range(10):
            streams.normal_(together[step], 1.0, step, "noise")

    threads = [threading.Thread(target=work, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# ---- secure: secret, never twice -------------------------------------------------------------------------


@pytest.mark.rule(13)
def test_secure_streams_differ_between_instances_and_know_no_seed():
    words = np.concatenate([Streams.secure().words(1000, 0, "mask") for _ in range(20)])
    assert np.unique(words).size == words.size
    assert Streams.secure().seed is None
    assert Streams().seed is None  # secure is the default


@pytest.mark.rule(13)
def test_secure_normals_have_the_right_scale():
    # not a fixed seed: the level makes a false alarm less likely than a hardware fault
    sample = Streams.secure().normal_(torch.empty(100_000), 1.1, 0, "noise").double().numpy()
    assert variance_p(sample, 1.1) > REJECT
    assert variance_p(sample, 1.1 * 1.03) < REJECT


@pytest.mark.rule(11)
@pytest.mark.parametrize(
    "leak",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda s: torch.save({"streams": s}, io.BytesIO())],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_a_secure_key_cannot_leave_the_process(leak):
    with pytest.raises(PrivacyError, match=r"Streams\.secure\(\)"):
        leak(Streams.secure())


@pytest.mark.rule(11)
def test_no_text_shows_the_key():
    streams = Streams.secure()
    text = f"{streams} {streams!r} {[streams]}"
    assert text == "Streams.secure() Streams.secure() [Streams.secure()]"
    assert repr(Streams.seeded(5)) == "Streams.seeded(5)"


def test_seeded_streams_can_be_copied():
    streams = Streams.seeded(5)
    for other in (copy.deepcopy(streams), pickle.loads(pickle.dumps(streams))):
        assert other.seed == 5
        assert np.array_equal(other.words(9, 0, "mask"), streams.words(9, 0, "mask"))


@pytest.mark.rule(11)
@pytest.mark.parametrize("step", [7, 6, 0])
def test_secure_steps_increase_strictly_per_name(step):
    streams, out = Streams.secure(), torch.empty(10)
    streams.normal_(out, 1.0, 7, "noise")
    streams.words(10, 7, "noise")
    with pytest.raises(PrivacyError, match="already drawn up to step 7"):
        streams.normal_(out, 1.0, step, "noise")
    with pytest.raises(PrivacyError, match="already drawn up to step 7"):
        streams.words(10, step, "noise")
    streams.normal_(out, 1.0, step, "another")
    streams.normal_(out, 1.0, 8, "noise")
    assert streams.record_key(step, "noise") == streams.record_key(step, "noise")


@pytest.mark.rule(11)
def test_secure_noise_of_many_steps_never_repeats():
    streams, out = Streams.secure(), torch.empty(4, dtype=torch.float64)
    seen = {tuple(streams.normal_(out, 1.0, step, "noise").tolist()) for step in range(2000)}
    assert len(seen) == 2000


def in_child(work: Callable[[], np.ndarray]) -> np.ndarray:
    """What `work` gives in a forked child."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, work().tobytes())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        result = np.frombuffer(pipe.read(), dtype=np.uint64)
    os.waitpid(child, 0)
    return result


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@needs_fork
@forking
@pytest.mark.rule(11)
def test_a_forked_child_takes_a_fresh_key():
    streams = Streams.secure()
    streams.words(100, 0, "mask")
    children = [in_child(lambda: streams.words(100, 1, "mask")) for _ in range(2)]
    grandchild = in_child(lambda: in_child(lambda: streams.words(100, 1, "mask")))
    mine = streams.words(100, 1, "mask")  # the parent goes on under its key
    everything = np.concatenate([mine, *children, grandchild])
    assert everything.size == 400
    assert np.unique(everything).size == 400


@needs_fork
@forking
@pytest.mark.rule(13)
def test_streams_made_in_forked_workers_differ(monkeypatch):
    """Made after the fork, as data loaders' workers and pools make them, in processes that differ by nothing else."""
    Streams.secure()
    monkeypatch.setattr(os, "getpid", lambda: 7)  # as in containers, where each begins to count anew
    workers = [in_child(lambda: Streams.secure().words(100, 0, "mask")) for _ in range(2)]
    everything = np.concatenate([Streams.secure().words(100, 0, "mask"), *workers])
    assert everything.size == np.unique(everything).size == 300


@needs_fork
@forking
def test_a_forked_child_repeats_itself_only_when_seeded():
    streams = Streams.seeded(3)
    assert np.array_equal(in_child(lambda: streams.words(50, 1, "mask")), streams.words(50, 1, "mask"))


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.rule(14)
@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf"), "1", None, True, 1e-45, 1e38])
def test_bad_scales_are_refused_before_anything_is_drawn(std):
    streams, out = Streams.secure(), torch.full((3,), 7.0)
    with pytest.raises(PrivacyError, match="std"):
        streams.normal_(out, std, 0, "noise")
    assert torch.equal(out, torch.full((3,), 7.0))
    streams.normal_(out, 1.0, 0, "noise")  # the refusal did not use up the step


@pytest.mark.rule(14)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_other_types_are_refused(dtype):
    with pytest.raises(PrivacyError, match="float32"):
        Streams.seeded(0).normal_(torch.empty(3, dtype=dtype), 1.0, 0, "noise")


@pytest.mark.rule(14)
def test_bad_places_are_refused():
    streams = Streams.seeded(0)
    for step in (-1, 1.5, True, None):
        with pytest.raises(PrivacyError, match="step"):
            streams.words(3, step, "mask")
    for name in ("", None, 3):
        with pytest.raises(PrivacyError, match="name"):
            streams.words(3, 0, name)
    with pytest.raises(PrivacyError, match="count"):
        streams.words(-1, 0, "mask")
    for seed in (-1, 1.5, "0", True, None):
        with pytest.raises(PrivacyError, match="seed"):
            Streams.seeded(seed)
