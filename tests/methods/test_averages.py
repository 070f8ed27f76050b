"""Averages of iterates: their weights, their rounding, and what they may be asked for."""

import numpy as np
import pytest
import torch

import fodp
from fodp import ConfigurationError
from fodp.methods import METHODS
from fodp.options.average import Ema, Power, RunningAverage, Tail

PUBLIC = dict(sampling_rate=0.1, steps=20, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
KINDS = {"ema": Ema(average_decay=0.9), "tail": Tail(average_share=0.25), "power": Power(average_power=3.0)}


def averaged(kind, iterates, end=None):
    running = RunningAverage(kind)
    for step, iterate in enumerate(iterates, start=1):
        running.take(torch.as_tensor(iterate), step, end or len(iterates))
    return running.value()


def weights(kind, steps):
    """Of each iterate in the average, read off unit vectors."""
    return averaged(kind, torch.eye(steps, dtype=torch.float64)).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_weights_are_shares_and_the_newest_iterate_has_one(kind, steps):
    found = weights(KINDS[kind], steps)
    assert found.sum() == pytest.approx(1)
    assert found.min() >= 0
    assert found[-1] > 0


def test_an_exponential_average_forgets_early_iterates_faster_than_its_decay():
    found = weights(Ema(average_decay=0.99), 60)
    assert found[0] < 1e-6  # without a warm-up it would be 0.99^59, more than one half
    late = weights(Ema(average_decay=0.9), 400)
    np.testing.assert_allclose(late[-50:], 0.1 * 0.9 ** np.arange(49, -1, -1.0), rtol=1e-9)


def test_a_tail_is_the_mean_of_the_last_share_and_begins_anew_where_the_end_is_moved():
    np.testing.assert_allclose(weights(KINDS["tail"], 8), [0] * 6 + [0.5] * 2)
    assert averaged(KINDS["tail"], torch.eye(8)[:6], end=8) is None
    running = RunningAverage(KINDS["tail"])
    for step, iterate in enumerate(torch.eye(12, dtype=torch.float64), start=1):
        running.take(iterate, step, end=4 if step <= 4 else 12)  # the fit went on
    np.testing.assert_allclose(running.value(), [0] * 9 + [1 / 3] * 3)


def test_a_power_of_whole_numbers_gives_rising_factorials():
    t = np.arange(1, 31.0)
    expected = t * (t + 1) * (t + 2)  # about t³
    np.testing.assert_allclose(weights(KINDS["power"], 30), expected / expected.sum(), rtol=1e-12)
    np.testing.assert_allclose(weights(Power(average_power=0.0), 9), 1 / 9)


@pytest.mark.parametrize("kind", ["tail", "power"])
def test_a_hundred_thousand_float32_iterates_do_not_drift(kind):
    """Iterates that rise by less than the rounding of a float32 average: it would stand still."""
    steps = 100_000
    noise = np.random.default_rng(0).normal(0, 1e-3, steps)
    iterates = torch.tensor(1 + np.arange(steps) * 1e-7 + noise, dtype=torch.float32)[:, None]
    share = Tail(average_share=1.0) if kind == "tail" else KINDS[kind]
    w = np.ones(steps) if kind == "tail" else (t := np.arange(1, steps + 1.0)) * (t + 1) * (t + 2)
    exact = float((w * iterates[:, 0].double().numpy()).sum() / w.sum())
    assert float(averaged(share, iterates)) == pytest.approx(exact, abs=1e-11)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_takes_one_and_records_it(name):
    assert "average" not in fodp.Plan(**PUBLIC, method=name).params  # what was not chosen is not recorded
    for kind in ("ema", "tail", "power"):
        plan = fodp.Plan(**PUBLIC, method=name, params=dict(average=kind))
        assert plan.params["average"] == kind
        assert plan.epsilon() == fodp.Plan(**PUBLIC, method=name).epsilon()
        assert type(plan.options.average) is type(KINDS[kind])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (dict(average="mean"), "average must be one of none, ema, tail, power"),
        (dict(average="ema", average_decay=1.0), "average_decay must lie strictly between 0 and 1"),
        (dict(average="tail", average_share=0.0), "average_share"),
        (dict(average="power", average_power=-1.0), "average_power"),
        (dict(average="tail", average_decay=0.9), "average_decay does nothing without average='ema'"),
        (dict(average_share=0.5), "average_share does nothing without average='tail'"),
    ],
)
def test_what_cannot_be_averaged_is_refused(params, says):
    with pytest.raises(ConfigurationError, match=says):
        fodp.Plan(**PUBLIC, method="dp-sgd", params=params)
