"""A plan: all public numbers of a run, and the one place that claims differential privacy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from fodp import _checks, accounting
from fodp._checks import PrivacyError
from fodp.accounting import ACCOUNTANTS, MOST_STEPS, Event, Phase
from fodp.methods import Method, find
from fodp.statement import statement


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done to the data, declared before it is touched; it implies (ε, δ).

    Guarantee: a run of this plan on any data set is (ε, δ)-differentially private under adding or
    removing one example, with ε = `epsilon()`, for whoever sees all releases (so also for whoever
    sees the model at any step). Every number here is public and must not be computed from the data:
    not the sampling rate, not the lot size (rule 1).

    sampling_rate: probability q that an example takes part in a step.
    steps: number T of steps.
    lot_size: the public number L by which sums are divided (about q times a public guess of the size).
    clip_norm: C, the most one example's gradient may weigh.
    noise_multiplier: the method's one noise number; `fodp.methods` says what it means for each.
    delta: δ; should be well below one over the number of people.
    method, params: the private optimizer and its public parameters.
    accountant: "pld" (tight, default), "rdp" or "rdp-classic" (the paper's formula).
    seed: None for a real run; a number for repeatable research, which is not private against readers of it.
    exact_noise: release on a grid with exactly rounded noise, against attacks on the low bits of floats (`fodp.exact`).

    Example:
        >>> import fodp
        >>> plan = fodp.Plan(sampling_rate=0.04, steps=6250, lot_size=200, clip_norm=1.0, noise_multiplier=1.1,
        ...                  delta=1e-5, method="fo-dp-sgd", params=dict(beta=0.9, alpha=0.8, window=8))
        >>> round(plan.epsilon(), 1)
        17.4
    """

    sampling_rate: float
    steps: int
    lot_size: float
    clip_norm: float
    noise_multiplier: float
    delta: float
    method: str = "fo-dp-sgd"
    params: Mapping[str, Any] = field(default_factory=dict)
    accountant: str = "pld"
    seed: int | None = None
    exact_noise: bool = False

    def __post_init__(self) -> None:
        _checks.fraction("sampling_rate", self.sampling_rate)
        _checks.whole("steps", self.steps, maximum=MOST_STEPS)
        for name in ("lot_size", "noise_multiplier"):
            _checks.positive(name, getattr(self, name))
        _checks.clip_norm("clip_norm", self.clip_norm)
        self._check_scale("noise_multiplier times clip_norm", self.noise_multiplier * self.clip_norm)
        _checks.open_fraction("delta", self.delta)
        _checks.one_of("accountant", self.accountant, ACCOUNTANTS)
        if self.seed is not None:
            _checks.whole("seed", self.seed, minimum=0)
        if not isinstance(self.exact_noise, bool):
            raise PrivacyError(f"exact_noise must be True or False, got {_checks.shown(self.exact_noise)}")
        if not isinstance(self.params, Mapping):
            raise PrivacyError(f"params must be a mapping of names to values, got {type(self.params).__name__}")
        # Fill in the defaults, so that the plan records every number that the run will use.
        object.__setattr__(self, "params", self.algorithm.describe())

    @staticmethod
    def _check_scale(name: str, value: float) -> None:
        if not 1e-30 <= value <= 1e30:
            raise PrivacyError(f"{name} must lie between 1e-30 and 1e30, where float32 holds it; got {value:g}")

    @cached_property
    def algorithm(self) -> Method:
        """The method with its parameters."""
        return find(self.method).from_dict(dict(self.params))

    def events(self) -> tuple[Phase, ...]:
        """Every step's privacy events, promised before any data is touched."""
        return self._events

    @cached_property
    def _events(self) -> tuple[Phase, ...]:
        phases = tuple(self.algorithm.events(self))
        promised = sum(phase.steps for phase in phases)
        if promised != self.steps:
            raise PrivacyError(f"{self.method} promises events for {promised} steps of a plan of {self.steps}")
        return phases

    def events_at(self, step: int) -> tuple[Event, ...]:
        """The events of one step."""
        for phase in self._events:
            if step < phase.steps:
                return phase.events
            step -= phase.steps
        raise PrivacyError(f"the plan has {self.steps} steps only")

    def epsilon(self, *, delta: float | None = None, steps: int | None = None) -> float:
        """ε at δ, of the whole plan or of its first steps. Never negative; reading changes nothing.

        The ε of first steps holds if the run was to end there before it began. A run that is stopped because of
        what was seen has the ε of the whole plan.
        """
        phases = self._events if steps is None else accounting.truncate(self._events, steps)
        return accounting.epsilon_of(phases, self.delta if delta is None else delta, self.accountant)

    @classmethod
    def calibrated(cls, *, target_epsilon: float, **public: Any) -> "Plan":
        """The plan whose noise multiplier is the smallest that keeps ε at or below the target.

        Takes every other field of a plan. Moves the method's one noise number and nothing else.
        """
        _checks.positive("target_epsilon", target_epsilon)
        if "noise_multiplier" in public:
            raise PrivacyError("calibration finds the noise_multiplier: give target_epsilon or it, not both")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(public) - known)
        if unknown:
            raise PrivacyError(f"a plan has no field {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        template = cls(noise_multiplier=1.0, **public)
        found = accounting.calibrate_scale(
            lambda noise: replace(template, noise_multiplier=noise).events(),
            target_epsilon,
            template.delta,
            template.accountant,
        )
        return replace(template, noise_multiplier=found)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values: `Plan(**d)` makes the same plan."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def statement(self, *, steps: int | None = None, epsilon: float | None = None) -> str:
        """The guarantee in plain English: what it covers, and what it does not.

        `steps` is where the run was fixed beforehand to end, `epsilon` a smaller ε that a budget guarantees.
        """
        return statement(self, steps=steps, epsilon=epsilon)
