"""What a private optimizer is: public parameters, promised events, and a step in a few verbs.

Seven parts compose with every method: the update that the optimizer makes of the releases, a filter on them, an
adaptive clip norm, clipping by layer, the shape of the query, public schedules of noise and clip norm, and an average
of the iterates (`fodp.methods.parts`). People write them flat, as parameters that all methods take (`CommonParams`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import ConfigurationError
from fodp.accounting import Phase
from fodp.methods.parts import schedule, shapes
from fodp.methods.parts.adaptive_clip import Quantile
from fodp.methods.parts.averages import AVERAGES, Average
from fodp.methods.parts.filters import FILTERS, Doppler, Fractional, Momentum
from fodp.methods.parts.layers import PerLayer
from fodp.methods.parts.rates import AUTO, CONSTANT, RateSchedule, accumulated
from fodp.methods.parts.schedule import Schedule, Schedules
from fodp.methods.parts.shapes import Shape, ShapeChoice
from fodp.methods.parts.updates import UPDATES, AdamBC, CorrectedAdam, Sgd, Update

if TYPE_CHECKING:
    from fodp.clipping.engine import Points
    from fodp.clipping.gradients import Gradients
    from fodp.queries import Query
    from fodp.sampling import Lot

Part = TypeVar(
    "Part",
    bound=Update | Momentum | Doppler | Fractional | Quantile | PerLayer | Schedules | Shape | Average | RateSchedule,
)

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
    "average_decay": "average='ema'",
    "average_share": "average='tail'",
    "average_power": "average='power'",
}
# Left out of what is recorded where they are not used: plans from before there were any stay the same plans.
_LATER = ("clip", "layer_shares", "clip_stability", "noise_schedule", "clip_schedule", "shape", "width", "auto_ratio",
          "average", "average_decay", "average_share", "average_power", "lr_schedule", "lr_warmup",
          "rate_rule", *shapes.ACTING)  # fmt: skip
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
    average: Average | None = None
    rates: RateSchedule = CONSTANT


@dataclass(frozen=True, kw_only=True)
class CommonParams:
    """Public parameters that every method takes: learning rate, update, filter, clipping, schedules.

    lr: a number, or auto: so that the noise of the whole run is `auto_ratio` times the initial weights, from public
        numbers alone (`fodp.methods.parts.rates`), by methods that know what noise they accumulate.
    lr_schedule: constant, linear, cosine or trapezoid (level for three quarters of the plan, then linear): public
        factors on the rate, down to nothing at the plan's end, after `lr_warmup` steps of rising ones. lr is the
        largest.
    rate_rule: none, or transcript: after a quarter of the plan the rate is raised, to four times at most, while
        releases agree with the recent way of the run beyond their known noise, and lowered while they want to go back
        (`fodp.methods.parts.rate_rules`). Not with noise that is correlated over steps.
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
        clipping, and the release again), kronecker, transcript, or public numbers of your own, one for each trainable
        parameter. kronecker maps each layer's inputs and back-signals by (A + `shape_damping`)^(-1/2), A their second
        moment over made-up records (`shape_inputs`: auto, pink or normal; or `Trainer(public_sample=...)`) in the
        model at the start and, with `shape_every` k, at every k-th step; scaled to the mean square of fan-in.
        `shape_sides` is outputs (back-signals alone: made-up inputs are not the data's), inputs or both, of weights
        that lie as those of nn.Linear.
        transcript learns the factors from earlier releases' energies beyond their noise (memory of `shape_memory`
        steps, fan-in for the first `shape_warmup`), so that a block of D numbers has a share of D^`shape_share`, within
        `shape_floor` and `shape_ceiling`; `shape_blocks` is parameter or row, which is an output or a channel.
    noise_schedule: public factors on the noise multiplier, as pairs (first step, factor) from step 0 on;
        `clip_schedule` the same on the clip norm.
    average: of the iterates, what is scored, exported and left in the model when a fit ends: none (the last one), ema
        (exponential, `average_decay`, with a warm-up), tail (the mean over the last `average_share` of the run) or
        power (weights that grow as step^`average_power`). Training goes on from the iterate. It costs no ε.
    """

    lr: float | str = AUTO
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
    average: str = "none"
    average_decay: float = 0.99
    average_share: float = 0.25
    average_power: float = 8.0
    shape_damping: float = 1.0
    shape_every: int = 0
    shape_inputs: str = "auto"
    shape_sides: str = "outputs"
    shape_blocks: str = "parameter"
    shape_warmup: int = 50
    shape_memory: float = 100.0
    shape_floor: float = 0.01
    shape_ceiling: float = 4.0
    shape_share: float = 0.25
    auto_ratio: float = 2.0
    lr_schedule: str = "constant"
    lr_warmup: int = 0
    rate_rule: str = "none"

    def __post_init__(self) -> None:
        if self.lr != AUTO and _checks.positive("lr", self.lr) > 1e30:
            raise ConfigurationError(f"lr must be at most 1e30, where float32 holds it; got {self.lr!r}")
        _checks.one_of("update", self.update, UPDATES)
        _checks.one_of("filter", self.filter, FILTERS)
        _checks.one_of("clip", self.clip, CLIPPINGS)
        _checks.one_of("average", self.average, AVERAGES)
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

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """What becomes other values where a plan `of` so many steps is tried in fewer, as audits do, so that all that
        acts late in the plan acts there too: schedules, and what is counted in steps. Extend it for your own."""
        changed: dict[str, Any] = {}
        for name in ("noise_schedule", "clip_schedule"):
            if (given := getattr(self, name)) is not None:
                changed[name] = schedule.in_short(given, steps, of)
        for name in ("lr_warmup", "shape_every", *(("shape_warmup",) if self.shape == "transcript" else ())):
            if count := getattr(self, name):
                changed[name] = schedule.share_of(count, steps, of)
        return changed

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
            None if (average := AVERAGES[self.average]) is None else self._part(average),
            self._part(RateSchedule),
        )

    def _part(self, kind: type[Part], **changes: float) -> Part:
        return kind(**{f.name: changes.get(f.name, getattr(self, f.name)) for f in fields(kind)})

    def _refuse_what_would_not_act(self) -> None:
        by_layer = PerLayer if self.clip == "per-layer" else None
        clip = None if self.quantile is None else Quantile
        chosen = (UPDATES[self.update], FILTERS[self.filter], clip, by_layer, AVERAGES[self.average])
        acting = {f.name for kind in chosen if kind is not None for f in fields(kind)}
        acting |= {"clip_stability"} if self.clip == "normalised" else set()
        for name, needed in _NEEDS.items():
            self._refuse_unused(name in acting, needed, name)
        for name, those in shapes.ACTING.items():
            self._refuse_unused(self.shape in those, f"shape={' or '.join(map(repr, those))}", name)
        if self.shape in ("kronecker", "transcript") and issubclass(UPDATES[self.update], CorrectedAdam):
            raise ConfigurationError(
                f"update {self.update!r} must know the noise of every number, and shape={self.shape!r} mixes or moves "
                "it: use another update, or shape='fan-in'"
            )
        self._refuse_unused(self.lr == AUTO, "lr='auto'", "auto_ratio")
        _checks.positive("auto_ratio", self.auto_ratio)
        if self.momentum and "momentum" not in acting:
            raise ConfigurationError(
                f"momentum does nothing with update {self.update!r}: set beta1, or filter='momentum'"
            )
        if self.weight_decay and "weight_decay" not in acting:
            raise ConfigurationError(
                f"weight_decay does nothing with update {self.update!r}: set it to 0, or update to adamw or adamwbc"
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

    def gradients(self, lot: "Lot", at: "Points" = ..., blocks: Sequence[float] | None = None) -> "Gradients":
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
        if self.parts.rates.follows and len(self.strategy()) > 1:
            raise ConfigurationError(
                f"rate_rule='transcript' asks what is fresh in a release, and the noise of {self.name} is "
                f"correlated over {len(self.strategy())} steps: leave rate_rule out, or use one band"
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
        # What lr="auto" comes to is known with the model: `fodp.training.fitting` sets it.
        return self.parts.update.optimizer(parameters, 1.0 if self.params.lr == AUTO else self.params.lr)

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """What of a step's fresh noise (`step_noise`) is in what `step` returns then, a step later, …: for lr="auto".

        In the long run, from public numbers alone. A class with a `step` of its own says it anew, or has no such rate.
        """
        raise ConfigurationError(
            f"lr='auto' has no rule for {self.name}, whose accumulated noise it does not know: give lr as a number"
        )

    def step_noise(self, plan: PublicNumbers, step: int) -> float:
        """The standard deviation of a step's fresh noise, as `noise_response` counts it; `plan` is as the step has
        it."""
        return plan.noise_multiplier * plan.clip_norm

    def step_noises(self, plan: PublicNumbers) -> Sequence[float]:
        """Those of all steps, by the plan's public schedules."""
        schedules = self.parts.schedules
        return [
            self.step_noise(plan if schedules is None else schedules.at(plan, step), step) for step in range(plan.steps)
        ]

    @property
    def knows_its_noise(self) -> bool:
        """Whether `noise_response` speaks of this very `step`, and not of one that a derived class has replaced."""
        says, steps = (next(c for c in type(self).__mro__ if name in vars(c)) for name in ("noise_response", "step"))
        return says is not Method and (says is steps or not issubclass(steps, says))

    def known_response(self, plan: PublicNumbers) -> Sequence[float]:
        """`noise_response`, or a refusal where there is none of this step."""
        return self.noise_response(plan) if self.knows_its_noise else Method.noise_response(self, plan)

    def accumulated_noise(self, plan: PublicNumbers) -> float:
        """The standard deviation of the noise in the sum of all that `step` returns: public numbers."""
        return accumulated(self.step_noises(plan), self.known_response(plan), np.ones(plan.steps))

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
