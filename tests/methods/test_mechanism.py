"""Queries carry their sensitivity; noise and accounting take it from there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fodp
from fodp.noise import Streams
from fodp.queries import Query
from fodp.release import release


def query(value: list[float], bound: float, lot: object = None) -> Query:
    return Query(torch.tensor(value, dtype=torch.float64), bound, lot)


@pytest.mark.rule(3)
@given(factor=st.floats(-5, 5), bound=st.floats(0.01, 10))
def test_scaling_scales_value_and_bound(factor, bound):
    scaled = factor * query([1.0, -2.0], bound)
    assert scaled.bound == pytest.approx(abs(factor) * bound)
    assert torch.allclose(scaled.value, factor * torch.tensor([1.0, -2.0], dtype=torch.float64))


@pytest.mark.rule(3)
def test_adding_something_from_releases_leaves_the_bound():
    public = torch.tensor([10.0, 20.0], dtype=torch.float64)
    mixed = 0.9 * query([1.0, 2.0], 2.0) + 0.1 * public
    assert mixed.bound == pytest.approx(1.8)
    assert mixed.value.tolist() == pytest.approx([1.9, 3.8])


@pytest.mark.rule(3)
def test_adding_queries_of_one_lot_adds_bounds():
    lot = object()
    total = query([1.0], 2.0, lot) + 0.5 * query([4.0], 3.0, lot)
    assert total.bound == pytest.approx(3.5)
    assert total.value.tolist() == [3.0]


@pytest.mark.rule(7)
def test_queries_of_different_lots_do_not_add():
    with pytest.raises(fodp.PrivacyError, match="different lots"):
        query([1.0], 1.0, object()) + query([1.0], 1.0, object())


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), "2", True])
def test_only_finite_numbers_scale(factor):
    with pytest.raises(fodp.PrivacyError, match="finite number"):
        factor * query([1.0], 1.0) if not isinstance(factor, str) else query([1.0], 1.0) * factor


def test_repr_hides_the_value():
    assert "123" not in repr(query([123.0], 1.0))


@pytest.mark.rule(3)
def test_release_adds_noise_of_the_asked_scale():
    """Accepts the right scale and rejects one that is 3% off (200,000 draws: standard error 0.16%)."""
    zero = Query(torch.zeros(200_000), 1.0)
    measured = release(zero, 1.7, Streams.seeded(5), 0, "noise").std().item()
    assert measured == pytest.approx(1.7, rel=0.01)
    wrong = release(zero, 1.7 * 1.03, Streams.seeded(5), 0, "noise").std().item()
    assert wrong != pytest.approx(1.7, rel=0.01)


def test_release_does_not_touch_the_query():
    value = torch.ones(5)
    released = release(Query(value, 1.0), 1.0, Streams.seeded(0), 0, "noise")
    released.zero_()
    assert value.tolist() == [1.0] * 5


class TestGaussianMechanism:
    def make(self, **changes):
        settings = dict(clip_norm=1.0, noise_multiplier=1.1, beta=0.9, memory=fodp.FractionalMemory())
        return fodp.GaussianMechanism(**{**settings, **changes})

    @pytest.mark.rule(14)
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(clip_norm=0), "clip_norm"),
            (dict(clip_norm=-1.0), "clip_norm"),
            (dict(noise_multiplier=float("nan")), "noise_multiplier"),
            (dict(noise_multiplier=-0.1), "noise_multiplier"),
            (dict(beta=0.0), "beta"),
            (dict(beta=1.2), "beta"),
            (dict(memory=None), "memory"),
        ],
    )
    def test_bad_settings_are_refused(self, changes, message):
        with pytest.raises(fodp.PrivacyError, match=message):
            self.make(**changes)

    @pytest.mark.rule(6)
    def test_event_has_the_ratio_sigma_over_beta(self):
        event = self.make().event(0.04)
        assert event.sampling_rate == 0.04
        assert event.noise_multiplier == pytest.approx(1.1 / 0.9)

    def test_beta_one_needs_no_memory_and_is_the_plain_release(self):
        total = torch.arange(4.0)
        plain = self.make(beta=1.0, memory=None, generator=torch.Generator().manual_seed(3)).release(total)
        expected = total + 1.1 * torch.empty(4).normal_(generator=torch.Generator().manual_seed(3))
        assert torch.allclose(plain, expected)

    def test_first_release_is_beta_times_the_sum(self):
        mechanism = self.make(noise_multiplier=0.0)
        assert torch.allclose(mechanism.release(torch.ones(3)), torch.full((3,), 0.9))

    def test_second_release_mixes_the_first(self):
        mechanism = self.make(noise_multiplier=0.0)
        first = mechanism.release(torch.ones(3))
        second = mechanism.release(torch.zeros(3))
        assert torch.allclose(second, 0.1 * first)

    def test_saved_and_loaded_in_the_middle_it_goes_on_alike(self):
        torch.manual_seed(0)
        sums = [torch.randn(50) for _ in range(12)]
        whole = self.make(noise_multiplier=0.0)
        expected = [whole.release(s) for s in sums]
        first = self.make(noise_multiplier=0.0)
        for s in sums[:6]:
            first.release(s)
        second = self.make(noise_multiplier=0.0)
        second.load_state_dict(first.state_dict())
        for s, e in zip(sums[6:], expected[6:], strict=True):
            assert torch.equal(second.release(s), e)

    @pytest.mark.rule(13)
    def test_secure_by_default_and_no_key_in_the_state(self):
        first, second = self.make(), self.make()
        assert not torch.equal(first.release(torch.zeros(100)), second.release(torch.zeros(100)))
        assert set(first.state_dict()) == {"step", "memory"}

    @pytest.mark.rule(11)
    def test_going_back_to_a_saved_state_never_repeats_noise(self):
        mechanism = self.make(beta=1.0, memory=None)
        saved = mechanism.state_dict()
        first = mechanism.release(torch.zeros(100))
        mechanism.load_state_dict(saved)
        assert not torch.equal(mechanism.release(torch.zeros(100)), first)
