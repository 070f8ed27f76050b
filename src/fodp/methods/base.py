"""What a private optimizer is: public parameters, promised events, and a step in five verbs.

Three parts compose with every method and are no classes of their own: an adaptive clip norm, a filter on
the releases, and the update that the optimizer makes of them. They are parameters of all methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.accounting import Phase
from fodp.adaptive_clip import AdaptiveClip
from fodp.filters import Filter, LowPass, MemoryAfterRelease, NoFilter
from fodp.memory import FractionalMemory, noise_floor
from fodp.updates import UPDATES, AdamBC, make_update

if TYPE_CHECKING:
    from fodp.clipping.engine import Points
    from fodp.clipping.gradients import Gradients
    from fodp.mechanism import Query
    from fodp.plan import Plan
    from fodp.sampling import Lot

FILTERS = ("none", "momentum", "doppler", "fractional")


@dataclass(frozen=True, kw_only=True)
class CommonParams:
    """Public parameters that every method takes: learning rate, update, filter, adaptive clipping.

    update: sgd, adam, adamw, adambc or adamwbc, with `momentum`, `beta1`, `beta2`, `adam_eps`,
        `weight_decay`, `bc_floor` where they apply.
    filter: none, momentum (bias-corrected average, `momentum` 0.9 unless set), doppler (`filter_a`,
        `filter_b`) or fractional (`filter_beta`); acts on releases, whatever the update.
    quantile: None keeps the clip norm; a fraction adapts it so that about that share of the examples is
        unclipped. Costs no ε: the noisy count (`count_noise`, default L/20, or z where that is larger) is
        released jointly. It starts at the plan's clip norm, moves by `clip_rate`, within `clip_min` and `clip_max`.
    """

    lr: float = 0.1
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

    def __post_init__(self) -> None:
        if _checks.positive("lr", self.lr) > 1e30:
            raise PrivacyError(f"lr must be at most 1e30, where float32 holds it; got {self.lr!r}")
        _checks.one_of("update", self.update, UPDATES)
        _checks.one_of("filter", self.filter, FILTERS)
        for name in ("momentum", "weight_decay", "bc_floor"):
            _checks.at_least_zero(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= _checks.number(name, getattr(self, name)) < 1:
                raise PrivacyError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        if self.momentum >= 1:
            raise PrivacyError(f"momentum must be below 1, got {self.momentum!r}")
        _checks.positive("adam_eps", self.adam_eps)
        self._check_filter()
        self._check_clip()
        self._refuse_what_would_not_act()

    def _check_filter(self) -> None:
        for name in ("filter_a", "filter_b"):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or isinstance(given, str):
                raise PrivacyError(f"{name} must be a sequence of numbers, got {given!r}")
            object.__setattr__(self, name, tuple(_checks.number(f"each of {name}", value) for value in given))
        _checks.fraction("filter_beta", self.filter_beta)
        self.make_filter(1.0, 1)  # checks its coefficients

    def _check_clip(self) -> None:
        if self.quantile is not None:
            _checks.open_fraction("quantile", self.quantile)
        if self.count_noise is not None:
            _checks.positive("count_noise", self.count_noise)
        _checks.positive("clip_rate", self.clip_rate)
        for name in ("clip_min", "clip_max"):
            _checks.clip_norm(name, getattr(self, name))
        if self.clip_min > self.clip_max:
            raise PrivacyError(f"clip_min must not exceed clip_max, got {self.clip_min!r} and {self.clip_max!r}")

    def _refuse_what_would_not_act(self) -> None:
        self._refuse_unused(self.update != "sgd", "update='adam' or the like", "beta1", "beta2")
        self._refuse_unused(self.update in ("adam", "adamw"), "update='adam' or 'adamw'", "adam_eps")
        self._refuse_unused(self.update in ("adambc", "adamwbc"), "update='adambc' or 'adamwbc'", "bc_floor")
        self._refuse_unused(self.filter == "doppler", "filter='doppler'", "filter_a", "filter_b")
        self._refuse_unused(self.filter == "fractional", "filter='fractional'", "filter_beta")
        adapted = self.quantile is not None
        self._refuse_unused(adapted, "a quantile", "count_noise", "clip_rate", "clip_min", "clip_max")
        if self.momentum and self.update != "sgd" and self.filter != "momentum":
            raise PrivacyError(f"momentum does nothing with update {self.update!r}: set beta1, or filter='momentum'")
        if self.weight_decay and self.update not in ("adamw", "adamwbc"):
            raise PrivacyError(
                f"weight_decay does nothing with update {self.update!r}: set it to 0, or update to adamw or adamwbc"
            )

    def _refuse_unused(self, acting: bool, needed: str, *names: str) -> None:
        """Refuse parameters that were set and would do nothing; only defaults may wait for `needed`."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if not acting and getattr(self, name) != defaults[name]:
                raise PrivacyError(f"{name} does nothing without {needed}: set that too, or leave {name} out")

    def make_filter(self, noise_std: float, size: int) -> Filter:
        """A fresh filter for releases of this size and noise."""
        if self.filter == "momentum":
            mu = self.momentum or 0.9
            return LowPass((-mu,), (1 - mu,))
        if self.filter == "doppler":
            return LowPass(self.filter_a, self.filter_b)
        if self.filter == "fractional":
            floor = noise_floor(noise_std, size, 0.1)
            return MemoryAfterRelease(self.filter_beta, FractionalMemory(kappa=floor, zeta=floor))
        return NoFilter()

    def make_clip(self, plan: "Plan") -> AdaptiveClip | None:
        """The adaptive clip norm, if one was asked for."""
        if self.quantile is None:
            return None
        noise = self.count_noise
        if noise is None:  # at least z, however large that is: then the count is a quarter of what a step costs
            noise = max(plan.lot_size / 20, *(phase.events[-1].noise_multiplier for phase in plan.events()))
        return AdaptiveClip(
            plan.clip_norm, self.quantile, noise, plan.lot_size, self.clip_rate, self.clip_min, self.clip_max
        )


class State(Protocol):
    """What a method carries from step to step; made of releases and public numbers only."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


class Steps(Protocol):
    """What a step may use. Implemented by `fodp.run.Run`; an audit brings its own."""

    plan: "Plan"
    step: int

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

    def release(self, lot: "Lot", query: "Query", std: float) -> Tensor:
        """The query plus noise, charged to the lot."""

    def unclipped_fraction(self) -> float | None:
        """The released noisy share of examples within the clip norm, where that is adapted."""

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector: public, made of releases."""

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets."""

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream."""

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
    colours_noise: ClassVar[bool] = False  # True: what `step` returns carries noise of earlier steps
    insists: ClassVar[bool] = False  # True: the optimizer is the method, no other may take its releases
    proposes: ClassVar[bool] = False  # True: `accepts` decides after the update whether it stays
    Params: ClassVar[type[CommonParams]] = CommonParams

    def __init__(self, params: Any):
        if self.colours_noise and params.filter != "none" and params.update in ("adambc", "adamwbc"):
            raise PrivacyError(
                f"{self.name} filters its noise already, and {params.update} must know the variance of what it gets: "
                "leave out the filter, or use another update"
            )
        self.params = params

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Method":
        """Make the method from plain keys; an unknown one is refused with the known ones named."""
        known = [f.name for f in fields(cls.Params)]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise PrivacyError(f"{cls.name} has no parameter {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        return cls(cls.Params(**given))

    @property
    def own_optimizer(self) -> bool:
        """Whether an optimizer given by the user would contradict the method."""
        return self.insists or self.params.update != "sgd" or self.params.momentum != 0

    def describe(self) -> dict[str, Any]:
        """Every parameter with its value, defaults included: recorded with each run."""
        return asdict(self.params)

    def events(self, plan: "Plan") -> Sequence[Phase]:
        """What the plan promises before any data is touched: the events of every step."""
        raise NotImplementedError

    def init(self, plan: "Plan", size: int) -> State:
        """A fresh state for a model with `size` trainable numbers."""
        return NoState()

    def step(self, run: Steps, state: Any) -> Tensor:
        """One step: the private sum to hand to the optimizer (which gets it divided by L)."""
        raise NotImplementedError

    def noise_gains(self, state: Any) -> Sequence[float]:
        """What the noise variance of the step's last release has in what `step` returns, then that of the step
        before it, …"""
        return (1.0,)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The method's own optimizer."""
        p = self.params
        return make_update(
            p.update,
            parameters,
            lr=p.lr,
            momentum=p.momentum if p.filter != "momentum" else 0.0,
            betas=(p.beta1, p.beta2),
            eps=p.adam_eps,
            weight_decay=p.weight_decay,
            floor=p.bc_floor,
        )

    def tune(self, optimizer: torch.optim.Optimizer, run: Steps, state: Any) -> None:
        """Before every update: tell the optimizer what it may know. Post-processing only."""
        if isinstance(optimizer, AdamBC):
            for group in optimizer.param_groups:
                group["noise_variance"] = run.noise_variance()

    def accepts(self, run: Steps, state: Any) -> bool:
        """After the update, for methods that propose: keep it?"""
        return True


class NoState:
    """The state of a method that remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""


class Vectors:
    """A state of named flat vectors and numbers: None until they are set."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all values."""
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take all values over."""
        self.__dict__.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this state has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
