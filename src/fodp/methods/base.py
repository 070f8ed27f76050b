"""What a private optimizer is: public parameters, promised events, and a step in a few verbs.

Six parts compose with every method: the update that the optimizer makes of the releases, a filter on them, an
adaptive clip norm, clipping by layer, the shape of the query, and public schedules of noise and clip norm
(`fodp.methods.parts`). People write them flat, as parameters that all methods take (`CommonParams`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import ConfigurationError
from fodp.accounting import Phase
from fodp.methods.parts import schedule, shapes
from fodp.methods.parts.adaptive_clip import Quantile
from fodp.methods.parts.filters import FILTERS, Doppler, Fractional, Momentum
from fodp.methods.parts.layers import PerLayer
from fodp.methods.parts.rates import AUTO
from fodp.methods.parts.schedule import Schedule, Schedules
from fodp.methods.parts.shapes import Shape, ShapeChoice
from fodp.methods.parts.updates import UPDATES, AdamBC, CorrectedAdam, Sgd, Update

if TYPE_CHECKING:
    from fodp.clipping.engine import Points
    from fodp.clipping.gradients import Gradients
    from fodp.queries import Query
    from fodp.sampling import Lot

Part = TypeVar("Part", bound=Update | Momentum | Doppler | Fractional | Quantile | PerLayer | Schedules | Shape)

# What a flat parameter waits for. Those of a part that was not chosen must be left at their defaults.
_NEEDS = {
    "beta1": "update='adam' or the like",
    "beta2": "update='adam' or the like",
    "adam_eps": "update='adam' or 'adamw'",
    "bc_floor": "update='adambc' or 'adamwbc'",
    "filter_a": "filter='doppler'",
    "filter_b": "filter='doppler'",
    "filter_beta": "filter='fractional'",
    "count_noise": "a quantile",
    "clip_rate": "a quantile",
    "clip_min": "a quantile",
    "clip_max": "a quantile",
    "layer_shares": "clip='per-layer'",
    "clip_stability": "clip='normalised'",
}
# Left out of what is recorded where they are not used: plans from before there were any stay the same plans.
_LATER = ("clip", "layer_shares", "clip_stability", "noise_schedule", "clip_schedule", "shape", "width", "auto_ratio")
CLIPPINGS = ("flat", "per-layer", "normalised")


@dataclass(frozen=True)
class Parts:
    """The parts that a method was composed with; None: the release as it is, the clip norm as it is, clipped whole."""

    update: Update
    filter: Momentum | Doppler | Fractional | None
    clip: Quantile | None
    layers: PerLayer | None = None
    schedules: Schedules | None = None
    shape: Shape | None = None
    stability: float | None = None  # of gradients that are all scaled to the clip norm


@dataclass(frozen=True, kw_only=True)
class CommonParams:
    """Public parameters that every method takes: learning rate, update, filter, clipping, schedules.

    lr: a number, or auto: c·L·w/(σ·C·√T) with c = `auto_ratio` and w the initial scale of the weights over their
        shape, so that the noise of the whole run is c times the initial weights in every layer. For the shape fan-in
        and update sgd, with or without momentum or a filter, by methods that know what noise they accumulate.
    update: sgd, adam, adamw, adambc or adamwbc, with `momentum`, `beta1`, `beta2`, `adam_eps`,
        `weight_decay`, `bc_floor` where they apply.
    filter: none, momentum (bias-corrected average, `momentum` 0.9 unless set), doppler (`filter_a`,
        `filter_b`) or fractional (`filter_beta`); acts on releases, whatever the update.
    quantile: None keeps the clip norm; a fraction adapts it so that about that share of the examples is
        unclipped. Costs no ε: the noisy count (`count_noise`, default L/20, or z where that is larger) is
        released jointly. It starts at the plan's clip norm, moves by `clip_rate`, within `clip_min` and `clip_max`.
    clip: flat (a gradient is clipped as a whole) or per-layer (each module's part to its share of the clip norm, equal
        ones or those of `layer_shares`; the squares of the parts sum to C²) or normalised (every gradient g becomes
        C·g/(‖g‖ + `clip_stability`), so that C drops out but for the rate: Bu et al., Automatic Clipping, 2023).
    shape: none, fan-in (the part of a parameter with more than `width` inputs is scaled by √(width/inputs) before
        clipping, and the release again), or public numbers of your own, one for each trainable parameter.
    noise_schedule: public factors on the noise multiplier, as pairs (first step, factor) from step 0 on;
        `clip_schedule` the same on the clip norm.
    """

    lr: float | str = 0.1
    update: str = "sgd"
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    bc_floor: float = 0.03
    filter: str = "none"
    filter_a: tuple[float, ...] = (-0.9,)
    filter_b: tuple[float, ...] = (0.1,)
    filter_beta: float = 0.9
    quantile: float | None = None
    count_noise: float | None = None
    clip_rate: float = 0.2
    clip_min: float = 1e-3
    clip_max: float = 1e3
    clip: str = "flat"
    layer_shares: tuple[float, ...] = ()
    noise_schedule: Schedule | None = None
    clip_schedule: Schedule | None = None
    clip_stability: float = 0.01
    shape: ShapeChoice = "none"
    width: float = 64.0
    auto_ratio: float = 1.8

    def __post_init__(self) -> None:
        if self.lr != AUTO and _checks.positive("lr", self.lr) > 1e30:
            raise ConfigurationError(f"lr must be at most 1e30, where float32 holds it; got {self.lr!r}")
        _checks.one_of("update", self.update, UPDATES)
        _checks.one_of("filter", self.filter, FILTERS)
        _checks.one_of("clip", self.clip, CLIPPINGS)
        object.__setattr__(self, "shape", shapes.checked(self.shape))
        if _checks.positive("clip_stability", self.clip_stability) and self.clip == "normalised" and self.quantile:
            raise ConfigurationError(
                "clip='normalised' brings every gradient to the clip norm, and a quantile counts those below it: leave "
                "one of them out"
            )
        for name in ("noise_schedule", "clip_schedule"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, schedule.checked(name, getattr(self, name), _checks.positive))
        if self.clip_schedule is not None and self.quantile is not None:
            raise ConfigurationError(
                "a quantile adapts the clip norm, and clip_schedule fixes it beforehand: leave one of them out"
            )
        for name in ("filter_a", "filter_b", "layer_shares"):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or isinstance(given, str):
                raise ConfigurationError(f"{name} must be a sequence of numbers, got {given!r}")
            object.__setattr__(self, name, tuple(_checks.number(f"each of {name}", value) for value in given))
        for field in fields(CommonParams):  # ranges are the parts' business
            if isinstance(field.default, float) and getattr(self, field.name) != AUTO:
                _checks.number(field.name, getattr(self, field.name))
        self._refuse_what_would_not_act()
        _ = self.parts  # each checks itself

    @cached_property
    def parts(self) -> Parts:
        """What the flat spelling means: the one place where it is read."""
        averaged = self.filter == "momentum"  # then `momentum` is the filter's, and the update has none
        kind = FILTERS[self.filter]
        return Parts(
            self._part(UPDATES[self.update], momentum=0.0 if averaged else self.momentum),
            None if kind is None else self._part(kind, momentum=self.momentum or 0.9),
            None if self.quantile is None else self._part(Quantile),
            self._part(PerLayer) if self.clip == "per-layer" else None,
            None if self.noise_schedule is self.clip_schedule is None else self._part(Schedules),
            None if self.shape == "none" else self._part(Shape),
            self.clip_stability if self.clip == "normalised" else None,
        )

    def _part(self, kind: type[Part], **changes: float) -> Part:
        return kind(**{f.name: changes.get(f.name, getattr(self, f.name)) for f in fields(kind)})

    def _refuse_what_would_not_act(self) -> None:
        by_layer = PerLayer if self.clip == "per-layer" else None
        chosen = (UPDATES[self.update], FILTERS[self.filter], None if self.quantile is None else Quantile, by_layer)
        acting = {f.name for kind in chosen if kind is not None for f in fields(kind)}
        acting |= {"clip_stability"} if self.clip == "normalised" else set()
        for name, needed in _NEEDS.items():
            self._refuse_unused(name in acting, needed, name)
        self._refuse_unused(self.shape == "fan-in", "shape='fan-in'", "width")
        self._refuse_unused(self.lr == AUTO, "lr='auto'", "auto_ratio")
        _checks.positive("auto_ratio", self.auto_ratio)
        if self.lr == AUTO:
            self._refuse_rates_without_a_rule()
        if self.momentum and "momentum" not in acting:
            raise ConfigurationError(
                f"momentum does nothing with update {self.update!r}: set beta1, or filter='momentum'"
            )
        if self.weight_decay and "weight_decay" not in acting:
            raise ConfigurationError(
                f"weight_decay does nothing with update {self.update!r}: set it to 0, or update to adamw or adamwbc"
            )

    def _refuse_rates_without_a_rule(self) -> None:
        """lr="auto" knows the noise beforehand, the same in every layer against its weights: not with everything."""
        wrong = {
            f"shape={self.shape!r}": self.shape != "fan-in",
            f"update={self.update!r}": self.update != "sgd",
            "a quantile": self.quantile is not None,
            "noise_schedule": self.noise_schedule is not None,
            "clip_schedule": self.clip_schedule is not None,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigurationError(
                    f"lr='auto' has no rule for {what}: use shape='fan-in', update='sgd' and a fixed noise, or give lr "
                    "as a number"
                )

    def _refuse_unused(self, acting: bool, needed: str, *names: str) -> None:
        """Refuse parameters that were set and would do nothing; only defaults may wait for `needed`."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if not acting and getattr(self, name) != defaults[name]:
                raise ConfigurationError(f"{name} does nothing without {needed}: set that too, or leave {name} out")


class PublicNumbers(Protocol):
    """What a method may know of a plan before any data is touched; `fodp.Plan` is one."""

    @property
    def sampling_rate(self) -> float:
        """The probability q that an example takes part in a step."""

    @property
    def steps(self) -> int:
        """How many steps the plan has."""

    @property
    def lot_size(self) -> float:
        """The public number L by which sums are divided."""

    @property
    def clip_norm(self) -> float:
        """C, the most one example's gradient may weigh, where it is not adapted."""

    @property
    def noise_multiplier(self) -> float:
        """The method's one noise number, which calibration moves."""


class State(Protocol):
    """What a method carries from step to step; made of releases and public numbers only."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that another process needs to go on from here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


class StepContext(Protocol):
    """What a method's step may use. Implemented by `fodp.run.Run`; an audit brings its own."""

    @property
    def plan(self) -> PublicNumbers:
        """The public numbers of the run."""

    @property
    def step(self) -> int:
        """Which step of the plan this is; the first is 0."""

    @property
    def clip_norm(self) -> float:
        """C of this step: the plan's, or the adapted one."""

    def draw(self, rate: float | None = None, name: str = "") -> "Lot":
        """A fresh Poisson lot; `name` keeps the randomness of several lots of one step apart."""

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """The shapes of the model's trainable parameters, in their order in a flat vector."""

    def gradients(
        self, lot: "Lot", at: "Points" = ..., ascent: float = 0.0, blocks: Sequence[float] | None = None
    ) -> "Gradients":
        """The lot's per-example gradients, as questions that may be asked; `blocks` scales each parameter's part."""

    def adapt_clip(self, gradients: "Gradients", query: "Query", std: float) -> float:
        """With a quantile: releases the count of unclipped examples, and returns the noise that the query then needs.

        The two share what the query alone would have cost with `std`. Without a quantile `std` comes back as it is.
        """

    def release(self, lot: "Lot", query: "Query", std: float) -> Tensor:
        """The query plus noise, charged to the lot."""

    def unclipped_fraction(self) -> float | None:
        """The released noisy share of examples within the clip norm, where that is adapted."""

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector: public, made of releases."""

    def norm(self, vector: Tensor) -> Tensor:
        """The ℓ2 norm of a release or a vector like it, whole also where this process holds slices of it."""

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets."""

    def noise_share(self, parameter: Tensor) -> float:
        """What share of that variance the noise of a parameter has: a shape differs from one to another."""

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream, the same in every process of a run.

        One for each record of a lot: `lot.own(run.uniform(lot.count, name))`, which are those of the records here.
        """

    def public_score(self) -> float:
        """The loss on data declared public."""


class Method:
    """A private optimizer. Subclass it in a file of its own and give it a row in the method table.

    `noise_meaning` says what the plan's noise_multiplier is for this method: the one number that
    calibration moves. `queries` and `cost` say what a step takes; `advice` when to use it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    noise_meaning: ClassVar[str]
    queries: ClassVar[str] = "1"
    cost: ClassVar[str] = "one gradient"
    advice: ClassVar[str] = ""
    reconstruction: ClassVar[str] = ""  # what is not from the paper's own text or code, if anything
    correlates_noise: ClassVar[bool] = False  # True: what `step` returns carries noise of earlier steps
    has_acceptance_test: ClassVar[bool] = False  # True: `accepts` decides after the update whether it stays
    weighs_by_norm: ClassVar[bool] = False  # True: its sums weigh whole gradients, which cannot be done layer by layer
    takes_slices: ClassVar[bool] = False  # True, for this very class: its step is right on slices of a sharded model
    has_unit_gain: ClassVar[bool] = False  # True, for this very class: in the long run noise adds up as if unfiltered
    owns_optimizer: bool = False  # True: the optimizer is the method's, or its params', and takes no other's place
    Params: ClassVar[type[CommonParams]] = CommonParams

    def __init__(self, params: Any):
        self.params = params
        self.parts: Parts = params.parts
        if self.weighs_by_norm and params.clip != "flat":
            raise ConfigurationError(f"{self.name} weighs whole gradients by their norms: leave clip at 'flat'")
        filtered_twice = self.correlates_noise and self.parts.filter is not None
        if filtered_twice and isinstance(self.parts.update, CorrectedAdam):
            raise ConfigurationError(
                f"{self.name} filters its noise already, and {params.update} must know the variance of what it gets: "
                "leave out the filter, or use another update"
            )
        self.owns_optimizer |= not isinstance(self.parts.update, Sgd) or params.momentum != 0

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Method":
        """Make the method from plain keys; an unknown one is refused with the known ones named."""
        known = [f.name for f in fields(cls.Params)]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ConfigurationError(f"{cls.name} has no parameter {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        return cls(cls.Params(**given))

    def describe(self) -> dict[str, Any]:
        """Every parameter with its value, defaults included: recorded with each run. Later parts only if used."""
        defaults = {f.name: f.default for f in fields(self.params)}
        given = asdict(self.params)
        return {name: value for name, value in given.items() if name not in _LATER or value != defaults[name]}

    def events(self, plan: PublicNumbers) -> Sequence[Phase]:
        """What the plan promises before any data is touched: the events of every step."""
        raise NotImplementedError

    @property
    def turns(self) -> int:
        """In how many groups the records take turns, one group a step; 1: all may be drawn at every step.

        The chance of a record whose turn it is, is that many times the plan's rate. `events` says so (`Phase.turns`).
        """
        return 1

    def strategy(self) -> Sequence[float]:
        """How the noise of releases is correlated (`fodp.noise.banded`): bands of a matrix, at most `turns` of them,
        of length 1 at most. (1.0,): fresh noise for every release."""
        return (1.0,)

    def candidates(self, plan: PublicNumbers) -> Sequence[dict[str, Any]]:
        """Values for parameters that were left to the plan. At a target ε, `Plan.calibrated` takes those whose
        `strategy` accumulates the least noise."""
        return ()

    def init(self, plan: PublicNumbers, size: int) -> State:
        """A fresh state for a model with `size` trainable numbers."""
        return NoState()

    def step(self, run: StepContext, state: Any) -> Tensor:
        """One step: the private sum to hand to the optimizer (which gets it divided by L)."""
        raise NotImplementedError

    def noise_gains(self, state: Any) -> Sequence[float]:
        """What the noise variance of the step's last release has in what `step` returns, then that of the step
        before it, …"""
        return (1.0,)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer that makes updates of the releases, as the parameters ask."""
        return self.parts.update.optimizer(parameters, 1.0 if self.params.lr == AUTO else self.params.lr)

    def accumulated_noise(self, plan: PublicNumbers) -> float:
        """The standard deviation of the noise in the sum of all that `step` returns, for lr="auto": public numbers."""
        if not vars(type(self)).get("has_unit_gain", False):
            raise ConfigurationError(
                f"lr='auto' has no rule for {self.name}, whose accumulated noise it does not know: give lr as a number"
            )
        return plan.noise_multiplier * plan.clip_norm * math.sqrt(plan.steps)

    def tune(self, optimizer: torch.optim.Optimizer, run: StepContext, state: Any) -> None:
        """Before every update: tell the optimizer what it may know. Post-processing only."""
        if isinstance(optimizer, AdamBC):
            for group in optimizer.param_groups:
                group["noise_variance"] = run.noise_variance()
                if self.parts.shape is not None:  # the noise differs from block to block
                    group["noise_shares"] = [run.noise_share(parameter) for parameter in group["params"]]

    def accepts(self, run: StepContext, state: Any) -> bool:
        """After the update, for methods that propose: keep it?"""
        return True


class DataclassState:
    """Makes a `State` of a dataclass whose fields are tensors, numbers or None: saved and loaded as copies."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _copied(getattr(self, name)) for name in self._names()}

    def state_views(self) -> dict[str, Any]:
        """The values themselves, to be written to a file before the next step."""
        if type(self).state_dict is not DataclassState.state_dict:  # whoever derives from it saves something else
            return self.state_dict()
        return {name: getattr(self, name) for name in self._names()}

    def bytes_when_full(self, size: int) -> int:
        """How much the state will take at most, for vectors of this many entries."""
        return len(self._names()) * size * 4

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._names():
            setattr(self, name, _copied(state[name]))

    def _names(self) -> list[str]:
        return [field.name for field in fields(self)]  # type: ignore[arg-type]  # whoever derives from it is one


@dataclass
class NoState(DataclassState):
    """The state of a method that remembers nothing."""


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
