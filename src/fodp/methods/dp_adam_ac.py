"""DP-Adam-AC in a private form: AdamW, adaptive clipping, and a learning-rate controller."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.options import Options
from fodp.options.option import numbers, refuse_unused
from fodp.step import Known, PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class DPAdamACParams:
    """What steers the learning rate, where ρ* = 1 - `quantile` is the share of examples to clip.

    The factor on the learning rate goes up by `up` while the smoothed clip rate is below ρ* - `band` and down
    by `down` while it is above ρ* + `band`, within [`factor_min`, `factor_max`].
    """

    band: float = 0.1
    up: float = 1.01
    down: float = 0.995
    factor_min: float = 0.1
    factor_max: float = 2.0
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        for name in ("up", "down", "factor_min", "factor_max"):
            checks.positive(name, getattr(self, name))
        if not self.down <= 1 <= self.up:
            raise ConfigurationError(f"down must be at most 1 and up at least 1, got {self.down!r} and {self.up!r}")
        if not self.factor_min <= 1 <= self.factor_max:
            raise ConfigurationError(
                f"factor_min must be at most 1, where the factor starts, and factor_max at least 1; got "
                f"{self.factor_min!r} and {self.factor_max!r}"
            )
        checks.at_least_zero("band", self.band)
        checks.open_fraction("smoothing", self.smoothing)


@dataclass
class ControllerState(DataclassState):
    """The factor on the learning rate, and the smoothed share of clipped examples that moves it.

    On an accelerator they are tensors: the count that moves them is not read.
    """

    factor: float
    clip_rate: float


class DPAdamAC(DPSGD):
    """One joint event (q, z): the clipped sum and a centred noisy count of unclipped examples.

    As published the method has no valid ε: it moves the clip norm and the learning rate by raw norms of private
    gradients, and clips sums of micro-batches. Here both follow the released count alone: this private form is
    a reconstruction of ours. Quantile, clip range, band, steps and range of the factor are from a third party's
    implementation; learning rate, smoothing and the clip norm's rate are ours. The published method also evaluates
    an average of the iterates: set `average="ema"`, as with any method.
    """

    name = "dp-adam-ac"
    summary = "AdamW with adaptive clipping and a learning-rate controller, in a private form."
    reference = "Yang, DP-Adam-AC, arXiv 2510.05288 (as published it has no valid ε)"
    noise_meaning = "z, the joint multiplier of the sum and the count"
    advice = "When neither clip norm nor learning rate can be tuned."
    reconstruction = "the private form is ours; most constants are from a third-party implementation"
    owns_optimizer = True
    Params = DPAdamACParams
    defaults = MappingProxyType(
        {"update": "adamw", "weight_decay": 0.01, "quantile": 0.8, "clip_min": 0.1, "clip_max": 10.0}
    )

    def __init__(self, params: DPAdamACParams, options: Options):
        super().__init__(params, options)
        refuse_unused(params, options.quantile is not None, "a quantile", *numbers(params))

    @property
    def _target(self) -> float:
        """ρ*, the share of examples to clip."""
        return 0.0 if self.options.quantile is None else 1 - self.options.quantile.quantile

    def init(self, plan: PublicNumbers, size: int) -> ControllerState:
        """The learning rate as it is, the clip rate on target."""
        return ControllerState(factor=1.0, clip_rate=self._target)

    def step(self, step: Step, state: ControllerState) -> Tensor:
        """DP-SGD's step, whose count of unclipped examples steers the learning rate too."""
        released = super().step(step, state)
        fraction = step.unclipped_fraction()
        if fraction is not None:
            self._steer(state, 1 - fraction)
        return released

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """DP-SGD's; the controller's factor starts at 1."""
        return (1.0,)

    def _steer(self, state: ControllerState, clip_rate: float) -> None:
        p = self.params
        state.clip_rate = p.smoothing * state.clip_rate + (1 - p.smoothing) * clip_rate
        if state.clip_rate < self._target - p.band:
            state.factor = min(p.factor_max, state.factor * p.up)
        elif state.clip_rate > self._target + p.band:
            state.factor = max(p.factor_min, state.factor * p.down)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The controller acts on the learning rate; on the gradient Adam would cancel it."""
        optimizer = super().optimizer(parameters)
        # Only during the step, so that a scheduler goes on from its own rate.
        optimizer.register_step_pre_hook(_multiply_rate)
        optimizer.register_step_post_hook(_restore_rate)
        return optimizer

    def tune(self, optimizer: torch.optim.Optimizer, session: Known, state: ControllerState) -> None:
        """Tell the optimizer the controller's factor on its learning rate."""
        super().tune(optimizer, session, state)
        for group in optimizer.param_groups:
            group["factor"] = state.factor


def _multiply_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["scheduled_lr"] = group["lr"]
        group["lr"] *= group.get("factor", 1.0)


def _restore_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.pop("scheduled_lr")
