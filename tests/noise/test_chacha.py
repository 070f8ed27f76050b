"""Noise for accelerators: the keystream bit for bit, the normals by the statistics that the CPU's noise passes.

No accelerator is in these tests: tensor operations run on the CPU.
"""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from fodp import PrivacyError
from fodp.noise import Streams, chacha
from statistics_for_tests import ACCEPT, REJECT, correlation_p, exceedance_p, variance_p

KEY = bytes(range(32))
# RFC 8439, appendix A.1: key, block counter, keystream (those with the nonce zero).
RFC = [
    (
        bytes(32),
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\x01",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        b"\x00\xff" + bytes(30),
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), RFC)
def test_the_keystream_is_that_of_the_rfc(key, counter, expected):
    assert chacha.keystream(key, counter, 1).numpy().tobytes().hex() == expected


@pytest.mark.parametrize("first", [0, 1, 2**31 - 2, 2**31 - 1, 2**32 - 3])
def test_the_keystream_is_that_of_cryptography(first):
    nonce = first.to_bytes(4, "little") + bytes(12)
    theirs = Cipher(algorithms.ChaCha20(KEY, nonce), None).encryptor().update(bytes(3 * 64))
    assert chacha.keystream(KEY, first, 3).numpy().tobytes() == theirs


def test_a_stream_ends_before_its_counter_comes_round():
    with pytest.raises(PrivacyError, match="not within the 4294967296 of one stream"):
        chacha.keystream(KEY, 2**32 - 1, 2)
    with pytest.raises(PrivacyError, match="32 bytes"):
        chacha.keystream(b"short", 0, 1)


def normals(count, dtype=torch.float32, key=KEY, offset=0, std=1.0):
    return chacha.reference_(torch.zeros(count, dtype=dtype), std, key, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [1, 7, 10, 123, 79_999])
def test_any_slice_can_be_drawn_by_itself(monkeypatch, dtype, offset):
    whole = normals(80_123, dtype)
    monkeypatch.setattr(chacha, "_AT_ONCE", 64)  # a split of the work changes nothing either
    assert torch.equal(normals(80_123 - offset, dtype, offset=offset), whole[offset:])


def refuse_other_normals(sample, lags):
    """The suite of today's normals: the scale 1.7 and the shape are accepted, scales a little off are not."""
    assert variance_p(sample, 1.7) > ACCEPT
    assert variance_p(sample, 1.7 * 0.95) < REJECT
    assert variance_p(sample, 1.7 * 1.05) < REJECT
    assert stats.kstest(sample / 1.7, "norm").pvalue > ACCEPT
    assert stats.kstest(sample / 1.55, "norm").pvalue < ACCEPT
    for lag in lags:
        assert correlation_p(sample[:-lag], sample[lag:]) > ACCEPT
    for sigmas in (3.0, 4.0):
        found = int((np.abs(sample) > 1.7 * sigmas).sum())
        assert exceedance_p(found, sample.size, 2 * stats.norm.sf(sigmas)) > ACCEPT


@pytest.mark.rule(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_have_the_right_scale_and_shape_and_wrong_scales_are_seen(dtype):
    sample = normals(200_000, dtype, std=1.7).double().numpy()
    refuse_other_normals(sample, lags=(1, 4, 5, 10))  # 5 and 4: the other one of a pair, which shares its radius
    assert variance_p(sample, 1.7 * 0.97) < REJECT
    assert variance_p(sample, 1.7 * 1.03) < REJECT
    assert stats.kstest(sample / 1.65, "norm").pvalue < ACCEPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_radii_are_exact_at_both_ends(dtype):
    """-ln((word + ½)/2⁶⁴): the tail to 9.4σ, and next to u = 1, where a float of u would be coarse."""
    words = [0, 1, 5, 2**32 - 1, 2**33 + 7, 2**63 - 1, 2**63, 2**64 - 2**40, 2**64 - 2**20, 2**64 - 3, 2**64 - 1]
    cut = [[word >> 32, word & (2**32 - 1)] for word in words]
    high, low = torch.tensor(cut, dtype=torch.int64).to(torch.uint32).view(torch.int32).unbind(1)
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        exact = [float(-mpmath.log((mpmath.mpf(word) + 0.5) / mpmath.mpf(2) ** 64)) for word in words]
    found = chacha._minus_log(high, low, dtype).double().numpy()
    np.testing.assert_allclose(found, exact, rtol=4 * torch.finfo(dtype).eps)
    assert np.sqrt(2 * found[0]) > 9.4


def elsewhere(streams, count, step=0, name="noise"):
    """The CPU stands in for a device: streams take the path of accelerators."""
    return streams.add_normal_(torch.zeros(count), 1.0, step, name)


@pytest.mark.rule(11)
def test_streams_on_a_device_never_repeat_and_do_not_share_the_cpus_numbers():
    seeded, secure = Streams.seeded(3), Streams.secure()
    here = seeded.normal_(torch.empty(1000), 1.0, 0, "noise")
    there = elsewhere(seeded, 1000)
    assert torch.equal(there, elsewhere(seeded, 1000))
    assert abs(float(torch.corrcoef(torch.stack([here, there]))[0, 1])) < 0.15
    assert not torch.equal(there, elsewhere(seeded, 1000, step=1))
    assert not torch.equal(there, elsewhere(seeded, 1000, name="other"))
    elsewhere(secure, 10, step=4)
    with pytest.raises(PrivacyError, match="already drawn up to step 4"):
        elsewhere(secure, 10, step=4)
    with pytest.raises(PrivacyError, match="already drawn up to step 4"):
        secure.normal_(torch.empty(10), 1.0, 4, "noise")  # nor on the CPU


def test_a_device_gets_its_noise_there():
    out = torch.empty(60, device="meta")
    assert Streams.seeded(1).normal_(out, 1.0, 0, "noise") is out


@pytest.fixture
def fresh():
    """What was found out about compilers is forgotten before and after."""
    chacha._compiled.cache_clear()
    yield
    chacha._compiled.cache_clear()


def made_by(monkeypatch, compiler):
    """Normals where `torch.compile` is this."""
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(chacha, "_WORTH_COMPILING", 100)
    return chacha.add_normals_(torch.zeros(1000), 1.0, KEY)


def test_a_compiled_version_is_taken_where_it_agrees(monkeypatch, fresh):
    calls = []

    def compiler(function, **options):
        def compiled(*args):
            calls.append([type(arg) for arg in args])
            return function(*args)

        return compiled

    assert torch.equal(made_by(monkeypatch, compiler), normals(1000))
    assert len(calls) == 2, "compared once, then used"
    # Numbers would be written into code and code into files: the key must come as a tensor.
    assert all(kinds == [torch.Tensor, torch.Tensor, torch.dtype] for kinds in calls)


def broken(function, **options):
    raise RuntimeError("no compiler here")


def breaks_when_called(function, **options):
    return broken


def is_wrong(function, **options):
    """One bit of one word of the keystream."""

    def compiled(words, counters, dtype):
        made = chacha._blocks(words, counters)
        made[:, 3] ^= 1 << 20
        return chacha._normals(made, dtype)

    return compiled


@pytest.mark.parametrize("compiler", [broken, breaks_when_called, is_wrong])
def test_a_compiler_that_fails_or_errs_is_left_out(monkeypatch, fresh, compiler):
    assert torch.equal(made_by(monkeypatch, compiler), normals(1000))
    assert chacha._compiled(torch.device("cpu"), torch.float32) is None
