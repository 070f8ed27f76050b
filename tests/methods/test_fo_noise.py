"""Fractional noise: one band is DP-SGD, several have turns, rounds and an ε of their own."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fodp
from fodp import ConfigurationError, Plan, PrivacyError, accounting, audit, testing
from fodp.accounting import Event, Phase
from fodp.accounting.budget import RenyiBudget
from fodp.cli.main import main
from fodp.ledger.card import faults
from fodp.lots.poisson import PoissonSampler
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_noise import FONoise
from fodp.noise import Streams
from fodp.noise.banded import BandedNoise, accumulated_noise, best_order, fractional_coefficients
from methods_for_tests import StopAfter, data, flat, losses, network, plan, record, trainer, trajectory
from ranks_for_tests import in_ranks

PUBLIC = dict(lot_size=10, clip_norm=1.0, delta=1e-5)


def test_one_band_is_dp_sgd_bit_for_bit():
    for given in ({}, dict(bands=1), dict(bands=1, quantile=0.5, count_noise=100.0, update="adambc", lr=0.02)):
        other = {name: value for name, value in given.items() if name != "bands"}
        here, there = trainer(plan("fo-noise", given)), trainer(plan("dp-sgd", other))
        assert torch.equal(trajectory(here), trajectory(there))
        assert here.plan.events() == there.plan.events()


@pytest.mark.rule(2)
@pytest.mark.rule(3)
@pytest.mark.parametrize("check", testing.CHECKS)
def test_three_bands_pass_the_common_suite(check):
    """Resuming happens in the middle of a round there, and the last round is cut short."""
    assert testing.faults(check, FONoise, bands=3, order=0.6) == []


# --- turns -------------------------------------------------------------------------------------------------------


def test_lots_of_a_round_share_nobody_and_are_as_large_as_ever():
    sampler = PoissonSampler(4000, 0.4, Streams.secure(), turns=4)
    lots = [sampler.draw(step) for step in range(40)]
    turn = np.full(4000, -1)
    for step, lot in enumerate(lots):
        drawn = lot.indices.numpy()
        assert np.isin(turn[drawn], (-1, step % 4)).all()
        turn[drawn] = step % 4
    assert np.mean([len(lot.indices) for lot in lots]) == pytest.approx(400, rel=0.05)  # 0.4 of a quarter
    assert (np.bincount(turn + 1, minlength=5)[1:] > 800).all()  # nearly all took part, in groups of about a thousand


@pytest.mark.rule(8)
def test_a_record_more_moves_nobody_to_another_group():
    few, many = (PoissonSampler(size, 0.5, Streams.seeded(3), turns=5) for size in (30, 31))
    for step in range(5):
        assert few.draw(step).among.tolist() == [i for i in many.draw(step).among.tolist() if i < 30]


def test_the_groups_of_secure_runs_differ_and_begin_with_a_round():
    first, second = (PoissonSampler(200, 0.5, Streams.secure(), turns=2) for _ in range(2))
    assert first.draw(0).among.tolist() != second.draw(0).among.tolist()
    with pytest.raises(PrivacyError, match="step 3 is within one: go on with step 4"):
        PoissonSampler(20, 0.5, Streams.secure(), turns=2).draw(3)


def test_a_resumed_secure_run_goes_on_with_a_round_of_new_groups_and_keeps_no_noise(tmp_path):
    secure = plan("fo-noise", dict(bands=3), seed=None, steps=11)
    first = trainer(secure, ledger=fodp.Ledger(tmp_path / "l.db"))
    first.callbacks.append(StopAfter(4))
    first.fit()
    assert "noise" not in first.session.state_dict()["states"]  # a reader could take it off
    first.save(tmp_path / "c.pt")
    second = trainer(secure, ledger=fodp.Ledger(tmp_path / "l.db"))
    second.resume(tmp_path / "c.pt")
    assert (second.step, second.lost_steps) == (6, 2)
    assert not second.session.states["noise"]._past
    result = second.fit()
    assert (result.steps, result.lost_steps, result.epsilon) == (11, 2, secure.epsilon())


@pytest.mark.rule(11)
def test_a_resumed_secure_run_jumps_no_further_than_its_end(tmp_path):
    """Steps behind the planned end were never granted: charging them would exceed the budget, and state too much."""
    changing = dict(bands=4, noise_schedule=((0, 1.0), (10, 0.5)))
    secure = plan("fo-noise", changing, seed=None, steps=16, accountant="rdp", sampling_rate=0.2)
    ledger = tmp_path / "l.db"
    budget = (1.001 * secure.epsilon(steps=10), secure.delta)
    first = trainer(secure, ledger=fodp.Ledger(ledger, dataset="d", budget=budget), last_step=10)
    first.callbacks.append(StopAfter(9))
    first.fit()
    first.save(tmp_path / "c.pt")
    second = trainer(secure, ledger=fodp.Ledger(ledger, dataset="d"), last_step=10)
    second.resume(tmp_path / "c.pt")
    assert (second.step, second.lost_steps) == (10, 1)
    assert second.fit().epsilon <= secure.epsilon(steps=10) * (1 + 1e-9)
    assert faults(fodp.Ledger(ledger)) == []


def test_a_seeded_checkpoint_has_the_noise_and_goes_on_within_a_round(tmp_path):
    seeded = plan("fo-noise", dict(bands=3))
    first, second = trainer(seeded), trainer(seeded)
    trajectory(first, 4)
    first.save(tmp_path / "c.pt")
    second.resume(tmp_path / "c.pt")
    assert second.step == 4
    assert torch.equal(trajectory(first, 4), trajectory(second, 4))


def test_a_step_that_breaks_off_leaves_a_gap_in_the_noise():
    """Correlating over it would bring two lots of one record within a window of noise."""
    run = trainer(plan("fo-noise", dict(bands=3))).session
    run.take_step()
    gradients = run.gradients
    run.gradients = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.take_step()
    run.gradients = gradients
    run.take_step()
    assert (run.number, run.states["noise"]._age) == (3, 1)


# --- what it costs -----------------------------------------------------------------------------------------------


def test_a_round_counts_once_also_where_it_is_cut_short():
    phase = Phase((Event(0.3, 1.0),), 11, turns=4)
    assert phase.times == 3
    rounds = [accounting.epsilon_of((Phase(phase.events, n),), 1e-5) for n in range(4)]
    expected = [rounds[-(-n // 4)] for n in range(12)]
    assert [accounting.epsilon_of(accounting.truncate((phase,), n), 1e-5) for n in range(12)] == expected
    assert accounting.epsilon_curve((phase,), 1e-5, "pld", range(12)) == pytest.approx(expected, rel=1e-6)
    running = accounting.RunningEpsilon((phase,), 1e-5, "rdp")
    for n in (0, 3, 4, 5, 11, 2):
        true = accounting.epsilon_of(accounting.truncate((phase,), n), 1e-5, "rdp")
        assert true <= running.after(n) * (1 + 1e-9) <= 1.02 * true + 1e-9
    costs = RenyiBudget.suited_to((phase,), 8.0, 1e-5).costs((phase,))
    assert costs.tolist() == pytest.approx([costs[1] * -(-n // 4) for n in range(12)])
    stored = accounting.phases_to_data((phase, Phase(phase.events, 2)))
    assert stored == [[[[0.3, 1.0]], 11, 4], [[[0.3, 1.0]], 2]]
    assert accounting.phases_from_data(stored) == (phase, Phase(phase.events, 2))


def test_dp_accounting_finds_the_same_epsilon():
    dp_accounting = pytest.importorskip("dp_accounting", reason="an extra: the second opinion")
    from dp_accounting.pld import PLDAccountant

    the_plan = Plan(
        sampling_rate=0.01, steps=101, noise_multiplier=0.8, method="fo-noise", params=dict(bands=8), **PUBLIC
    )
    theirs = PLDAccountant()
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.08, dp_accounting.GaussianDpEvent(0.8)), 13)
    assert the_plan.epsilon() == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


def test_two_records_of_one_person_are_covered_by_the_general_rule():
    """They may have different turns and then share rows of noise: more than two records of one group could do."""
    phase = Phase((Event(0.3, 1.0),), 12, turns=4)
    same_group = accounting.epsilon_for_group((Phase(phase.events, 3),), 1e-5, 2)
    found = accounting.epsilon_for_group((phase,), 1e-5, 2)
    assert found > same_group
    # (ε₁, δ₁) for one is (2ε₁, (1 + e^ε₁)·δ₁) for two.
    one = found / 2
    deltas = np.geomspace(1e-5, 1e-40, 400)
    fitting = next(d for d in deltas if accounting.epsilon_of((phase,), d) >= one * 0.999)
    assert fitting * (1 + math.exp(one)) <= 1.5e-5
    assert accounting.epsilon_for_group((phase,), 1e-5, 1) == accounting.epsilon_of((phase,), 1e-5)


def noise_at(target, rate, steps, **params):
    found = Plan.calibrated(
        target_epsilon=target, sampling_rate=rate, steps=steps, method="fo-noise", params=params, **PUBLIC
    )
    assert 0.98 * target <= found.epsilon() <= target
    return found.params["bands"], found.noise_multiplier * accumulated_noise(found.algorithm.strategy(), steps)


def test_calibration_takes_the_bands_that_accumulate_the_least_noise():
    bands, least = noise_at(8, 0.01, 1000)
    tried = {b: noise_at(8, 0.01, 1000, bands=b)[1] for b in (1, 8, bands, 96)}
    assert bands > 8
    assert least == min(tried.values()) < 0.6 * tried[1]
    assert noise_at(2, 0.04, 1000)[0] == 1  # nothing to gain
    assert noise_at(8, 0.3, 20)[0] <= 3  # b·q is at most 1


def calibrated(target, rate, **params):
    return Plan.calibrated(
        target_epsilon=target, sampling_rate=rate, steps=1000, method="fo-noise", params=params, **PUBLIC
    )


@pytest.mark.parametrize(
    ("target", "rate", "low", "high"),
    [(8, 0.04, 0.8, 0.84), (8, 0.01, 0.45, 0.62), (2, 0.04, 0.97, 1.0)],  # the numbers of the issue are bounds
)
def test_calibrate_says_how_much_noise_is_left_of_dp_sgds(target, rate, low, high, capsys):
    words = ["calibrate", "--method", "fo-noise", "--target-epsilon", str(target), "--sampling-rate", str(rate)]
    assert main([*words, "--steps", "1000", "--set", "order=None", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert low < told["noise_over_dp_sgd"] <= high
    best, usual = (calibrated(target, rate, **given) for given in (dict(order=None), {}))
    assert (told["bands"], told["order"]) == (best.params["bands"], best.params["order"])
    noise = [p.noise_multiplier * accumulated_noise(p.algorithm.strategy(), 1000) for p in (best, usual)]
    assert noise == sorted(noise)
    plain = Plan.calibrated(target_epsilon=target, sampling_rate=rate, steps=1000, method="dp-sgd", **PUBLIC)
    assert told["noise_over_dp_sgd"] == pytest.approx(noise[0] / plain.noise_multiplier / math.sqrt(1001 / 2))
    assert main([*words, "--steps", "1000"]) == 0
    assert "of DP-SGD's at this epsilon" in capsys.readouterr().out


def test_what_is_left_to_the_plan_is_recorded():
    chosen = calibrated(8, 0.05, order=None, bands=4)
    assert (chosen.params["bands"], chosen.params["order"]) == (4, best_order(4, 1000))
    assert plan("fo-noise", dict(order=None)).params["order"] == 0.5
    assert Plan(**chosen.to_dict()) == chosen
    # ε is that of so many bands, whatever they are.
    usual = calibrated(8, 0.05, bands=4)
    assert usual.noise_multiplier == chosen.noise_multiplier


@pytest.mark.rule(2)
@pytest.mark.rule(3)
@pytest.mark.parametrize("check", testing.CHECKS)
def test_bands_of_a_higher_order_pass_the_common_suite(check):
    assert testing.faults(check, FONoise, bands=3, order=0.7) == []


def test_several_processes_release_what_one_does(tmp_path):
    """One of them draws all noise; groups are common; a seeded run goes on in another number of them."""
    the_plan = plan("fo-noise", dict(bands=3, order=0.7), sampling_rate=0.3, steps=9)

    def whole(rank):
        training = trainer(the_plan)
        training.fit()
        return flat(training.model), training.session.noise_variance()

    alone = whole(0)
    for weights, variance in in_ranks(2, whole):
        torch.testing.assert_close(weights, alone[0], rtol=1e-9, atol=1e-11)
        assert variance == alone[1]

    def half(rank):
        training = trainer(the_plan, callbacks=[StopAfter(4)])
        training.fit()
        training.save(tmp_path / "c.pt")
        return training.step

    assert in_ranks(2, half) == [4, 4]
    resumed = trainer(the_plan)
    resumed.resume(tmp_path / "c.pt")
    resumed.fit()
    torch.testing.assert_close(flat(resumed.model), alone[0], rtol=1e-9, atol=1e-11)


def test_without_a_target_there_is_one_band_and_the_plan_records_it():
    assert plan("fo-noise").params["bands"] == 1
    assert replace(plan("fo-noise"), steps=9).params["bands"] == 1


def test_adambc_is_told_the_variance_of_correlated_noise():
    training = trainer(plan("fo-noise", dict(bands=3, update="adambc"), noise_multiplier=2.0, sampling_rate=1e-9))
    inverse = np.linalg.inv(sum(c * np.eye(8, k=-k) for k, c in enumerate(fractional_coefficients(0.5, 3))))
    for t in range(8):
        training.session.take_step()
        assert training.session.noise_variance() == pytest.approx((2.0 / 12) ** 2 * np.square(inverse[t]).sum())


def test_the_statement_says_what_a_lot_is():
    text = plan("fo-noise", dict(bands=3), sampling_rate=0.1).statement()
    assert "take turns. Each example is put at random into one of 3 groups" in text
    assert "probability 0.3 (3 lots)" in text.replace("0.300001", "0.3")
    assert "correlated over 3 steps" in text


def test_a_loop_of_ones_own_takes_turns_too():
    model, dataset = network(torch.float32), data(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    the_plan = plan("fo-noise", dict(bands=2), sampling_rate=0.4, steps=5)
    model, optimizer, loader = fodp.make_private(model, optimizer, dataset, the_plan)
    for batch in loader:
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        optimizer.step()
    twin = trainer(the_plan, network(torch.float32), dataset)
    twin.optimizer.param_groups[0]["lr"] = 0.1
    twin.fit()
    assert torch.allclose(flat(model), flat(twin.model), atol=1e-6)


# --- refusals, and wrong versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "changes", "says"),
    [
        (dict(bands=3), dict(sampling_rate=0.4), r"3·0.4 = 1.2: take at most 2 bands"),
        (dict(bands=2), dict(exact_noise=True, sampling_rate=0.1), "exact noise lies on a grid"),
        (dict(bands=0), {}, "bands must be a whole number of at least 1"),
        (dict(bands=129), {}, "bands must be at most 128"),
        (dict(order=1.0), {}, "order must lie strictly between 0 and 1"),
        (dict(coefficients="optimised"), {}, "no parameter 'coefficients'"),
        (dict(bands=2, filter="doppler", update="adambc"), {}, "filters its noise already"),
    ],
)
def test_what_is_not_covered_is_refused(params, changes, says):
    with pytest.raises(ConfigurationError, match=says):
        Plan(**{**PUBLIC, "sampling_rate": 0.4, "steps": 9, "noise_multiplier": 1.0, **changes}, method="fo-noise",
             params=params)  # fmt: skip


class OrdinaryLots(FONoise):
    """Correlated noise on lots of all records, charged step by step: a record's releases overlap."""

    name = "ordinary-lots"
    turns = 1

    def strategy(self):
        return fractional_coefficients(0.5, 3)


class RoundsWithoutTurns(DPSGD):
    """Counts a round of steps once, and draws from everybody at each of them."""

    name = "rounds-without-turns"

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps, 3),)


class LongColumns(FONoise):
    """The coefficients as they are, starting with 1: less noise than charged for."""

    name = "long-columns"

    def strategy(self):
        found = super().strategy()
        return tuple(c / found[0] for c in found)


class TwoReleases(FONoise):
    """Two releases of one step would be two columns of one matrix."""

    name = "two-releases"

    def step(self, step, state):
        lot = step.draw()
        query = step.gradients(lot).clipped_sum(step.clip_norm)
        std = step.plan.noise_multiplier * step.clip_norm * math.sqrt(2)
        return (step.release(query, std) + step.release(query, std)) / 2


@pytest.mark.rule(6)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (OrdinaryLots, "in two lots whose noise is shared"),
        (RoundsWithoutTurns, "take turns among 1 groups and promises something else"),
        (LongColumns, "have length 1"),
        (TwoReleases, "one release in a step"),
    ],
)
def test_wrong_versions_are_refused(wrong, says):
    with testing.registered(wrong), pytest.raises(PrivacyError, match=says):
        record(plan(wrong.name, {} if wrong is RoundsWithoutTurns else dict(bands=3)))


# --- audits --------------------------------------------------------------------------------------------------------


def audited():
    return plan("fo-noise", dict(bands=2), sampling_rate=0.2, steps=40, noise_multiplier=2.0)


def test_audits_do_not_accuse_it():
    for finding in (audit.check_sampling(audited(), steps=200), audit.attack_mechanism(audited(), trials=3000)):
        assert finding.consistent, finding.faults[:3]


def test_an_audit_finds_a_record_that_is_drawn_out_of_turn(monkeypatch):
    ordinary = PoissonSampler.draw

    def everybody(self, step, name="mask", rate=None):
        turns, self.turns, groups, self._groups = self.turns, 1, self._groups, None
        lot = ordinary(self, step, name, rate)
        self.turns, self._groups = turns, groups
        return lot

    monkeypatch.setattr(PoissonSampler, "draw", everybody)
    finding = audit.check_sampling(audited(), steps=200)
    assert any("is in another one too" in fault for fault in finding.faults), finding.faults


def test_an_audit_finds_noise_that_is_too_small(monkeypatch):
    quiet = BandedNoise.normal_
    monkeypatch.setattr(
        BandedNoise, "normal_", lambda self, out, std, step, name: quiet(self, out, std / 6, step, name)
    )
    assert not audit.attack_mechanism(audited(), trials=3000).consistent
