"""Optimizers that take releases: PyTorch's own, and Adam with the noise taken out of its second moment."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fodp import kernels

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
            (first, second), lr = group["betas"], float(group["lr"])  # PyTorch takes a tensor for it too
            group["steps"] = steps = group.get("steps", 0) + 1
            before = group.get("noise_average", 0.0)
            group["noise_average"] = second * before + (1 - second) * group["noise_variance"]
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
    """One update of a parameter and its moments: compiled, one pass instead of eight."""
    library = kernels.library_for(parameter, m, v, gradient)
    if library is not None:
        tensors = (tensor.data_ptr() for tensor in (parameter, m, v, gradient))
        library.fodp_adambc(*tensors, parameter.numel(), follow, second, rest, noise, least, kept, rate)
        torch.autograd.graph.increment_version((parameter, m, v))  # PyTorch has not seen the writing
        return
    m.lerp_(gradient, follow)
    v.mul_(second).addcmul_(gradient, gradient, value=rest)
    scale = (v - noise).clamp_(min=least).sqrt_()
    parameter.mul_(kept).addcdiv_(m, scale, value=-rate)
