"""The paper's appendix as tests: one per numbered statement, marked with its LaTeX label, on the real code.

And the fact behind all of them, which the paper does not state: FO-DP-SGD at (σ, β) is DP-SGD at σ/β followed by
a feedback filter, over a whole training run.
"""

import copy
import math
import os
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fodp
from fodp.accounting import Event, Phase, rdp_curve
from fodp.data import load, models
from fodp.layout import GradientBuffer
from fodp.memory import noise_floor
from fodp.step import Step
from sessions_for_tests import session

statement = pytest.mark.statement

STATEMENTS = {
    "lem:fodpsgd_delta_s",
    "prop:fodpsgd_theory_history_conditioned",
    "def:fodpsgd_theory_conditional_sensitivity",
    "thm:fodpsgd_theory_conditional_sensitivity",
    "def:fodpsgd_theory_queries",
    "prop:fodpsgd_theory_mechanism_level",
    "thm:fodpsgd_theory_per_step_privacy",
    "thm:fodpsgd_theory_total_privacy",
    "rem:fodpsgd_theory_sigma_over_beta",
    "rem:fodpsgd_theory_conditioning",
    "def:fodpsgd_theory_memory_terms",
    "lem:fodpsgd_theory_decomposition",
    "prop:fodpsgd_theory_convex_weights",
    "rem:fodpsgd_inherited_noise_no_denoising",
    "prop:fodpsgd_theory_tau_monotonicity",
    "prop:fodpsgd_theory_inconsistency_suppression",
    "prop:fodpsgd_theory_chi_monotonicity",
    "prop:fodpsgd_theory_beta_tradeoff",
    "rem:fodpsgd_theory_lambda",
    "rem:fodpsgd_theory_gamma",
    "rem:fodpsgd_theory_kappa",
    "rem:fodpsgd_theory_zeta",
    "rem:fodpsgd_theory_alpha",
    "rem:fodpsgd_theory_K",
    "prop:fodpsgd_theory_tau_zero",
    "prop:fodpsgd_theory_lambda_tau_zero",
    "prop:fodpsgd_theory_beta_one",
    "prop:fodpsgd_theory_K_one",
    "prop:fodpsgd_theory_alpha_one",
    "prop:fodpsgd_theory_chi_to_zero",
    "prop:fodpsgd_theory_chi_to_one",
    "prop:fodpsgd_theory_beta_to_zero",
    "prop:fodpsgd_theory_q_to_one",
}


def test_every_numbered_statement_has_a_test():
    tests = [value for name, value in vars(sys.modules[__name__]).items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", [])]
    assert {mark.args[0] for mark in marks if mark.name == "statement"} == STATEMENTS


# --- a small real problem, and runs that can be looked into --------------------------------------------------

CLIP_NORM = 1.0


def digits(count=300, dtype=torch.float64):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[:count] / 16, dtype=dtype), torch.tensor(labels[:count]))


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)
    return torch.nn.Sequential(*layers).to(dtype)


def loss_fn(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="none")


def planned(**changes):
    """A plan on 300 digits; what a plan does not know is a parameter of FO-DP-SGD."""
    fields = dict(sampling_rate=0.2, steps=20, lot_size=60, clip_norm=CLIP_NORM, noise_multiplier=1.1)
    fields |= dict(delta=1e-5, method="fo-dp-sgd", accountant="rdp", seed=7)
    params = {key: value for key, value in changes.items() if key not in (*fields, "params")}
    return fodp.Plan(**fields | {key: changes[key] for key in changes.keys() - params.keys()}, params=params)


class Recorded:
    """A session that keeps what no real run may show: lots, clipped sums s_t, queries r_t; and the releases."""

    def __init__(self, model, dataset, plan):
        self.model, self.plan, self.session = model, plan, session(model, loss_fn, dataset, plan)
        self.state, self.layout = self.session.states["method"], self.session.source.layout
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.lots, self.sums, self.queries, self.multipliers, self.releases = [], [], [], [], []
        self.session.steps_by(lambda session, number: RecordedStep(session, number, self))

    def take_step(self):
        """A memory is mixed in after the noise, which is the same sum: r_t is the release without its noise."""
        released = self.session.take_step()
        self.queries[-1] = self.queries[-1] + (released - self.fresh)
        self.releases.append(released.clone())
        return released

    @property
    def parameters(self):
        return self.session.parameters()

    def noise(self, t):
        return self.releases[t] - self.queries[t]

    def update(self, release):
        GradientBuffer(self.layout).set(release, self.plan.lot_size)
        self.optimizer.step()

    def train(self, steps=None):
        for _ in range(self.plan.steps if steps is None else steps):
            self.update(self.take_step())
        return self

    def condition_on(self, other):
        """Take over the transcript of another run: what h_t determines, parameters and memory, and no more."""
        self.model.load_state_dict(other.model.state_dict())
        self.state.load_state_dict(other.state.state_dict())


class RecordedStep(Step):
    """A step that tells its `Recorded` run what it does."""

    def __init__(self, session, number, run):
        super().__init__(session, number)
        self.run = run

    def gradients(self, lot, *args, **kwargs):
        gradients = super().gradients(lot, *args, **kwargs)
        self.run.lots.append(lot.indices)
        self.run.sums.append(gradients.clipped_sum(self.run.plan.clip_norm).value)
        return gradients

    def release(self, query, std):
        released = super().release(query, std)
        self.run.queries.append(query.value)
        self.run.multipliers.append(query.noise_multiplier(std))
        self.run.fresh = released.clone()
        return released


def recorded(dataset=None, dtype=torch.float64, **changes):
    return Recorded(network(dtype), digits(dtype=dtype) if dataset is None else dataset, planned(**changes))


def neighbours(dataset, left_out, **changes):
    """Two runs on data sets that differ in one record, with the same masks and noise.

    The record goes last: masks are drawn record by record, so those of the others stay what they are.
    """
    order = [*(i for i in range(len(dataset)) if i != left_out), left_out]
    images, labels = (column[order] for column in dataset.tensors)
    full, reduced = TensorDataset(images, labels), TensorDataset(images[:-1], labels[:-1])
    return recorded(full, **changes), recorded(reduced, **changes)


def in_lock_step(one, other, steps):
    """Both runs step from the transcript of the first; yields the step number before it is trained on."""
    for t in range(steps):
        other.condition_on(one)
        release = one.take_step()
        other.take_step()
        yield t
        one.update(release)


def with_an_outlier(dataset, place):
    """One record whose gradient is far longer than the clip norm."""
    images, labels = (column.clone() for column in dataset.tensors)
    images[place] *= 1000
    return TensorDataset(images, labels)


def norm(vector):
    return vector.norm().item()


def close(found, expected, rtol=1e-12):
    """Equal up to rounding, relative to the expected vector's length."""
    return norm(found - expected) <= rtol * max(norm(expected), 1e-300)


# --- sensitivity -----------------------------------------------------------------------------------------------


@statement("lem:fodpsgd_delta_s")
@pytest.mark.parametrize("clip_norm", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sensitivity_of_the_clipped_sum_under_a_fixed_mask(clip_norm, dtype):
    model, (images, labels) = network(dtype), with_an_outlier(digits(40, dtype), place=3).tensors
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12  # the sum itself rounds, besides FLOAT_TOLERANCE
    mask = torch.rand(40, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[3] = True
    changes = []
    for i in range(40):
        without = mask.clone()
        without[i] = False
        s, s_without = (fodp.clipped_sum(model, loss_fn, (images[m], labels[m]), clip_norm) for m in (mask, without))
        changes.append(norm(s - s_without))
        if not mask[i]:
            assert torch.equal(s, s_without)  # a record outside the lot is not seen at all
    assert max(changes) <= clip_norm * (1 + tolerance)
    assert changes[3] == pytest.approx(clip_norm, rel=tolerance)  # and the bound is reached


@statement("prop:fodpsgd_theory_history_conditioned")
def test_history_conditioned_query_structure():
    """Given h_t and m_t, data enters r_t through β·s_t only, however different the data sets are."""
    beta = 0.7
    images, labels = digits().tensors
    others = TensorDataset(images.flip(1) * 3, (labels + 1) % 10)
    one, other = recorded(beta=beta, tau=1.0), recorded(others, beta=beta, tau=1.0)
    weights = []
    for t in range(12):
        other.condition_on(one)
        assert torch.equal(one.state.weights, other.state.weights)
        weights.append(one.state.weights)
        if t:
            assert torch.equal(one.state.read(), other.state.read())
        release = one.take_step()
        other.take_step()
        assert torch.equal(one.lots[t], other.lots[t])
        apart = one.queries[t] - other.queries[t]
        assert norm(apart) > 0.1
        assert close(apart, beta * (one.sums[t] - other.sums[t]))
        one.update(release)
    assert len(weights[-1]) == 7
    # The memory is a function of the releases and of public numbers: replaying them gives it again, bit for bit.
    replayed = one.plan.algorithm.init(one.plan, one.layout.size)
    for release in one.releases:
        replayed.write(release)
    assert torch.equal(replayed.weights, one.state.weights)
    assert torch.equal(replayed.inconsistency, one.state.inconsistency)
    assert torch.equal(replayed.confidence, one.state.confidence)
    assert torch.equal(replayed.read(), one.state.read())


@statement("def:fodpsgd_theory_conditional_sensitivity")
@statement("thm:fodpsgd_theory_conditional_sensitivity")
@pytest.mark.parametrize("beta", [1.0, 0.9, 0.3])
def test_conditional_sensitivity_is_beta_c(beta):
    """Measured on a run: delete a record, keep masks, noise and transcript; r_t moves by at most β·C."""
    data = with_an_outlier(digits(60), place=5)
    reached = 0.0
    for left_out in (5, 17, 42):
        run, without = neighbours(data, left_out, beta=beta, sampling_rate=0.5, lot_size=30)
        for t in in_lock_step(run, without, steps=12):
            in_lot = 59 in run.lots[t].tolist()
            assert without.lots[t].tolist() == [i for i in run.lots[t].tolist() if i != 59]
            moved = norm(run.queries[t] - without.queries[t])
            assert moved <= beta * CLIP_NORM * (1 + 1e-9)
            assert (moved > 0) == in_lot
            # the noise is the same, so what an observer sees moves as little
            assert close(run.releases[t] - without.releases[t], run.queries[t] - without.queries[t], rtol=1e-9)
            reached = max(reached, moved)
    assert reached == pytest.approx(beta * CLIP_NORM, rel=1e-9)  # the outlier uses all of it: the bound is tight


# --- the query, and the twin -----------------------------------------------------------------------------------


@statement("def:fodpsgd_theory_queries")
@statement("prop:fodpsgd_theory_mechanism_level")
def test_mechanism_level_modification_in_its_structural_part():
    """For β < 1 and K_t ≥ 2 the release without its noise holds the history term (1-β)·u; DP-SGD's holds none."""
    beta = 0.8
    run, standard = recorded(beta=beta), recorded(method="dp-sgd")
    for t in range(10):
        standard.model.load_state_dict(run.model.state_dict())
        u = run.state.read()
        release = run.take_step()
        standard.take_step()
        assert torch.equal(standard.queries[t], standard.sums[t])
        assert torch.equal(standard.sums[t], run.sums[t])
        history_term = run.queries[t] - beta * run.sums[t]
        if t == 0:  # K_t = 1
            assert u is None
            assert norm(history_term) == 0
        else:
            assert close(history_term, (1 - beta) * u)
            assert norm(history_term) > 1
        run.update(release)


@statement("prop:fodpsgd_theory_mechanism_level")
@pytest.mark.parametrize(
    "memory",
    [
        lambda: fodp.FractionalMemory(tau=1.0),
        lambda: fodp.UniformMemory(window=8),
        lambda: fodp.ExponentialMemory(window=8),
    ],
    ids=["fractional", "uniform", "exponential"],
)
def test_the_release_is_nevertheless_post_processing_of_dp_sgd(memory):
    """Where the paper goes too far: "not merely a post-processing transformation" does not hold.

    β·s + (1-β)·u + Z = β·(s + Z/β) + (1-β)·u, and u knows earlier releases only. So whoever is given the
    DP-SGD releases y = s + Z/β, at noise σ/β, can compute every FO-DP-SGD release from them: a causal filter.
    """
    sigma, beta, size = 1.1, 0.6, 50
    settings = dict(clip_norm=CLIP_NORM)
    fractional = fodp.GaussianMechanism(
        noise_multiplier=sigma, beta=beta, memory=memory(), generator=torch.Generator().manual_seed(3), **settings
    )
    dp_sgd = fodp.GaussianMechanism(
        noise_multiplier=sigma / beta, generator=torch.Generator().manual_seed(3), **settings
    )
    assert fractional.event(0.1) == dp_sgd.event(0.1)
    outside = memory()  # of somebody who sees nothing but y
    data = torch.Generator().manual_seed(4)
    for _ in range(100):
        s = torch.randn(size, generator=data, dtype=torch.float64)
        y, u = dp_sgd.release(s), outside.read()
        filtered = beta * y if u is None else beta * y + (1 - beta) * u
        outside.write(filtered)
        assert close(filtered, fractional.release(s), rtol=1e-10)


@pytest.mark.parametrize("params", [{}, {"tau": 1.0, "window": 20, "alpha": 0.4}], ids=["defaults", "tempered"])
def test_exact_twin_over_a_whole_training_run(params):
    """FO-DP-SGD(σ, β) trains the same network as DP-SGD(σ/β) whose releases pass through the feedback filter.

    The twin is a run of its own, of a DP-SGD plan, with its own network, masks and noise from the same seed; the
    filter is outside it and sees the DP-SGD releases only.
    """
    sigma, beta, steps = 1.1, 0.7, 80
    run = recorded(noise_multiplier=sigma, beta=beta, steps=steps, **params)
    twin = recorded(noise_multiplier=sigma / beta, method="dp-sgd", steps=steps)
    floor = noise_floor(sigma * CLIP_NORM, run.layout.size, gamma=0.1)
    memory = fodp.FractionalMemory(**params, kappa=floor, zeta=floor)
    start, y_alone = twin.parameters, recorded(noise_multiplier=sigma / beta, method="dp-sgd", steps=steps)
    for t in range(steps):
        y, u = twin.take_step(), memory.read()
        filtered = beta * y if u is None else beta * y + (1 - beta) * u
        memory.write(filtered)
        twin.update(filtered)

        run.update(run.take_step())
        y_alone.update(y_alone.take_step())
        assert torch.equal(run.lots[t], twin.lots[t])
        assert close(filtered, run.releases[t], rtol=1e-9)
        assert close(twin.parameters, run.parameters, rtol=1e-9)

    # That was a real training run, and the filter was not idle.
    images, labels = digits().tensors
    assert (run.model(images).argmax(1) == labels).double().mean() > 0.7
    assert norm(run.parameters - start) > 1
    assert norm(run.parameters - y_alone.parameters) > 0.01 * norm(run.parameters - start)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-classic"])
def test_twins_cost_the_same(accountant):
    sigma, beta = 1.1, 0.7
    plan = planned(noise_multiplier=sigma, beta=beta, accountant=accountant, steps=80)
    twin = planned(noise_multiplier=sigma / beta, method="dp-sgd", accountant=accountant, steps=80)
    at_the_same_sigma = planned(noise_multiplier=sigma, method="dp-sgd", accountant=accountant, steps=80)
    assert plan.events() == twin.events()
    assert plan.epsilon() == twin.epsilon()
    assert plan.epsilon() < 0.8 * at_the_same_sigma.epsilon()  # equal σ is not equal ε


# --- accounting ------------------------------------------------------------------------------------------------


def renyi(order, rate, std, shift):
    """Max of D(P‖Q) and D(Q‖P), P = (1-q)·N(0, std²) + q·N(shift, std²), Q = N(0, std²), by the trapezoidal rule."""
    x, width = np.linspace(-20 * std - order * shift, 20 * std + 2 * order * shift, 100_001, retstep=True)
    log_q = -((x / std) ** 2) / 2 - math.log(std * math.sqrt(2 * math.pi))
    log_shifted = -(((x - shift) / std) ** 2) / 2 - math.log(std * math.sqrt(2 * math.pi))
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    log_p = np.logaddexp(absent + log_q, math.log(rate) + log_shifted)

    def divergence(log_p, log_q):
        exponent = order * log_p + (1 - order) * log_q
        return (np.log(np.exp(exponent - exponent.max()).sum() * width) + exponent.max()) / (order - 1)

    return max(divergence(log_p, log_q), divergence(log_q, log_p))


def sampled_gaussian_rdp(order, rate, ratio):
    """ε_SGM at a whole order (Mironov, Talwar and Zhang 2019, section 3.3)."""
    terms = [
        math.log(math.comb(order, k))
        + k * math.log(rate)
        + (order - k) * (math.log1p(-rate) if rate < 1 else (0 if k == order else -math.inf))
        + k * (k - 1) / (2 * ratio**2)
        for k in range(order + 1)
    ]
    return float(np.logaddexp.reduce(terms)) / (order - 1)


def curve(plan):
    orders, values = rdp_curve(plan.events())
    return dict(zip(orders.tolist(), values.tolist(), strict=True))


@statement("thm:fodpsgd_theory_per_step_privacy")
@pytest.mark.parametrize(
    ("q", "sigma", "beta", "clip_norm"), [(0.04, 1.1, 0.9, 1.0), (0.2, 0.8, 0.5, 3.0), (1.0, 2.0, 0.65, 0.1)]
)
def test_per_step_rdp(q, sigma, beta, clip_norm):
    """One release, as it is: noise of standard deviation σC, and a record that moves it by βC with probability q."""
    plan = planned(sampling_rate=q, noise_multiplier=sigma, beta=beta, clip_norm=clip_norm, steps=1)
    promised = curve(plan)
    for order in (1.5, 2.0, 3.0, 8.0, 32.0):
        truth = renyi(order, q, std=sigma * clip_norm, shift=beta * clip_norm)
        assert truth <= promised[order] * (1 + 1e-9)
        if order.is_integer():
            assert promised[order] == pytest.approx(truth, rel=1e-6)
            assert promised[order] == pytest.approx(sampled_gaussian_rdp(int(order), q, sigma / beta), rel=3e-9)


@statement("thm:fodpsgd_theory_per_step_privacy")
def test_a_run_emits_the_event_of_its_plan():
    """What the noise site charges, from the query's own bound, is (q, σ/β) at every step."""
    run = recorded(beta=0.65, noise_multiplier=1.3).train(5)
    assert run.multipliers == pytest.approx([1.3 / 0.65] * 5)
    assert run.plan.events() == (Phase((Event(0.2, 1.3 / 0.65),), 20),)


@statement("thm:fodpsgd_theory_total_privacy")
@pytest.mark.parametrize("beta", [1.0, 0.9, 0.5])
def test_total_rdp_is_the_sum_over_steps(beta):
    once, often = curve(planned(beta=beta, steps=1)), curve(planned(beta=beta, steps=500))
    for order in once:
        assert often[order] == pytest.approx(500 * once[order], rel=1e-9)


@statement("thm:fodpsgd_theory_total_privacy")
@pytest.mark.parametrize("beta", [1.0, 0.9, 0.65])
def test_total_privacy_by_the_classic_conversion(beta):
    """ε_δ = inf over orders of T·ε_SGM(λ; q, σ/β) + log(1/δ)/(λ-1)."""
    q, sigma, steps, delta = 0.04, 1.1, 1000, 1e-5
    public = dict(sampling_rate=q, noise_multiplier=sigma, steps=steps, beta=beta)
    found = planned(**public, accountant="rdp-classic").epsilon()

    def bound(rdp, order):
        return steps * rdp + math.log(1 / delta) / (order - 1)

    whole_orders = min(bound(sampled_gaussian_rdp(n, q, sigma / beta), n) for n in range(2, 64))
    all_orders = min(bound(renyi(n, q, sigma, beta), n) for n in np.linspace(1.5, 16, 100))
    assert all_orders * (1 - 1e-4) <= found <= whole_orders * (1 + 1e-9)
    assert found == pytest.approx(all_orders, rel=5e-3)
    assert found == fodp.epsilon(delta=delta, accountant="rdp-classic", **public)
    assert planned(**public, accountant="rdp").epsilon() < found  # the tighter conversion, same RDP


@statement("thm:fodpsgd_theory_total_privacy")
@pytest.mark.parametrize(
    ("beta", "reference"), [(1.0, 23.90), (0.95, 21.80), (0.9, 19.86), (0.8, 16.39), (0.65, 12.06)]
)
def test_total_privacy_of_the_papers_setting(beta, reference):
    """Reference values from numerical integration; dp-accounting's fractional orders come out up to 0.3% higher."""
    plan = planned(sampling_rate=0.04, noise_multiplier=1.1, steps=6250, beta=beta, accountant="rdp-classic")
    assert reference - 0.005 <= plan.epsilon() <= 1.003 * (reference + 0.005)


@statement("thm:fodpsgd_theory_total_privacy")
def test_time_varying_composition():
    """ε_tot(λ) = Σ_t ε_SGM(λ; q_t, σ_t/β_t)."""
    phases = [(0.04, 1.1, 0.9, 30), (0.1, 2.0, 0.5, 20), (0.02, 0.9, 1.0, 50)]
    rates, sigmas, betas, steps = (list(column) for column in zip(*phases, strict=True))
    mechanism = fodp.GaussianMechanism(
        clip_norm=1.0, noise_multiplier=1.0, beta=0.5, memory=fodp.UniformMemory(window=4)
    )
    events = []
    for q, sigma, beta, count in phases:
        mechanism.noise_multiplier, mechanism.beta = sigma, beta
        events.append(Phase((mechanism.event(q),), count))
    orders, total = rdp_curve(events)
    whole = {
        n: sum(count * sampled_gaussian_rdp(n, q, sigma / beta) for q, sigma, beta, count in phases)
        for n in range(2, 64)
    }
    for order, value in zip(orders.tolist(), total.tolist(), strict=True):
        if order in whole:
            assert value == pytest.approx(whole[order], rel=3e-9)
    public = dict(noise_multiplier=sigmas, sampling_rate=rates, steps=steps, beta=betas, delta=1e-5)
    found = fodp.epsilon(**public, accountant="rdp-classic")
    bound = min(value + math.log(1e5) / (n - 1) for n, value in whole.items())
    assert 0.99 * bound <= found <= bound * (1 + 1e-9)


@statement("thm:fodpsgd_theory_total_privacy")
def test_a_schedule_of_beta_is_charged_step_by_step():
    betas = [1.0] * 3 + [0.5] * 2 + [0.8] * 3
    run = recorded(beta=((0, 1.0), (3, 0.5), (5, 0.8)), steps=8)
    for t, beta in enumerate(betas):
        u = run.state.read()
        run.train(1)
        assert run.multipliers[t] == pytest.approx(1.1 / beta)
        assert close(run.queries[t], beta * run.sums[t] + (0 if u is None else (1 - beta) * u))
    total = curve(run.plan)
    for order in (2.0, 8.0, 32.0):
        assert total[order] == pytest.approx(sum(sampled_gaussian_rdp(int(order), 0.2, 1.1 / b) for b in betas))


@statement("rem:fodpsgd_theory_sigma_over_beta")
@pytest.mark.parametrize("beta", [1.0, 0.9, 0.3])
def test_the_ratio_is_noise_over_measured_sensitivity(beta):
    """σ/β is not assumed: it is the measured standard deviation of the noise over the measured sensitivity."""
    sigma = 1.3
    run, without = neighbours(
        with_an_outlier(digits(60), 5), 5, beta=beta, noise_multiplier=sigma, sampling_rate=1.0, lot_size=60
    )
    sensitivity = max(norm(run.queries[t] - without.queries[t]) for t in in_lock_step(run, without, steps=20))
    noise = torch.stack([run.noise(t) for t in range(20)])
    (event,) = run.plan.events_at(0)
    assert event.noise_multiplier == sigma / beta
    assert noise.std().item() / sensitivity == pytest.approx(event.noise_multiplier, rel=0.02)
    plan = planned(beta=beta, noise_multiplier=sigma)
    assert plan.epsilon() == fodp.epsilon(
        noise_multiplier=sigma / beta, sampling_rate=0.2, steps=20, delta=1e-5, accountant="rdp"
    )


@statement("rem:fodpsgd_theory_conditioning")
def test_subsampling_is_not_conditioned_away():
    """Given the mask, a step costs what an unsampled Gaussian costs, λβ²/(2σ²); accounted is the sampled one."""
    sigma, beta = 1.1, 0.8
    sampled, unsampled = (
        curve(planned(sampling_rate=q, noise_multiplier=sigma, beta=beta, steps=1)) for q in (0.04, 1.0)
    )
    for order in (2.0, 4.0, 8.0):
        assert unsampled[order] == pytest.approx(order * beta**2 / (2 * sigma**2), rel=3e-9)
        assert sampled[order] < unsampled[order] / 10
    # and masks are drawn afresh in every step, out of sight of the query
    lots = recorded(steps=20).train().lots
    assert len({tuple(lot.tolist()) for lot in lots}) == 20


# --- signal, memory, noise -------------------------------------------------------------------------------------


@statement("def:fodpsgd_theory_memory_terms")
@statement("lem:fodpsgd_theory_decomposition")
@pytest.mark.parametrize("window", [1, 4, 8])
def test_signal_memory_noise_decomposition(window):
    """r_t = β·s_t + M_rec + M_noise, with both recomputed from the recorded r and Z of earlier steps."""
    beta = 0.7
    run = recorded(beta=beta, window=window, tau=1.0)
    for t in range(20):
        weights = run.state.weights.tolist()  # â_{t,j}, before the step
        assert len(weights) == min(window, t + 1) - 1
        release = run.take_step()
        zero = torch.zeros_like(release)
        m_rec = (1 - beta) * sum((a * run.queries[t - j] for j, a in enumerate(weights, 1)), zero)
        m_noise = (1 - beta) * sum((a * run.noise(t - j) for j, a in enumerate(weights, 1)), zero)
        if t >= 1 and window > 1:
            assert norm(m_rec) > 0
            assert norm(m_noise) > 0
        r = beta * run.sums[t] + m_rec + m_noise
        assert close(run.queries[t], r, rtol=1e-10)
        assert close(release, r + run.noise(t), rtol=1e-10)
        run.update(release)
        gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        assert close(gradient, (r + run.noise(t)) / run.plan.lot_size, rtol=1e-10)


@statement("prop:fodpsgd_theory_convex_weights")
def test_the_memory_is_a_convex_combination_of_releases():
    run = recorded(beta=0.7, tau=2.0, window=6)
    for t in range(20):
        weights, u = run.state.weights, run.state.read()
        if t >= 1:
            assert (weights > 0).all()
            assert weights.sum().item() == pytest.approx(1, abs=1e-12)
            past = torch.stack([run.releases[t - j] for j in range(1, len(weights) + 1)])
            assert close(u, weights @ past)
            assert (u <= past.max(0).values + 1e-12).all()
            assert (u >= past.min(0).values - 1e-12).all()
        run.train(1)


@statement("rem:fodpsgd_inherited_noise_no_denoising")
def test_inherited_noise_is_averaged_and_not_removed():
    """Without any signal the memory still holds Σ_j â_j·Z_{t-j}: of variance σ²C²·Σ_j â_j², not zero."""
    sigma, size = 1.1, 20_000
    memory = fodp.FractionalMemory()
    mechanism = fodp.GaussianMechanism(
        clip_norm=1.0, noise_multiplier=sigma, memory=memory, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(20):
        mechanism.release(torch.zeros(size, dtype=torch.float64))
    expected = sigma * memory.weights.square().sum().sqrt().item()
    assert memory.read().std().item() == pytest.approx(expected, rel=0.02)
    assert expected > 0.3 * sigma


# --- the kernel, read from the memory itself ---------------------------------------------------------------------
# Whole numbers make every inner product exact, so equalities below are equalities.

TREND = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)  # of length 5
ACROSS = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)


def remembering(transcript, **settings):
    """A memory after this transcript, oldest release first."""
    memory = fodp.FractionalMemory(**settings)
    for release in transcript:
        memory.write(release)
    return memory


def around_the_trend(distances, trend=TREND):
    """Releases at these distances from the newest one, which for γ = 1 is the trend; the newest comes last."""
    return [*(trend + distance * ACROSS for distance in distances), trend]


def raw_kernel(memory):
    """a_{t,1}, a_{t,2}, …: the memory's weights, with their normalisation undone.

    For γ = 1 the newest release is the trend: ν_{t,1} = 0, and a_{t,1} = 2^(α-1)·e^(-λ) whatever τ and χ are.
    """
    assert memory.gamma == 1
    assert memory.inconsistency[0] == 0
    weights = memory.weights
    return (weights / weights[0] * 2 ** (memory.alpha - 1) * math.exp(-memory.lam)).tolist()


def power_law(alpha, count):
    return [(j + 1) ** (alpha - 1) for j in range(1, count + 1)]


def decreasing(values):
    return all(later < earlier for earlier, later in pairwise(values))


@statement("prop:fodpsgd_theory_tau_monotonicity")
def test_raw_kernel_decreases_with_tau():
    transcript = around_the_trend([5, 1, 0, 2])  # lags 5, 4, 3, 2; lag 3 agrees with the trend
    by_tau = [raw_kernel(remembering(transcript, gamma=1.0, tau=tau)) for tau in (0.0, 0.1, 0.5, 1.0, 2.0)]
    lags = list(zip(*by_tau, strict=True))
    assert all(decreasing(lags[j - 1]) for j in (2, 4, 5))  # ν > 0 and χ > 0: strictly
    assert lags[2] == pytest.approx([lags[2][0]] * 5, rel=1e-12)  # ν = 0: not at all
    silent = [  # χ = 0: not at all
        raw_kernel(remembering(around_the_trend([5, 1, 2], trend=0 * TREND), gamma=1.0, tau=tau))
        for tau in (0.0, 1.0, 10.0)
    ]
    assert silent[1] == pytest.approx(silent[0], rel=1e-12)
    assert silent[2] == pytest.approx(silent[0], rel=1e-12)


@statement("prop:fodpsgd_theory_inconsistency_suppression")
@pytest.mark.parametrize("lag", [2, 3, 4])
def test_inconsistent_releases_are_suppressed(lag):
    """Only the release at this lag moves away from the trend; its own coefficient falls, the others stay."""

    def kernel(distance, tau):
        distances = [1, 1, 1]
        distances[4 - lag] = distance
        memory = remembering(around_the_trend(distances), gamma=1.0, tau=tau)
        assert memory.inconsistency[lag - 1].item() == pytest.approx(distance / 5, rel=1e-9)
        return raw_kernel(memory)

    by_distance = list(zip(*(kernel(d, tau=1.0) for d in (0, 1, 2, 5, 20)), strict=True))
    assert decreasing(by_distance[lag - 1])
    for other in {2, 3, 4} - {lag}:
        assert by_distance[other - 1] == pytest.approx([by_distance[other - 1][0]] * 5, rel=1e-12)


@statement("prop:fodpsgd_theory_inconsistency_suppression")
def test_without_tempering_inconsistency_does_not_matter():
    kernels = [remembering(around_the_trend([1, d, 1]), gamma=1.0, tau=0.0).weights for d in (0, 1, 100)]
    assert torch.equal(kernels[0], kernels[1])
    assert torch.equal(kernels[0], kernels[2])


@statement("prop:fodpsgd_theory_chi_monotonicity")
def test_raw_kernel_decreases_with_confidence():
    """ζ moves χ and nothing else."""
    memories = [
        remembering(around_the_trend([5, 0, 2]), gamma=1.0, tau=1.0, zeta=zeta) for zeta in (1e6, 50.0, 5.0, 0.5, 1e-6)
    ]
    chi = [memory.confidence.item() for memory in memories]
    assert chi == pytest.approx([5 / (5 + zeta) for zeta in (1e6, 50.0, 5.0, 0.5, 1e-6)])
    assert all(torch.equal(memory.inconsistency, memories[0].inconsistency) for memory in memories)
    lags = list(zip(*(raw_kernel(memory) for memory in memories), strict=True))
    assert decreasing(lags[1])
    assert decreasing(lags[3])
    assert lags[2] == pytest.approx([lags[2][0]] * 5, rel=1e-12)  # ν = 0
    untempered = [
        remembering(around_the_trend([5, 0, 2]), gamma=1.0, tau=0.0, zeta=zeta).weights for zeta in (1e6, 1e-6)
    ]
    assert torch.equal(*untempered)  # τ = 0


@statement("prop:fodpsgd_theory_beta_tradeoff")
def test_beta_scales_sensitivity_and_signal_alike():
    """r moves by β times whatever s moves by: the sensitivity falls from C towards 0, and so does the signal."""
    torch.manual_seed(0)
    past = remembering([torch.randn(30, dtype=torch.float64) for _ in range(5)]).state_dict()
    s, d = torch.randn(2, 30, dtype=torch.float64)
    d *= CLIP_NORM / d.norm()
    for beta in (1.0, 0.5, 0.1, 1e-3):
        queries = []
        for value in (s, s + d):
            memory = fodp.FractionalMemory()
            memory.load_state_dict(past)
            mechanism = fodp.GaussianMechanism(clip_norm=CLIP_NORM, noise_multiplier=0, beta=beta, memory=memory)
            queries.append(mechanism.release(value))
        assert close(queries[1] - queries[0], beta * d, rtol=1e-9 / beta)
        assert (beta * fodp.Query(s, CLIP_NORM)).bound == pytest.approx(beta * CLIP_NORM)
    costs = [planned(beta=beta).epsilon() for beta in (1.0, 0.9, 0.65, 0.3)]
    assert decreasing(costs)


@statement("rem:fodpsgd_theory_lambda")
def test_role_of_lambda():
    """A factor e^(-λj) at every lag, whether its release is consistent or not."""
    transcript = around_the_trend([5, 0, 2, 1])
    plain = raw_kernel(remembering(transcript, gamma=1.0, tau=1.0, lam=0.0))
    for lam in (0.01, 0.3, 2.0):
        damped = raw_kernel(remembering(transcript, gamma=1.0, tau=1.0, lam=lam))
        assert damped == pytest.approx([a * math.exp(-lam * j) for j, a in enumerate(plain, start=1)], rel=1e-12)


@statement("rem:fodpsgd_theory_gamma")
def test_role_of_gamma():
    """A larger γ brings the trend nearer to the latest release; γ = 1 makes it that release."""
    torch.manual_seed(0)
    transcript = [torch.randn(50, dtype=torch.float64) for _ in range(30)]
    memories = [remembering(transcript, gamma=gamma) for gamma in (0.02, 0.1, 0.3, 0.7, 1.0)]
    trends = [memory.state_dict()["trend"] for memory in memories]
    assert decreasing([norm(trend - transcript[-1]) for trend in trends])
    assert torch.equal(trends[-1], transcript[-1])
    for memory, trend in zip(memories, trends, strict=True):
        memory.write(transcript[0])
        expected = memory.gamma * transcript[0] + (1 - memory.gamma) * trend
        assert close(memory.state_dict()["trend"], expected)


@statement("rem:fodpsgd_theory_kappa")
def test_role_of_kappa():
    """When the trend vanishes κ takes its place as the scale of ν; a trend longer than κ does not feel it."""
    kappas = (0.01, 0.1, 1.0, 10.0)
    collapsed = [remembering([TREND, -TREND], gamma=0.5, kappa=kappa, eps=1e-12) for kappa in kappas]
    for memory, kappa in zip(collapsed, kappas, strict=True):
        assert memory.state_dict()["trend"].tolist() == [0, 0, 0]
        assert memory.inconsistency.tolist() == pytest.approx([5 / kappa] * 2)
    lively = [remembering([2 * TREND, TREND], gamma=0.5, kappa=kappa).inconsistency for kappa in (1e-3, 7.4)]
    assert torch.equal(*lively)


@statement("rem:fodpsgd_theory_zeta")
def test_role_of_zeta():
    """χ = ½ where the trend is as long as ζ; a larger ζ tempers less, a smaller one more."""
    transcript = around_the_trend([5, 1, 2])
    zetas = (0.05, 0.5, 5.0, 50.0, 500.0)
    memories = [remembering(transcript, gamma=1.0, tau=1.0, zeta=zeta) for zeta in zetas]
    assert decreasing([memory.confidence.item() for memory in memories])
    assert memories[2].confidence == 0.5
    untempered = remembering(transcript, gamma=1.0, tau=0.0).weights
    assert decreasing([norm(memory.weights - untempered) for memory in memories])


@statement("rem:fodpsgd_theory_alpha")
def test_role_of_alpha():
    """(j+1)^(α-1) falls with the lag, the faster the smaller α is; at α = 1 it is constant."""
    transcript = [torch.ones(3)] * 8
    alphas = (0.2, 0.5, 0.8, 1.0)
    weights = [remembering(transcript, alpha=alpha, lam=0.0, tau=0.0).weights.tolist() for alpha in alphas]
    for alpha, found in zip(alphas[:-1], weights, strict=False):
        assert decreasing(found)
        assert [w / found[0] for w in found] == pytest.approx([((j + 1) / 2) ** (alpha - 1) for j in range(1, 8)])
    assert weights[-1] == pytest.approx([1 / 7] * 7, rel=1e-12)
    assert decreasing([found[0] for found in weights])  # the newest release counts the more the smaller α is


@statement("rem:fodpsgd_theory_K")
def test_role_of_the_window():
    """K_t = min(K, t+1): lags 1 to K_t-1 enter the memory and no others, signal and noise alike."""
    rows = list(torch.eye(10, dtype=torch.float64))  # release t is the t-th unit vector
    support = []
    for window in (1, 2, 5, 8, 32):
        memory = fodp.FractionalMemory(window=window, tau=0.0)
        for t in range(11):
            seen = [] if memory.read() is None else memory.read().nonzero().flatten().tolist()
            assert seen == list(range(t - min(window, t + 1) + 1, t))
            if t < 10:
                memory.write(rows[t])
        support.append(len(seen))
    assert support == [0, 1, 4, 7, 10]


# --- special cases and limits ------------------------------------------------------------------------------------


@statement("prop:fodpsgd_theory_tau_zero")
def test_case_tau_zero():
    """a_j = (j+1)^(α-1)·e^(-λj), whatever the transcript is."""
    alpha, lam = 0.6, 0.2
    kernel = [a * math.exp(-lam * j) for j, a in enumerate(power_law(alpha, 7), start=1)]
    for run in (recorded(tau=0.0, alpha=alpha, lam=lam), recorded(tau=0.0, alpha=alpha, lam=lam, seed=8)):
        weights = run.train(12).state.weights
        assert weights.tolist() == pytest.approx([a / sum(kernel) for a in kernel], rel=1e-12)


@statement("prop:fodpsgd_theory_lambda_tau_zero")
def test_case_lambda_and_tau_zero():
    """a_j = (j+1)^(α-1): the raw power law."""
    for alpha in (0.2, 0.8):
        weights = recorded(tau=0.0, lam=0.0, alpha=alpha).train(12).state.weights
        kernel = power_law(alpha, 7)
        assert weights.tolist() == pytest.approx([a / sum(kernel) for a in kernel], rel=1e-12)


@statement("prop:fodpsgd_theory_beta_one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [1, 8])
def test_case_beta_one_is_dp_sgd_bit_for_bit(dtype, window):
    run = recorded(dtype=dtype, beta=1.0, window=window, tau=1.0, steps=60).train()
    standard = recorded(dtype=dtype, method="dp-sgd", steps=60).train()
    for t in range(60):
        assert torch.equal(run.queries[t], run.sums[t])
        assert torch.equal(run.releases[t], standard.releases[t])
    assert torch.equal(run.parameters, standard.parameters)
    assert run.plan.events() == standard.plan.events()
    assert run.plan.epsilon() == standard.plan.epsilon()


@statement("prop:fodpsgd_theory_K_one")
def test_case_window_one_only_scales():
    """r_t = β·s_t: β times the DP-SGD release at σ/β, and DP-SGD itself only if β = 1 as well."""
    beta, sigma = 0.6, 1.1
    run = recorded(beta=beta, window=1, noise_multiplier=sigma)
    twin = recorded(method="dp-sgd", noise_multiplier=sigma / beta)
    standard = recorded(method="dp-sgd", noise_multiplier=sigma)
    for t in range(20):
        twin.model.load_state_dict(run.model.state_dict())
        standard.model.load_state_dict(run.model.state_dict())
        assert run.state.read() is None
        for each in (run, twin, standard):
            each.take_step()
        assert torch.equal(run.queries[t], beta * run.sums[t])
        assert close(run.releases[t], beta * twin.releases[t])
        assert not close(run.releases[t], standard.releases[t], rtol=1e-3)
        run.update(run.releases[t])


@statement("prop:fodpsgd_theory_alpha_one")
def test_case_alpha_one():
    """a_j = exp(-(λ + χτν_j)·j): no power law is left."""
    memory = recorded(alpha=1.0, lam=0.1, tau=1.0, zeta=10.0, kappa=10.0, gamma=1.0).train(12).state
    exponents = [
        -(0.1 + memory.confidence.item() * nu) * j for j, nu in enumerate(memory.inconsistency.tolist(), start=1)
    ]
    assert raw_kernel(memory) == pytest.approx([math.exp(e) for e in exponents], rel=1e-9)
    agreeing = remembering(around_the_trend([0, 0, 0]), gamma=1.0, alpha=1.0, lam=0.0, tau=1.0)
    assert agreeing.weights.tolist() == [0.25] * 4


@statement("prop:fodpsgd_theory_chi_to_zero")
def test_confidence_vanishing_regime():
    """χ → 0, here by ζ → ∞: the kernel goes to the tempered power law without inconsistency."""
    transcript = recorded(beta=0.7).train().releases
    limit = remembering(transcript, tau=0.0).weights
    apart = [norm(remembering(transcript, tau=1.0, zeta=zeta).weights - limit) for zeta in (1e1, 1e3, 1e5, 1e7)]
    assert decreasing(apart)
    assert apart[-1] < 1e-5
    assert close(remembering(transcript, tau=1.0, zeta=1e30).weights, limit)


@statement("prop:fodpsgd_theory_chi_to_one")
def test_full_confidence_regime():
    """χ → 1, here by ζ → 0: a_j → (j+1)^(α-1)·exp(-(λ + τν_j)·j)."""
    alpha, lam, tau = 0.8, 0.05, 0.3
    transcript = recorded(beta=0.7).train().releases
    memories = [remembering(transcript, alpha=alpha, lam=lam, tau=tau, zeta=zeta) for zeta in (1e1, 1e-1, 1e-3, 1e-30)]
    nu = memories[-1].inconsistency.tolist()
    kernel = [a * math.exp(-(lam + tau * nu[j - 1]) * j) for j, a in enumerate(power_law(alpha, 7), start=1)]
    limit = torch.tensor(kernel, dtype=torch.float64) / sum(kernel)
    assert decreasing([norm(memory.weights - limit) for memory in memories])
    assert close(memories[-1].weights, limit)
    assert memories[-1].confidence == pytest.approx(1, abs=1e-15)


@statement("prop:fodpsgd_theory_beta_to_zero")
def test_memory_dominated_regime():
    """For a fixed transcript r_t → u as β → 0, and what is left is β·(s - u)."""
    torch.manual_seed(0)
    past = remembering([torch.randn(30, dtype=torch.float64) for _ in range(9)])
    u, s = past.read(), torch.randn(30, dtype=torch.float64)
    apart = []
    for beta in (1e-1, 1e-2, 1e-4, 1e-6):
        memory = copy.deepcopy(past)
        mechanism = fodp.GaussianMechanism(clip_norm=1.0, noise_multiplier=0, beta=beta, memory=memory)
        r = mechanism.release(s)
        assert close(r - u, beta * (s - u), rtol=1e-8)
        apart.append(norm(r - u))
    assert decreasing(apart)
    assert apart[-1] < 1e-5 * norm(u)


@statement("prop:fodpsgd_theory_q_to_one")
def test_full_participation_limit():
    """As q → 1 the lot takes in everybody, and r_t goes to its full-participation counterpart."""
    everybody = recorded(sampling_rate=1.0, lot_size=300, beta=0.7)
    sampled = [recorded(sampling_rate=q, lot_size=300, beta=0.7) for q in (0.5, 0.9, 0.99, 1 - 1e-6)]
    images, labels = digits().tensors
    for t in range(5):
        for run in sampled:
            run.condition_on(everybody)
            run.take_step()
        full = fodp.clipped_sum(everybody.model, loss_fn, (images, labels), CLIP_NORM)
        release = everybody.take_step()
        assert everybody.lots[t].tolist() == list(range(300))
        assert close(everybody.sums[t], full)
        missing = [300 - len(run.lots[t]) for run in sampled]
        assert decreasing(missing[:3])
        assert missing[3] == 0
        assert close(sampled[3].queries[t], everybody.queries[t])
        for run, count in zip(sampled, missing, strict=True):
            assert norm(run.queries[t] - everybody.queries[t]) <= 0.7 * CLIP_NORM * count + 1e-9
        everybody.update(release)


@pytest.mark.skipif("FODP_DATA" not in os.environ, reason="needs FODP_DATA: the folder with cifar10.npz")
@pytest.mark.parametrize("scale", [1.0, None], ids=["order one", "noise floor"])
def test_scores_of_real_training_are_those_of_pure_noise(scale):
    """At the paper's noise the memory's scores carry no signal: what docs/mechanism.md says of κ and ζ."""
    splits = load("cifar10")
    params = dict(lr=0.8, kappa=scale, zeta=scale)
    public = dict(sampling_rate=0.04, steps=200, lot_size=200, clip_norm=1.0, noise_multiplier=1.1, delta=1e-5)
    plan = fodp.Plan(**public, seed=0, method="fo-dp-sgd", params=params)
    torch.manual_seed(0)
    trainer = fodp.Trainer(models.build("mlp", splits.card), models.cross_entropy, splits.train, plan)
    trainer.fit()
    trained, size = trainer.session.states["method"], trainer.source.layout.size
    memory = plan.algorithm.init(plan, size)
    mechanism = fodp.GaussianMechanism(
        clip_norm=1.0, noise_multiplier=1.1, beta=0.9, memory=memory, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(plan.steps):
        mechanism.release(torch.zeros(size))
    assert trained.confidence.item() == pytest.approx(memory.confidence.item(), rel=0.01)
    assert trained.inconsistency.tolist() == pytest.approx(memory.inconsistency.tolist(), rel=0.02)
    assert memory.confidence.item() == pytest.approx(0.99 if scale else 0.52, abs=0.02)
