"""Optimizers that take releases: PyTorch's own, and Adam with the noise taken out of its second moment."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

UPDATES = ("sgd", "adam", "adamw", "adambc", "adamwbc")


def make_update(
    kind: str,
    parameters: Iterable[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    floor: float = 0.03,
) -> torch.optim.Optimizer:
    """The optimizer of this name."""
    parameters = list(parameters)
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)  # one pass instead of ten
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=lr, betas=betas, eps=eps, fused=fused)
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
    return AdamBC(parameters, lr=lr, betas=betas, floor=floor, weight_decay=weight_decay)


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
            first, second = group["betas"]
            group["steps"] = steps = group.get("steps", 0) + 1
            seen = group.get("noise_average", 0.0)
            group["noise_average"] = second * seen + (1 - second) * group["noise_variance"]
            noise = group["noise_average"] / (1 - second**steps)
            shares = group.get("noise_shares") or [1.0] * len(group["params"])
            for parameter, share in zip(group["params"], shares, strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["m"].lerp_(parameter.grad, 1 - first)
                state["v"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                scale = (state["v"] / (1 - second**steps)).sub_(share * noise)
                scale.clamp_(min=max(group["floor"] * share * noise, 1e-16)).sqrt_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["m"], scale, value=-group["lr"] / (1 - first**steps))
