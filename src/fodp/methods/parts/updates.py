"""Optimizers that take releases: PyTorch's own, and Adam with the noise taken out of its second moment."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Plain steps against the releases, with a momentum of zero or more."""

    momentum: float

    def __post_init__(self) -> None:
        if _checks.at_least_zero("momentum", self.momentum) >= 1:
            raise ConfigurationError(f"momentum must be below 1, got {self.momentum!r}")

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """The two averages that every kind of Adam keeps."""

    beta1: float
    beta2: float

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= _checks.number(name, getattr(self, name)) < 1:
                raise ConfigurationError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


@dataclass(frozen=True, kw_only=True)
class Adam(_Moments):
    """PyTorch's Adam on the releases."""

    adam_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive("adam_eps", self.adam_eps)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.Adam(parameters, lr=lr, betas=self.betas, eps=self.adam_eps, fused=_can_fuse(parameters))


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """PyTorch's Adam with decoupled weight decay."""

    weight_decay: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.at_least_zero("weight_decay", self.weight_decay)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        parameters, decay = list(parameters), self.weight_decay
        fused = _can_fuse(parameters)
        return torch.optim.AdamW(
            parameters, lr=lr, betas=self.betas, eps=self.adam_eps, weight_decay=decay, fused=fused
        )


@dataclass(frozen=True, kw_only=True)
class CorrectedAdam(_Moments):
    """Adam with the noise taken out of its second moment (`AdamBC`)."""

    bc_floor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.at_least_zero("bc_floor", self.bc_floor)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return AdamBC(parameters, lr=lr, betas=self.betas, floor=self.bc_floor)


@dataclass(frozen=True, kw_only=True)
class CorrectedAdamW(CorrectedAdam):
    """Adam with the noise taken out of its second moment, and with decoupled weight decay."""

    weight_decay: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.at_least_zero("weight_decay", self.weight_decay)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return AdamBC(parameters, lr=lr, betas=self.betas, floor=self.bc_floor, weight_decay=self.weight_decay)


Update = Sgd | Adam | AdamW | CorrectedAdam | CorrectedAdamW
# By the words of the flat spelling; a part's fields have their flat names.
UPDATES: dict[str, type[Update]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "adambc": CorrectedAdam,
    "adamwbc": CorrectedAdamW,
}


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether PyTorch has a loop for them that makes one pass instead of ten."""
    return all(p.device.type in ("cpu", "cuda") for p in parameters)


class AdamBC(torch.optim.Optimizer):
    """Adam whose second moment is freed of the noise's variance Φ (Tang et al., AAAI 2024).

    θ ← θ - lr·m̂ / √max(v̂ - Φ̂, floor·Φ̂), with decoupled weight decay if asked for. Φ̂ is the bias-corrected
    average, with the same β₂, of the group's `noise_variance`, which a run sets before every step from
    public numbers (σC/L)²; `noise_shares` says what share of it the noise of each parameter has, if not all.
    The published floor γ' is an absolute number; ours is a fraction of Φ̂, since v̂ - Φ̂ fluctuates by 3% of Φ on
    pure noise at β₂ = .999.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 0.03,
        weight_decay: float = 0.0,
    ):
        defaults = dict(lr=lr, betas=betas, floor=floor, weight_decay=weight_decay, noise_variance=0.0)
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update from the private gradients."""
        for group in self.param_groups:
            (first, second), lr = group["betas"], float(group["lr"])  # PyTorch takes a tensor for it too
            group["steps"] = steps = group.get("steps", 0) + 1
            group["noise_average"] = second * group.get("noise_average", 0.0) + (1 - second) * group["noise_variance"]
            seen = 1 - second**steps  # v̂ = v/seen: the noise is scaled instead, and the root of it goes into the rate
            noise = group["noise_average"]
            rate, kept = lr * math.sqrt(seen) / (1 - first**steps), 1 - lr * group["weight_decay"]
            shares = group.get("noise_shares") or [1.0] * len(group["params"])
            for parameter, share in zip(group["params"], shares, strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                least = max(group["floor"] * share * noise, 1e-16 * seen)
                numbers = 1 - first, second, 1 - second, share * noise, least, kept, rate
                _adambc(parameter, state["m"], state["v"], parameter.grad, *numbers)


def _adambc(
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    follow: float,
    second: float,
    rest: float,
    noise: float,
    least: float,
    kept: float,
    rate: float,
) -> None:
    """One update of a parameter and its moments."""
    m.lerp_(gradient, follow)
    v.mul_(second).addcmul_(gradient, gradient, value=rest)
    scale = (v - noise).clamp_(min=least).sqrt_()
    parameter.mul_(kept).addcdiv_(m, scale, value=-rate)
