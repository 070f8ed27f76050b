"""What a sealed search will do and what it costs, fixed before it begins."""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fodp.accounting import Phase, rounded_up
from fodp.accounting.budget import Repetitions
from fodp.accounting.composition import calibrate_scale, rdp_curve, tally
from fodp.accounting.renyi import epsilon_from_rdp
from fodp.errors import BudgetError, ConfigurationError
from fodp.plan import Plan

SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": float("inf")}
_MOST_CANDIDATES = 10_000


@dataclass(frozen=True)
class Search:
    """The best of a random number of runs, each of a candidate that is drawn at random with replacement.

    Guarantee: releasing the best run (its parameters, weights and score on public data) and, if there is a `final`
    plan, one run of that with the best parameters, is (ε, δ)-differentially private with ε = `epsilon`: for whoever
    sees neither other runs nor how many there were (Papernot and Steinke 2022, theorems 2 and 6). `events` are those of
    the dearest candidate: at every Rényi order no other costs more, so the mixture of all does not either; and so for
    the final plan.

    Runs on a random part of the data (`fraction`) are charged as if they saw all of it: no amplification is claimed.
    """

    repetitions: Repetitions
    candidates: tuple[Plan, ...]
    dearest: int
    fraction: float | None = None
    final: tuple[Plan, ...] = ()  # one for each candidate
    dearest_final: int = 0

    @property
    def events(self) -> tuple[Phase, ...]:
        """Of each run, at most."""
        return self.candidates[self.dearest].events()

    @property
    def delta(self) -> float:
        """δ of the whole."""
        return self.candidates[0].delta

    @cached_property
    def search_epsilon(self) -> float:
        """ε of releasing the best run and nothing else."""
        return self.repetitions.epsilon(self.events, self.delta)

    @cached_property
    def run_epsilon(self) -> float:
        """ε that one run of the search alone would have."""
        return self.candidates[self.dearest].epsilon()

    @cached_property
    def epsilon(self) -> float:
        """ε of everything that leaves."""
        if not self.final:
            return self.search_epsilon
        return _composed(self.repetitions, self.events, self.final[self.dearest_final].events(), self.delta)

    def draw(self) -> list[int]:
        """Which candidate each run takes: as many as the random number says, from operating-system entropy. Secret."""
        return [secrets.randbelow(len(self.candidates)) for _ in range(self.repetitions.draw())]


def grid(varied: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the values to try."""
    if not varied:
        raise ConfigurationError("what is to be tried? add --vary NAME=VALUE,VALUE, for example --vary lr=0.1,0.2,0.4")
    size = int(np.prod([len(values) for values in varied.values()], dtype=float))
    if size > _MOST_CANDIDATES:
        raise ConfigurationError(f"{size} combinations are more than {_MOST_CANDIDATES}: vary less")
    return [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]


def calibrated(
    templates: Sequence[Plan],
    repetitions: Repetitions,
    target: float,
    *,
    fraction: float | None = None,
    final: Sequence[Plan] = (),
    search_target: float | None = None,
) -> Search:
    """The search whose whole ε is at most the target: candidates of `templates` with the noise that this takes.

    With `final` plans the search by itself has at most `search_target`, and the final run what is then left.
    """
    delta = templates[0].delta
    for plan in templates:
        if any(replace(plan, params={**plan.params, **choice}) != plan for choice in plan.algorithm.candidates(plan)):
            raise ConfigurationError(
                f"{plan.method} leaves a parameter to the plan's calibration, which a search cannot do for runs that "
                "are compared: give it with --set, or vary it"
            )
    first = target if search_target is None else search_target
    candidates = _with_noise(templates, lambda phases: repetitions.epsilon(phases, delta), first, delta)
    candidates, dearest = _dominated(candidates, lambda phases: repetitions.epsilon(phases, delta))
    if not final:
        return Search(repetitions, candidates, dearest, fraction)
    spent = candidates[dearest].events()
    both = _with_noise(final, lambda phases: _composed(repetitions, spent, phases, delta), target, delta)
    both, last = _dominated(both, lambda phases: _composed(repetitions, spent, phases, delta))
    return Search(repetitions, candidates, dearest, fraction, both, last)


def _composed(repetitions: Repetitions, search: Sequence[Phase], final: Sequence[Phase], delta: float) -> float:
    """ε of the selection and one more run, both fixed beforehand: Rényi divergences add up."""
    return epsilon_from_rdp(repetitions.rdp(search) + rdp_curve(final)[1], delta)


def _with_noise(templates: Sequence[Plan], price: Any, target: float, delta: float) -> tuple[Plan, ...]:
    """Each plan with the least noise at which it costs the target; plans with the same events share the answer."""
    found: dict[Any, float] = {}
    plans = []
    for template in templates:
        alike = tally(replace(template, noise_multiplier=1.0).events())
        if alike not in found:
            at = lambda noise, plan=template: replace(plan, noise_multiplier=noise).events()  # noqa: E731
            found[alike] = calibrate_scale(at, target, delta, "rdp", price)
        plans.append(replace(template, noise_multiplier=found[alike]))
    return tuple(plans)


def _dominated(plans: tuple[Plan, ...], price: Any) -> tuple[tuple[Plan, ...], int]:
    """The plans, and which of them costs most at every order; noise is added where a rounding stands in the way."""
    dearest = max(range(len(plans)), key=lambda place: price(plans[place].events()))
    most = rdp_curve(plans[dearest].events())[1]
    below = []
    for plan in plans:
        for _ in range(4):
            if (rdp_curve(plan.events())[1] <= most).all():
                break
            plan = replace(plan, noise_multiplier=plan.noise_multiplier * 1.01)
        else:
            raise BudgetError(
                "the candidates cost in ways that no one of them covers, so their best has no price here: search them "
                "in two searches, each with its own charge"
            )
        below.append(plan)
    return tuple(below), dearest


def statement(search: Search) -> str:
    """The guarantee in plain English: what it covers, and what it does not."""
    plan, shape = search.candidates[search.dearest], search.repetitions.shape
    name = next((word for word, value in SHAPES.items() if value == shape), f"truncated negative binomial, {shape:g}")
    part = (
        "" if search.fraction is None else f" on a random {search.fraction:g} of the data, charged as if on all of it"
    )
    lines = [
        f"This search is ({rounded_up(search.epsilon)}, {rounded_up(search.delta, 6)})-differentially private as a "
        f"whole, for whoever sees what left it: the best run's parameters, score and model.",
        plan.described().protected(),
        f"Mechanism: the best of a random number of runs ({name}, mean {search.repetitions.mean:g}), each of one of "
        f"{len(search.candidates)} declared candidates drawn at random with replacement, by its score on public data. "
        f"Each run{part}: {plan.method}, {plan.steps} steps, clip norm "
        f"{plan.clip_norm:g}, noise multiplier {_noise(search.candidates)}; one such run alone would have epsilon "
        f"{rounded_up(search.run_epsilon)}.",
        *_how(search.candidates),
    ]
    if search.final:
        lines.append(
            f"Then one run on all data with the best parameters: {search.final[0].steps} steps, noise multiplier "
            f"{_noise(search.final)}. The search alone: epsilon {rounded_up(search.search_epsilon)}; both compose."
        )
    lines += [
        "Accountant: Rényi DP (Papernot and Steinke 2022 for the selection).",
        "Randomness: secure. The number of runs, the candidates, masks and noise come from operating-system entropy.",
        "Not covered: anything else that somebody saw of the search (other runs, how many there were, how long it "
        "took, its sealed files); scores on data that is itself private; candidates or public numbers that came from "
        "this data; other runs on the same data (their budgets add up); floating-point and timing attacks.",
    ]
    return "\n".join(lines)


def _how(plans: Sequence[Plan]) -> list[str]:
    """How runs draw lots and make noise; candidates may differ in it."""
    described = [plan.described() for plan in plans]
    return list(dict.fromkeys(words for one in described for words in (one.sampling(), one.noise())))


def _noise(plans: Sequence[Plan]) -> str:
    """One number, or the range of those that cost the same with different parameters."""
    shown = sorted({f"{plan.noise_multiplier:.6g}" for plan in plans}, key=float)
    return shown[0] if len(shown) == 1 else f"from {shown[0]} to {shown[-1]}, by the candidate"
