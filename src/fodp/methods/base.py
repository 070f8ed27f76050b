"""What a private optimizer is: its own public numbers, the options beside them, promised events, and a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fodp.accounting import Phase
from fodp.errors import ConfigurationError
from fodp.options import KINDS, Options
from fodp.options.chosen import read
from fodp.options.option import numbers
from fodp.options.table import known_names
from fodp.options.update import NoiseCorrectedAdam, accumulated
from fodp.step import Known, PublicNumbers, Step


@dataclass(frozen=True, kw_only=True)
class NoParams:
    """Of a method without numbers of its own."""


class State(Protocol):
    """What a method carries from step to step; made of releases and public numbers only."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that another process needs to go on from here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


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
    moves_points: ClassVar[bool] = False  # True: it asks for gradients at other points than the model's own
    weighs_by_norm: ClassVar[bool] = False  # True: its sums weigh whole gradients, which cannot be done layer by layer
    owns_optimizer: bool = False  # True: the optimizer is the method's, or its options', and takes no other's place
    Params: ClassVar[type[Any]] = NoParams  # a frozen dataclass of the method's own numbers, each with a default
    defaults: ClassVar[Mapping[str, Any]] = {}  # of options, by their flat names, where they are others than usual

    def __init__(self, params: Any, options: Options):
        self.params, self.options = params, options
        self.owns_optimizer |= not options.update.may_be_yours

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Method":
        """Make the method from the flat spelling; an unknown name is refused with the known ones named."""
        own = {field.name for field in fields(cls.Params)}
        known = own | known_names().keys()
        unknown = [name for name in given if name not in known]
        if unknown:
            raise cls._refusal(unknown[0], {name: value for name, value in given.items() if name in known})
        params = cls.Params(**{name: value for name, value in given.items() if name in own})
        return cls(params, read({name: value for name, value in given.items() if name not in own}, cls.defaults))

    @classmethod
    def _refusal(cls, name: str, known: Mapping[str, Any]) -> ConfigurationError:
        """Of a name that nobody has: what the method and the options that were chosen beside it know."""
        try:
            acting = cls.from_dict(known).describe()
        except ConfigurationError:  # of these there will be another word
            acting = cls.from_dict({}).describe()
        words = sorted(acting.keys() | {kind.name for kind in KINDS.values()})
        return ConfigurationError(
            f"{cls.name} has no parameter {name!r}; it knows {', '.join(words)}, and the numbers of options that were "
            f"not chosen (`fodp methods {cls.name}`, docs/methods.md)"
        )

    def describe(self) -> dict[str, Any]:
        """Every number that acts, by its flat name, defaults included: recorded with each run."""
        return numbers(self.params) | self.options.flat(self.defaults)

    @property
    def features(self) -> dict[str, str]:
        """Words for the table of conflicts, of the method and its options, each with what a message calls it."""
        found = {f"method {self.name}": self.name, **self.options.features}
        if self.weighs_by_norm:
            found["a method that weighs whole gradients"] = f"{self.name}, which weighs whole gradients by their norms,"
        if self.correlates_noise:
            found["a method that filters its noise"] = f"{self.name}, which filters its noise already,"
        if len(self.strategy()) > 1:
            found["correlated noise"] = f"{self.name} with {len(self.strategy())} bands, whose noise is correlated,"
        if self.has_acceptance_test:
            found["a method that scores proposals"] = f"{self.name}, which scores its proposals on public data,"
        if self.owns_optimizer:
            found["a method that brings its own update"] = f"{self.name} with its own update"
        if self.moves_points:
            found["a method that moves points"] = f"{self.name}, which asks for gradients at other points,"
        rate = self.options.rate
        if rate.acts:
            found["a rate that moves"] = f"{rate.moved_by} in params"
        usual = {field.name: self.defaults.get(field.name, field.default) for field in fields(rate)}
        said = [f"{name}={value!r}" for name, value in numbers(rate).items() if value != usual[name]]
        if said and not self.owns_optimizer:
            found["a rate in params"] = f"{' and '.join(said)} in params"
        return found

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """Parameters to change when an audit runs a shortened version of a plan: `steps` steps instead of `of`.

        Schedules, and what is counted in steps, so that all that acts late acts there too. Extend it for your own.
        """
        return self.options.in_short(steps, of)

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

    def step(self, step: Step, state: Any) -> Tensor:
        """One step: the private sum to hand to the optimizer (which gets it divided by L)."""
        raise NotImplementedError

    def noise_gains(self, state: Any) -> Sequence[float]:
        """What the noise variance of the step's last release has in what `step` returns, then that of the step
        before it, …"""
        return (1.0,)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer that makes updates of the releases, as the parameters ask."""
        # What lr="auto" comes to is known with the model: `fodp.state.fitting` sets it.
        lr = self.options.rate.lr
        return self.options.update.optimizer(parameters, lr if isinstance(lr, float | int) else 1.0)

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
        schedules = self.options.schedules
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

    def tune(self, optimizer: torch.optim.Optimizer, session: Known, state: Any) -> None:
        """Before every update: tell the optimizer what it may know. Post-processing only."""
        if isinstance(optimizer, NoiseCorrectedAdam):
            for group in optimizer.param_groups:
                group["noise_variance"] = session.noise_variance()
                if self.options.scaling is not None:  # the noise differs from block to block
                    group["noise_shares"] = [session.noise_share(parameter) for parameter in group["params"]]

    def accepts(self, session: Known, state: Any) -> bool:
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
