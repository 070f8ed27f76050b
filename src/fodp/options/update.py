"""Updates: what an optimizer makes of releases. PyTorch's own, and Adam with the noise taken out of its second moment.

Each knows how far it moves a weight at random by releases that are noise alone (`noise_walk`), for lr="auto".
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.options.option import Option
from fodp.support import checks

Numbers = npt.NDArray[np.float64]
KNOWS_ITS_NOISE = "an update that takes out its noise"
_SMALL = 1e-8  # where a response has died away


class Update(Option):
    """Which optimizer makes steps of the releases."""

    @property
    def is_plain(self) -> bool:
        """Whether steps are in the units of releases, as those of SGD; Adam's have none."""
        return False

    @property
    def may_be_yours(self) -> bool:
        """Whether an optimizer of the user's may take its place: it has no numbers of its own."""
        return False

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        """A fresh one."""
        raise NotImplementedError

    def noise_walk(self, deviations: Numbers, response: Sequence[float], factors: Numbers, signal: Numbers) -> float:
        """How far it moves a weight at random over the run, with rate 1, by releases that are noise alone.

        `deviations` are those of each step's fresh noise, `response` what is in the update's input of a release, of the
        one before it, …, and `factors` the schedule of the rate. Plain steps are in the releases' units, Adam's have
        none. `signal` is what an entry of the clipped gradients' mean may be beside it, for plain steps.
        """
        raise ConfigurationError(f"lr='auto' has no rule for the update {type(self).__name__}: give lr as a number")


@dataclass(frozen=True)
class Sgd(Update):
    """Plain steps against the releases, with a momentum of zero or more."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if checks.at_least_zero("momentum", self.momentum) >= 1:
            raise ConfigurationError(f"momentum must be below 1, got {self.momentum!r}")

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def may_be_yours(self) -> bool:
        return self.momentum == 0

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum)

    def noise_walk(self, deviations: Numbers, response: Sequence[float], factors: Numbers, signal: Numbers) -> float:
        momentum = _geometric(1.0, self.momentum)
        noise = accumulated(deviations, np.convolve(response, momentum), factors)
        return math.hypot(noise, accumulated(signal, momentum, factors))


@dataclass(frozen=True)
class _Moments(Update):
    """The two averages that every kind of Adam keeps."""

    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= checks.number(name, getattr(self, name)) < 1:
                raise ConfigurationError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    def noise_walk(self, deviations: Numbers, response: Sequence[float], factors: Numbers, signal: Numbers) -> float:
        steps = np.arange(1, len(factors) + 1)
        averaged = np.convolve(response, _geometric(1 - self.beta1, self.beta1))
        variance = _averaged(deviations**2, self.beta2) * float(np.square(response).sum())
        weights = factors / (1 - self.beta1**steps) / np.sqrt(variance)
        return accumulated(deviations, averaged, weights * self._gain(response, len(factors)))

    def _gain(self, response: Sequence[float], steps: int) -> Numbers:
        """How much larger noise makes its steps than Adam's."""
        return np.ones(steps)


@dataclass(frozen=True)
class Adam(_Moments):
    """PyTorch's Adam on the releases."""

    adam_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("adam_eps", self.adam_eps)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.Adam(parameters, lr=lr, betas=self.betas, eps=self.adam_eps, fused=_can_fuse(parameters))


@dataclass(frozen=True)
class AdamW(Adam):
    """PyTorch's Adam with decoupled weight decay."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_zero("weight_decay", self.weight_decay)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        parameters, decay = list(parameters), self.weight_decay
        fused = _can_fuse(parameters)
        return torch.optim.AdamW(
            parameters, lr=lr, betas=self.betas, eps=self.adam_eps, weight_decay=decay, fused=fused
        )


@dataclass(frozen=True)
class AdamBC(_Moments):
    """Adam with the noise taken out of its second moment, down to `bc_floor` of the noise (`NoiseCorrectedAdam`)."""

    bc_floor: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_zero("bc_floor", self.bc_floor)

    @property
    def features(self) -> Mapping[str, str]:
        return {KNOWS_ITS_NOISE: f"the update {type(self).__name__}"}

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return NoiseCorrectedAdam(parameters, lr=lr, betas=self.betas, floor=self.bc_floor)

    def _gain(self, response: Sequence[float], steps: int) -> Numbers:
        """√E[1/max(v - 1, floor)], v the average of the noise's squares.

        v is taken for a χ² of as many degrees of freedom as the average has independent squares; Wilson and Hilferty's
        cube gives its quantiles.
        """
        if self.bc_floor == 0:
            raise ConfigurationError("lr='auto' has no rule for bc_floor=0, where noise alone has no limit: give lr")
        kernel = np.asarray(response, dtype=np.float64)
        correlations = np.correlate(kernel, kernel, mode="full") / float(kernel @ kernel)
        beta, some = self.beta2, np.unique(np.geomspace(1, steps, 64).astype(np.int64))
        left = beta ** some.astype(np.float64)
        shares = (1 - beta) / (1 + beta) * (1 + left) / (1 - left)  # Σ of the average's squared weights
        freedom = np.maximum(1.0, 1 / (shares * float(correlations @ correlations)))[:, None]
        normal = _normal_quantiles(201)[None, :]
        v = np.maximum(0.0, 1 - 2 / (9 * freedom) + normal * np.sqrt(2 / (9 * freedom))) ** 3
        gains = np.sqrt((1 / np.maximum(v - 1, self.bc_floor)).mean(axis=1))
        return np.asarray(np.interp(np.arange(1, steps + 1), some, gains))


@dataclass(frozen=True)
class AdamWBC(AdamBC):
    """Adam with the noise taken out of its second moment, and with decoupled weight decay."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_zero("weight_decay", self.weight_decay)

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        decay = self.weight_decay
        return NoiseCorrectedAdam(parameters, lr=lr, betas=self.betas, floor=self.bc_floor, weight_decay=decay)


def accumulated(deviations: Sequence[float] | Numbers, response: Sequence[float] | Numbers, weights: Numbers) -> float:
    """The standard deviation of Σ_t weights_t·x_t, where x_t = Σ_k response_k·z_(t-k) and z_s has deviations_s."""
    kernel = np.asarray(response, dtype=np.float64)[: len(weights)]
    ahead = np.concatenate([weights, np.zeros(len(kernel) - 1)])
    of_each = np.convolve(ahead, kernel[::-1], mode="valid")  # what release s adds up to from then on
    return float(np.linalg.norm(of_each * np.asarray(deviations)))


def _geometric(first: float, ratio: float) -> Numbers:
    """first·ratio^k until it has died away."""
    length = 1 if ratio == 0 else 1 + math.ceil(math.log(_SMALL) / math.log(ratio))
    return np.asarray(first * ratio ** np.arange(min(length, 100_000)), dtype=np.float64)


def _averaged(values: Numbers, beta: float) -> Numbers:
    """The bias-corrected exponential average that Adam keeps."""
    found, kept = np.empty(len(values)), 0.0
    for step, value in enumerate(values):
        kept = beta * kept + (1 - beta) * value
        found[step] = kept / (1 - beta ** (step + 1))
    return found


def _normal_quantiles(count: int) -> Numbers:
    from statistics import NormalDist

    return np.asarray([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether PyTorch has a loop for them that makes one pass instead of ten."""
    return all(p.device.type in ("cpu", "cuda") for p in parameters)


class NoiseCorrectedAdam(torch.optim.Optimizer):
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
