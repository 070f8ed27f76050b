"""Parts that act late in a plan, or seldom, act within the replay: leaks in them are found in plans of any length."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fodp
from fodp import audit
from fodp.audit.subject import in_short
from fodp.methods import METHODS
from fodp.options import schedule
from fodp.options.average import RunningAverage
from fodp.options.transcript import TranscriptScaling
from fodp.session import Session
from fodp.state import fitting
from fodp.step import Step
from methods_for_tests import let_rate_rules_hear_clean_sums
from mutants_for_tests import losses, plan, problem
from sessions_for_tests import measured_by, private_columns

RULE = dict(rate_rule="transcript")
RATES = [dict(lr=0.1), dict(lr="auto", shape="fan-in")]  # a number, and the recipe's
TAIL = dict(average="tail", average_share=0.1)
FEWER = dict(noise_schedule=((0, 1.0), (150, 0.8)))


def audited(the_plan, *attacks):
    model, dataset, canaries = problem()
    return audit.audit(the_plan, model, losses, dataset, canaries, attacks=attacks)


def long(method, params, steps=200):
    return replace(plan(method, params), steps=steps)


# --- right versions --------------------------------------------------------------------------------------------------


@pytest.mark.rule(12)
@pytest.mark.parametrize("rate", RATES, ids=str)
@pytest.mark.parametrize("steps", [20, 200])
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
def test_a_rate_rule_that_hears_releases_is_consistent(method, steps, rate):
    report = audited(long(method, {**RULE, **rate}, steps), "replay", "one-run")
    assert report.consistent, [finding.faults[:3] for finding in report.findings]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("dp-sgd", dict(shape="kronecker", shape_every=30, lr="auto")),
        ("dp-sgd", dict(shape="transcript", lr="auto", lr_schedule="trapezoid", lr_warmup=20)),
        ("dp-sgd", {**TAIL, **FEWER}),
        (
            "fo-dp-sgd",
            dict(beta=((0, 0.9), (180, 0.5)), clip_schedule=tuple((i, 1 + i / 200) for i in range(0, 200, 5))),
        ),
        ("fo-noise", dict(bands=16, average="tail")),
    ],
    ids=["kronecker", "transcript", "tail", "many pieces", "turns"],
)
def test_no_late_part_is_accused(method, params):
    finding = audited(long(method, params), "replay").findings[0]
    assert finding.consistent, finding.faults[:3]
    assert finding.numbers["worst_ratio"] > 0.9


# --- wrong versions --------------------------------------------------------------------------------------------------


def maps_made_anew_of_the_data(monkeypatch):
    """The first maps are of made-up records, later ones of the private inputs."""

    measured_by(monkeypatch, lambda rows, step, public: rows if step else public(step))
    return dict(shape="kronecker", shape_every=30)


def energies_before_their_noise_after_the_warm_up(monkeypatch):
    """Of the first `shape_warmup` releases what is public, of later ones the clean sum."""
    see = TranscriptScaling.see

    def clean(self, query, release, std):
        warm = self._seen >= self._shape.shape_warmup
        see(self, query, query.value if warm else release, 0.0 if warm else std)

    monkeypatch.setattr(TranscriptScaling, "see", clean)
    return dict(shape="transcript")


def a_tail_with_clean_sums(monkeypatch):
    """An average that takes in what the last step would have been without noise."""
    heard, take, clean = Session.heard, RunningAverage.take, []

    def kept(session, query, *released):
        clean[:] = [query.value.clone()]
        return heard(session, query, *released)

    monkeypatch.setattr(Session, "heard", kept)
    monkeypatch.setattr(RunningAverage, "take", lambda self, x, *when: take(self, x - 0.01 * clean[0], *when))
    return TAIL


def a_schedule_that_stays_at_its_first_piece(monkeypatch):
    """What a step adds is not what the plan promises, and charges, from the second piece on."""
    made = Step.__init__

    def at_first(step, session, number):
        made(step, session, number)
        step.plan = session.method.options.schedules.at(session.plan, 0)

    monkeypatch.setattr(Step, "__init__", at_first)
    return FEWER


def an_automatic_rate_of_the_data(monkeypatch):
    """lr="auto", divided by the length of the private inputs."""
    made = fitting._automatic_rate
    monkeypatch.setattr(
        fitting,
        "_automatic_rate",
        lambda session: made(session) / float(private_columns(session.source)[0].float().norm()),
    )
    return dict(lr="auto")


@pytest.mark.rule(12)
@pytest.mark.parametrize("rate", RATES, ids=str)
@pytest.mark.parametrize("steps", [20, 200])
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
def test_a_rate_rule_that_hears_clean_sums_is_accused(monkeypatch, method, steps, rate):
    let_rate_rules_hear_clean_sums(monkeypatch)
    report = audited(long(method, {**RULE, **rate}, steps), "replay")
    assert report.exit_code == 1
    assert any("optimizer after step" in fault or "state after step" in fault for fault in report.findings[0].faults)


LATE = [
    (maps_made_anew_of_the_data, "parameters after step"),
    (energies_before_their_noise_after_the_warm_up, "parameters after step"),
    (a_tail_with_clean_sums, "state after step"),
    (a_schedule_that_stays_at_its_first_piece, "refused: step 7 emitted"),
    (an_automatic_rate_of_the_data, "optimizer after step"),
]


@pytest.mark.rule(12)
@pytest.mark.parametrize(("wrong", "says"), LATE)
def test_a_part_that_leaks_late_is_accused(monkeypatch, wrong, says):
    report = audited(long("dp-sgd", wrong(monkeypatch)), "replay")
    assert any(says in fault for fault in report.findings[0].faults), report


# --- plans in short --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("steps", [1, 7, 10])
def test_every_method_has_plans_in_short(method, steps):
    whole = fodp.Plan(
        sampling_rate=0.01, steps=1000, lot_size=10, clip_norm=1.0, noise_multiplier=1.3, delta=1e-5, method=method,
        params=dict(noise_schedule=((0, 1.0), (10, 1.5), (900, 2.0)), lr_warmup=400),
    )  # fmt: skip
    short = in_short(whole, steps)
    assert (short.steps, sum(phase.steps for phase in short.events())) == (steps, steps)
    assert short.options.rate.lr_warmup == max(1, 4 * steps // 10)
    kept = ("noise_multiplier", "clip_norm", "lot_size", "sampling_rate", "delta", "method", "seed")
    assert all(getattr(short, name) == getattr(whole, name) for name in kept)
    changed = {name for name in whole.params if whole.params[name] != short.params[name]}
    assert changed <= {"noise_schedule", "lr_warmup"}
    assert in_short(whole, 1000) is whole


def test_what_is_counted_in_steps_acts_in_short():
    params = dict(shape="transcript", beta=((0, 0.9), (250, 0.8), (999, 0.5)), clip_schedule=((0, 1.0), (5000, 2.0)))
    short = in_short(long("fo-dp-sgd", params, 1000), 10).params
    assert short["beta"] == ((0, 0.9), (2, 0.8), (9, 0.5))
    assert short["clip_schedule"] == ((0, 1.0), (50, 2.0))  # as little as in the plan
    assert (short["shape_warmup"], short["window"]) == (1, 8)
    kronecker = in_short(long("dp-sgd", dict(shape="kronecker", shape_every=999), 1000), 10).params
    assert kronecker["shape_every"] == 9


def test_records_that_take_turns_have_theirs_in_short():
    whole = replace(plan("fo-noise", dict(bands=20)), steps=400)
    assert in_short(whole, 10).algorithm.turns == 5
    assert in_short(replace(whole, params=dict(bands=3)), 10).algorithm.turns == 3


@given(
    starts=st.lists(st.integers(1, 10_000), unique=True, max_size=30),
    of=st.integers(2, 10_000),
    steps=st.integers(1, 30),
)
def test_a_schedule_in_short_is_one_and_ends_alike(starts, of, steps):
    pairs = tuple((start, 1.0 + start) for start in (0, *sorted(starts)))
    short = schedule.in_short(pairs, steps, of)
    assert schedule.checked("factors", short, lambda name, value: value) == short
    if 1 < steps <= of:
        assert schedule.value_at(short, 0) == 1.0
        assert schedule.value_at(short, steps - 1) >= schedule.value_at(pairs, of - of // steps - 1)
        assert schedule.value_at(short, steps - 1) <= schedule.value_at(pairs, of - 1)
