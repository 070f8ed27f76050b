"""A plan: all public numbers of a run, and the one place that claims differential privacy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from fodp import accounting
from fodp.accounting import ACCOUNTANTS, Event, Phase
from fodp.accounting.described import Described, protected_unit
from fodp.accounting.sizes import CHECKS, SIZES, completed
from fodp.errors import ConfigurationError
from fodp.methods import METHODS, Method, find, recipe
from fodp.noise.banded import accumulated_noise
from fodp.options import KINDS, Options, conflicts
from fodp.options.chosen import folded
from fodp.options.schedule import Numbers
from fodp.options.table import known_names
from fodp.statement import statement
from fodp.support import checks, words

if TYPE_CHECKING:
    from fodp import options

UNITS = ("record", "person")
_COMBINED = ("mean", "sum")
_OPEN: Any = None  # a number that may follow from others


class Sizes(TypedDict, total=False):
    """Public guesses of how large the data is, in place of rates and steps."""

    public_size: int
    batch: float
    epochs: float


class People(TypedDict, total=False):
    """Who is protected, and what a step uses of a person's records."""

    unit: str
    records_per_person: int | None
    person_gradient: str


class OptionObjects(TypedDict, total=False):
    """Options as objects, in place of their spelling in params."""

    rate: "options.Rate"
    update: "options.Update"
    filter: "options.Filter"
    clip: "options.Clip"
    quantile: "options.Quantile"
    scaling: "options.Scaling"
    noise_schedule: "options.NoiseSchedule"
    clip_schedule: "options.ClipSchedule"
    average: "options.Average"


class Chosen(Sizes, People, OptionObjects, total=False):
    """What may be said beside the numbers that every plan has."""


@dataclass(frozen=True, kw_only=True, init=False)
class Plan:
    """What will be done to the data, declared before it is touched; it implies (ε, δ).

    Guarantee: a run of this plan on any data set is (ε, δ)-differentially private under adding or
    removing one example (with unit="person", one person with all of their records), with ε = `epsilon()`, for whoever
    sees all releases (so also for whoever sees the model at any step). Every number here is public and must not be
    computed from the data: not the sampling rate, not the lot size (rule 1).

    sampling_rate: probability q that an example takes part in a step; or batch / public_size.
    steps: number T of steps; or round(epochs / q).
    lot_size: the public number L by which sums are divided; or the batch, or q times the public size.
    clip_norm: C, the most one example's gradient may weigh, 1 unless given.
    noise_multiplier: the method's one noise number; `fodp.methods` says what it means for each.
    delta: δ; should be well below one over the number of people. With a public size 1e-5 or a tenth of one over it.
    public_size, batch, epochs: public guesses of how many records there are, how many of them a step draws, and how
        often each is drawn, in place of the numbers above; what is given twice must agree.
    method, params: the private optimizer and its public parameters, options included. Without a method it is the
        recommended recipe (`fodp.methods.recipe`), with these params.
    rate, update, filter, clip, quantile, scaling, noise_schedule, clip_schedule, average: options as objects of
        `fodp.options`, in place of their spelling in params: `average=fodp.options.Ema(0.99)`.
    accountant: "pld" (tight, default), "rdp" or "rdp-classic" (the paper's formula).
    seed: None for a real run; a number for repeatable research, which is not private against readers of it.
    exact_noise: release on a grid with exactly rounded noise, against attacks on low bits (`fodp.noise.exact`).
    unit: "record", or "person" for the promise to people with all of their records: one person is added or removed.
        Then sampling_rate is the probability that a person takes part in a step, lot_size is about the number of people
        in a lot, and clip_norm bounds a person's gradient. The Trainer is told whose each record is (`owners`).
    records_per_person: with unit "person", how many of a person's records a step uses at most, drawn at random.
    person_gradient: with unit "person", the "mean" (default) of their records' gradients, or the "sum".

    Example:
        >>> import fodp
        >>> plan = fodp.Plan(sampling_rate=0.04, steps=6250, lot_size=200, clip_norm=1.0, noise_multiplier=1.1,
        ...                  delta=1e-5, method="fo-dp-sgd", params=dict(beta=0.9, alpha=0.8, window=8))
        >>> round(plan.epsilon(), 1)
        17.4
    """

    sampling_rate: float = _OPEN
    steps: int = _OPEN
    lot_size: float = _OPEN
    clip_norm: float = 1.0
    noise_multiplier: float
    delta: float = _OPEN
    method: str = _OPEN
    params: Mapping[str, Any] = field(default_factory=dict)
    accountant: str = "pld"
    seed: int | None = None
    exact_noise: bool = False
    unit: str = "record"
    records_per_person: int | None = None
    person_gradient: str = "mean"

    def __init__(
        self,
        *,
        noise_multiplier: float = _OPEN,
        sampling_rate: float | None = None,
        steps: int | None = None,
        lot_size: float | None = None,
        clip_norm: float = 1.0,
        delta: float | None = None,
        method: str | None = None,
        params: Mapping[str, Any] = MappingProxyType({}),
        accountant: str = "pld",
        seed: int | None = None,
        exact_noise: bool = False,
        **chosen: Unpack[Chosen],
    ):
        said: dict[str, Any] = dict(
            sampling_rate=sampling_rate, steps=steps, lot_size=lot_size, clip_norm=clip_norm,
            noise_multiplier=noise_multiplier, delta=delta, method=method, params=params, accountant=accountant,
            seed=seed, exact_noise=exact_noise, **chosen,
        )  # fmt: skip
        said = {name: checks.builtin(value) for name, value in said.items()}
        if noise_multiplier is None:
            del said["noise_multiplier"]
        unknown = [_unknown_field(name, said[name]) for name in sorted(said.keys() - _names())]
        if unknown:
            raise ConfigurationError(checks.listed([*unknown, *map(str, checks.refusals(*field_checks(said)))]))
        if noise_multiplier is None:
            raise ConfigurationError("noise_multiplier is missing: give it, or let Plan.calibrated find it for an ε")
        said |= _all_of(said)
        for own in fields(self):
            object.__setattr__(self, own.name, said.get(own.name, own.default))
        self._refuse_together()
        # Defaults are filled in, so that the plan records every number that the run will use.
        object.__setattr__(self, "params", self.algorithm.describe())
        if checks.called_by_the_user():
            warn_of_little_privacy(self)

    def _refuse_together(self) -> None:
        """Raise for numbers and choices that are right by themselves and not together."""
        conflicts.refuse(self._own_features())
        _check_scale("noise_multiplier times clip_norm", self.noise_multiplier * self.clip_norm)
        for numbers in self._numbers().values():
            checks.clip_norm("clip_norm times clip_schedule", numbers.clip_norm)
            scale = numbers.noise_multiplier * numbers.clip_norm
            _check_scale("noise_multiplier times clip_norm, with noise_schedule and clip_schedule,", scale)
        turns = self.algorithm.turns
        if turns * self.sampling_rate > 1 + 1e-9:
            raise ConfigurationError(
                f"with {turns} cohorts of records that take turns, a record whose turn it is would be drawn with "
                f"probability {turns}·{self.sampling_rate:g} = {turns * self.sampling_rate:g}: take at most "
                f"{int(1 / self.sampling_rate + 1e-9)} bands, or a lower sampling_rate"
            )

    def __repr__(self) -> str:
        """What was chosen: of the method's parameters those that differ from their defaults."""
        usual = find(self.method).from_dict({}).describe()
        chosen = {name: value for name, value in self.params.items() if name not in usual or value != usual[name]}
        given = {**self.to_dict(), "params": chosen}
        shown = {
            f.name: given[f.name] for f in fields(self) if f.name in given and given[f.name] not in (f.default, {})
        }
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def features(self) -> dict[str, str]:
        """Words for the table of conflicts, of all that is in the plan, each with what a message calls it."""
        found = self._own_features()
        if any(len(phase.events) != 1 for phase in self._events):
            found["a method that draws several lots"] = f"{self.method}, which draws several lots in a step,"
        return found

    def _own_features(self) -> dict[str, str]:
        """Those that are known without the plan's events."""
        found = {**self.algorithm.features, f"unit={self.unit!r}": f"unit={self.unit!r}"}
        return found | ({"exact_noise": "exact_noise"} if self.exact_noise else {})

    @cached_property
    def algorithm(self) -> Method:
        """The method with its parameters."""
        return find(self.method).from_dict({name: checks.builtin(value) for name, value in self.params.items()})

    @property
    def options(self) -> Options:
        """The options that compose with the method, as objects."""
        return self.algorithm.options

    def events(self) -> tuple[Phase, ...]:
        """Every step's privacy events, promised before any data is touched."""
        return self._events

    @cached_property
    def _events(self) -> tuple[Phase, ...]:
        numbers = self._numbers()
        phases = tuple(self.algorithm.events(self)) if not numbers else self._scheduled_events(numbers)
        promised = sum(phase.steps for phase in phases)
        if promised != self.steps:
            raise ConfigurationError(f"{self.method} promises events for {promised} steps of a plan of {self.steps}")
        if any(phase.turns != self.algorithm.turns for phase in phases):
            raise ConfigurationError(
                f"{self.method} lets records take turns among {self.algorithm.turns} groups and promises something else"
            )
        return phases

    def _numbers(self) -> dict[int, Numbers]:
        """The public numbers from each step on at which a schedule changes one of them; empty without a schedule."""
        schedules = self.options.schedules
        return {} if schedules is None else {at: schedules.at(self, at) for at in schedules.starts(self.steps)}

    def _scheduled_events(self, numbers: Mapping[int, Numbers]) -> tuple[Phase, ...]:
        """Of every piece of the schedule, what the method promises there under the piece's own numbers."""
        ends = [*list(numbers)[1:], self.steps]
        return tuple(
            phase
            for (start, mine), end in zip(numbers.items(), ends, strict=True)
            for phase in accounting.truncate(accounting.after(self.algorithm.events(mine), start), end - start)
        )

    def events_at(self, step: int) -> tuple[Event, ...]:
        """The events of one step."""
        for phase in self._events:
            if step < phase.steps:
                return phase.events
            step -= phase.steps
        raise ConfigurationError(f"the plan has {self.steps} steps only")

    def epsilon(self, *, delta: float | None = None, steps: int | None = None) -> float:
        """ε at δ, of the whole plan or of its first steps. Never negative; reading changes nothing.

        The ε of first steps holds if the run was to end there before it began. A run that is stopped because of
        what was seen has the ε of the whole plan.

        Args:
            delta: another δ than the plan's.
            steps: the first steps only.

        Returns:
            ε, infinite where no finite one holds.

        Raises:
            PrivacyError: the plan has fewer steps.

        Example:
            >>> plan = Plan(public_size=60000, batch=512, epochs=20, noise_multiplier=1.0, method="dp-sgd")
            >>> plan.epsilon(steps=100) < plan.epsilon() < plan.epsilon(delta=1e-9)
            True
        """
        phases = self._events if steps is None else accounting.truncate(self._events, steps)
        return accounting.epsilon_of(phases, self.delta if delta is None else delta, self.accountant)

    @classmethod
    def calibrated(cls, *, target_epsilon: float, **public: Any) -> "Plan":
        """The plan whose noise multiplier is the smallest that keeps ε at or below the target.

        Calibration moves the method's one noise number and nothing else, but for parameters that were left to the plan
        (`bands` of fo-noise): these are chosen for the least noise at the target, and of choices within 1% of each
        other the first, which takes the least memory.

        Args:
            target_epsilon: the ε that is not exceeded.
            public: every other keyword of a plan.

        Returns:
            The plan.

        Raises:
            ConfigurationError: for what a plan refuses, and for a noise_multiplier.
            BudgetError: no noise meets the target.

        Example:
            >>> plan = Plan.calibrated(target_epsilon=8, public_size=60000, batch=512, epochs=2, method="dp-sgd")
            >>> 7.9 < plan.epsilon() <= 8
            True
        """
        checks.positive("target_epsilon", target_epsilon)
        if "noise_multiplier" in public:
            raise ConfigurationError("calibration finds the noise_multiplier: give target_epsilon or it, not both")
        template = cls(noise_multiplier=1.0, **public)
        plans: list[tuple[float, Plan]] = []
        for choice in template.algorithm.candidates(template) or ({},):
            plan = replace(template, params={**template.params, **choice})._calibrated(target_epsilon)
            plans.append((plan.noise_multiplier * accumulated_noise(plan.algorithm.strategy(), plan.steps), plan))
            if plans[-1][0] > 1.1 * min(noise for noise, _ in plans):
                break  # it falls and then rises
        least = min(noise for noise, _ in plans)
        found = next(plan for noise, plan in plans if noise <= 1.01 * least)
        if checks.called_by_the_user():
            warn_of_little_privacy(found, target_epsilon)
        return found

    def _calibrated(self, target_epsilon: float) -> "Plan":
        found = accounting.calibrate_scale(
            lambda noise: replace(self, noise_multiplier=noise).events(), target_epsilon, self.delta, self.accountant
        )
        return replace(self, noise_multiplier=found)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values: `Plan(**d)` makes the same plan. Without people, nothing about them is listed."""
        left_out = () if self.unit == "person" else ("unit", "records_per_person", "person_gradient")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}

    def unit_in_words(self) -> str:
        """Who is protected, for a card."""
        return protected_unit(self.unit)

    def described(self) -> Described:
        """Unit, sampling and noise of the whole plan, for all papers of a run."""
        return Described(
            self._events,
            unit=self.unit,
            records_per_person=self.records_per_person,
            person_gradient=self.person_gradient,
            bands=len(self.algorithm.strategy()),
            exact_noise=self.exact_noise,
            accountant=self.accountant,
            delta=self.delta,
        )

    def statement(self, *, steps: int | None = None, epsilon: float | None = None) -> str:
        """The guarantee in plain English: what it covers, and what it does not.

        Args:
            steps: where the run was fixed beforehand to end, if that is not the plan's end.
            epsilon: a smaller ε that a budget guarantees.

        Returns:
            The text.

        Example:
            >>> plan = Plan(public_size=60000, batch=512, epochs=20, noise_multiplier=1.0, method="dp-sgd")
            >>> print(plan.statement())
            This run is (2.594, 2e-06)-differentially private.
            Unit: one training example. ...
        """
        return statement(self, steps=steps, epsilon=epsilon)


def _names() -> set[str]:
    """Every keyword of a plan: its fields, public sizes, and options as objects."""
    return {*SIZES, *KINDS, *(field.name for field in fields(Plan))}


def _check_scale(name: str, value: float) -> None:
    if not 1e-30 <= value <= 1e30:
        raise ConfigurationError(f"{name} must lie between 1e-30 and 1e30, where float32 holds it; got {value:g}")


def _all_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that follow from others, once all that was said is right; else one refusal of all that is wrong."""
    found: dict[str, Any] = {}

    def fill_in() -> None:
        if not checks.refusals(*field_checks(said)):  # which are told by themselves
            found.update(completed(said))

    more = (fill_in, lambda: found.update(_chosen(said)), lambda: found.update(_unit(said)))
    checks.together(*field_checks(said), *more)
    return found


def _unit(said: Mapping[str, Any]) -> dict[str, Any]:
    """Who is protected."""
    unit, most = said.get("unit", "record"), said.get("records_per_person")
    how = checks.one_of("person_gradient", said.get("person_gradient", "mean"), _COMBINED)
    if checks.one_of("unit", unit, UNITS) == "person":
        if most is None:
            raise ConfigurationError(
                "unit='person' needs records_per_person, a public number: how many of a person's records a step "
                "uses at most"
            )
        return {"records_per_person": checks.whole("records_per_person", most)}
    if most is not None or how != "mean":
        raise ConfigurationError(
            "records_per_person and person_gradient are about people: add unit='person', or leave them out"
        )
    return {}


def _chosen(said: Mapping[str, Any]) -> dict[str, Any]:
    """Method and flat parameters, with objects in their flat spelling."""
    params = said.get("params", {})
    if not isinstance(params, Mapping):
        raise ConfigurationError(f"params must be a mapping of names to values, got {type(params).__name__}")
    flat = {name: checks.builtin(value) for name, value in params.items()}
    flat = folded(flat, {kind: said[kind] for kind in KINDS if kind in said})
    method, flat = recipe.completed(said.get("method"), flat, exact_noise=said.get("exact_noise") is True)
    if isinstance(method, str) and method in METHODS:  # else that is what is told
        find(method).from_dict(flat)
    return {"method": method, "params": flat}


def _unknown_field(name: str, value: Any) -> str:
    if name in known_names() or any(name == f.name for method in METHODS.values() for f in fields(method.Params)):
        return f"{name} is a parameter of the method: put it into params, params=dict({name}={checks.shown(value)})"
    here = words.answer(name)
    if here is not None:
        return f"a plan has no field {name!r}: here it is {here}"
    return f"a plan has no field {name!r}; it knows {', '.join(sorted(_names()))}"


def field_checks(given: Mapping[str, Any]) -> list[Callable[[], object]]:
    """The checks of single fields, of those that are given."""
    known: dict[str, Callable[[str, Any], object]] = {
        **CHECKS,
        "noise_multiplier": checks.positive,
        "clip_norm": checks.clip_norm,
        "accountant": lambda name, value: checks.one_of(name, value, ACCOUNTANTS),
        "seed": lambda name, value: value is None or checks.whole(name, value, minimum=0),
        "exact_noise": checks.switch,
        "method": lambda name, value: find(value),
    }
    return [
        partial(check, name, given[name])
        for name, check in known.items()
        if name in given and not (given[name] is None and name in _MAY_BE_OPEN)
    ]


_MAY_BE_OPEN = {*CHECKS, "method"}


_LARGE_DELTA, _LARGE_EPSILON, _SMALL_EPSILON = 1e-3, 50.0, 0.01
_LARGE_RATE = 1e4


def odd_delta(plan: Plan) -> list[str]:
    """A sentence about a δ that is allowed and hardly meant."""
    size = plan.lot_size / plan.sampling_rate  # as far as the plan tells
    least = min(_LARGE_DELTA, 1 / size)
    if plan.delta <= least:
        return []
    why = "" if least == _LARGE_DELTA else f", one over the {size:.3g} records that lot_size / sampling_rate tells of"
    return [
        f"delta {plan.delta:g} is above {least:.2g}{why}: publishing that share of the records as they are would "
        f"satisfy it. Take a tenth of one over a public guess of their number, such as {0.1 * least:.0e}"
    ]


def odd_strength(plan: Plan, target_epsilon: float | None) -> list[str]:
    """Sentences about a target ε and a learning rate that are allowed and hardly meant."""
    found = []
    if target_epsilon is not None and target_epsilon > _LARGE_EPSILON:
        found.append(
            f"target epsilon {target_epsilon:g} promises next to nothing: what is seen may be e^{target_epsilon:g} "
            "times likelier with a record than without. Usual are 1 to 10"
        )
    if target_epsilon is not None and target_epsilon < _SMALL_EPSILON:
        found.append(
            f"target epsilon {target_epsilon:g} takes so much noise that hardly anything is learnt from fewer than "
            "millions of records. Usual are 1 to 10"
        )
    return found + odd_rate(plan.params.get("lr"))


def odd_rate(rate: Any) -> list[str]:
    """A sentence about a learning rate that is allowed and hardly meant."""
    if not isinstance(rate, int | float) or rate <= _LARGE_RATE:
        return []
    return [f"lr {rate:g} moves weights by noise alone: training will diverge. Usual are 0.001 to 10, or auto"]


def warn_of_large_rates(optimizer: Any) -> None:
    """Warn about such a rate of the user's own optimizer."""
    for sentence in {sentence for group in optimizer.param_groups for sentence in odd_rate(group["lr"])}:
        checks.warn(sentence.replace(", or auto", ""))


def warn_of_little_privacy(plan: Plan, target_epsilon: float | None = None) -> None:
    """Warn about a plan's odd numbers, in the line of the user who made it."""
    for sentence in [*odd_delta(plan), *odd_strength(plan, target_epsilon)]:
        checks.warn(sentence)
