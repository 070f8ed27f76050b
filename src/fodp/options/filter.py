"""Filters on the transcript: functions of releases alone, so they cost no privacy (post-processing).

A filter stands between the release and the optimizer, whatever the method and whatever the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.memory import FractionalMemory, noise_floor
from fodp.memory.passes import Weights
from fodp.memory.window import WindowMemory
from fodp.options.option import Beginning, Option
from fodp.support import checks

# Terms of an impulse response after which a stable filter's rest no longer counts.
RESPONSE_LENGTH = 2000


class FilterState(Protocol):
    """Turns the newest release into what the optimizer gets."""

    def __call__(self, release: Tensor) -> Tensor:
        """The filtered release; the release itself stays as it is."""

    def noise_gains(self) -> Sequence[float]:
        """h²: what this release's noise variance has in what comes out, then that of the one before it, …"""

    def state_dict(self) -> dict[str, Any]:
        """Everything that another process needs to go on from here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


class LowPass:
    """DOPPLER's low-pass filter with start-up correction (Zhang et al., NeurIPS 2024).

    m_t = -Σ a_r·m_{t-r} + Σ b_r·g_{t-r};  c_t is the same filter run on a constant 1;  output m_t / c_t.
    """

    def __init__(self, a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,)):
        self.a = tuple(checks.number("a filter coefficient", value) for value in a)
        self.b = tuple(checks.number("a filter coefficient", value) for value in b)
        # Not to the last digit, as published coefficients are rounded: the output is divided by c_t anyway.
        if not self.b or abs(sum(self.b) - sum(self.a) - 1) > 0.01:
            raise ConfigurationError(f"the filter needs unit gain, sum(b) - sum(a) = 1; got a={self.a}, b={self.b}")
        if any(abs(root) >= 1 for root in _roots(self.a)):
            raise ConfigurationError(f"the filter with a={self.a} is not stable: choose poles inside the unit circle")
        self._response = _response(self.a, self.b)
        # The answer to a constant is the summed answer to an impulse.
        self._constants = list(accumulate(self._response))
        if min(self._constants) <= 0:
            raise ConfigurationError(
                f"the filter's answer to a constant must be above 0 from the first step on, since it is divided by "
                f"it; got a={self.a}, b={self.b} (is b[0] above 0?)"
            )
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._corrections: list[float] = []
        self._steps = 0

    def __call__(self, release: Tensor) -> Tensor:
        self._steps += 1
        self._inputs = [release.clone(), *self._inputs][: len(self.b)]
        output = torch.zeros_like(release)
        for factor, value in zip(self.b, self._inputs, strict=False):
            output.add_(value, alpha=factor)
        for factor, value in zip(self.a, self._outputs, strict=False):
            output.sub_(value, alpha=factor)
        correction = sum(self.b[: self._steps]) - sum(
            factor * value for factor, value in zip(self.a, self._corrections, strict=False)
        )
        self._outputs = [output, *self._outputs][: len(self.a)]
        self._corrections = [correction, *self._corrections][: len(self.a)]
        return output / correction

    def noise_gains(self) -> Sequence[float]:
        """h² so far over the start-up correction's square: in all 1 at first, Σ h² in the long run."""
        seen = min(self._steps, len(self._response))
        return [(h / self._constants[seen - 1]) ** 2 for h in self._response[:seen]]

    def state_dict(self) -> dict[str, Any]:
        state = self.state_views()
        return state | {name: [t.clone() for t in state[name]] for name in ("inputs", "outputs")}

    def state_views(self) -> dict[str, Any]:
        """The same as `state_dict()` without copies, to be written to a file before the next step."""
        return {
            "inputs": list(self._inputs),
            "outputs": list(self._outputs),
            "corrections": list(self._corrections),
            "steps": self._steps,
        }

    def bytes_when_full(self, size: int) -> int:
        """How much its state will take, for releases of this many entries."""
        return (len(self.a) + len(self.b)) * size * 4

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inputs = [t.clone() for t in state["inputs"]]
        self._outputs = [t.clone() for t in state["outputs"]]
        self._corrections, self._steps = list(state["corrections"]), int(state["steps"])


class MemoryAfterRelease:
    """Fractional memory after the release: v_t = β·g_t + (1-β)·u(g_{t-1}, …) (the paper's Post-FM).

    Reads earlier releases, not earlier outputs, as the paper's equations have it.
    """

    def __init__(self, beta: float, memory: WindowMemory):
        self.beta, self.memory = checks.fraction("beta", beta), memory
        self._mixed: tuple[float, Weights] | None = None  # β and the memory's weights of the last mix

    def __call__(self, release: Tensor) -> Tensor:
        return self.mix_(release.clone(), self.beta)

    def mix_(self, release: Tensor, beta: float) -> Tensor:
        """Mix by this β and remember in place, for a release that nobody else needs."""
        self._mixed = beta, self.memory.by_lag()
        return self.memory.remember_then_mix_(release, beta, 1 - beta)

    def noise_gains(self) -> Sequence[float]:
        """β², then ((1-β)·ŵ)² of the last mix."""
        if self._mixed is None:
            return ()
        beta, weights = self._mixed
        shares = weights.tolist() if isinstance(weights, Tensor) else weights
        return [beta * beta, *(((1 - beta) * weight) ** 2 for weight in shares)]

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def state_views(self) -> dict[str, Any]:
        """The memory without copies."""
        return self.memory.state_views()

    def bytes_when_full(self, size: int) -> int:
        """How much the memory will take."""
        return self.memory.bytes_when_full(size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)


class Filter(Option):
    """What is made of releases on their way to the optimizer, whatever the method and the update."""

    def start(self, run: Beginning) -> FilterState:
        raise NotImplementedError

    def response(self) -> Sequence[float]:
        """What is in its output of a release, of the one before it, … in the long run: in all 1."""
        raise ConfigurationError(f"lr='auto' does not know what {type(self).__name__} makes of noise: give lr a number")


@dataclass(frozen=True)
class Doppler(Filter):
    """A low-pass filter with the coefficients `filter_a` and `filter_b` (Zhang et al., DOPPLER, NeurIPS 2024)."""

    filter_a: tuple[float, ...] = (-0.9,)
    filter_b: tuple[float, ...] = (0.1,)

    def __post_init__(self) -> None:
        for name in ("filter_a", "filter_b"):
            object.__setattr__(self, name, checks.numbers(name, getattr(self, name)))
        LowPass(self.filter_a, self.filter_b)  # refuses what is none

    def start(self, run: Beginning) -> FilterState:
        return LowPass(self.filter_a, self.filter_b)

    def response(self) -> Sequence[float]:
        answer = _response(self.filter_a, self.filter_b)
        return [value / sum(answer) for value in answer]


@dataclass(frozen=True)
class Momentum(Filter):
    """A bias-corrected average of the releases, which forgets by the factor `momentum` in each step."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.open_fraction("momentum", self.momentum)

    def start(self, run: Beginning) -> FilterState:
        return self._low_pass.start(run)

    def response(self) -> Sequence[float]:
        return self._low_pass.response()

    @property
    def _low_pass(self) -> Doppler:
        return Doppler((-self.momentum,), (1 - self.momentum,))


@dataclass(frozen=True)
class Fractional(Filter):
    """A fractional memory after the release, with the share `filter_beta` for the newest one."""

    filter_beta: float = 0.9

    def __post_init__(self) -> None:
        checks.fraction("filter_beta", self.filter_beta)

    def start(self, run: Beginning) -> FilterState:
        floor = noise_floor(run.plan.noise_multiplier * run.plan.clip_norm, run.size, 0.1)
        return MemoryAfterRelease(self.filter_beta, FractionalMemory(kappa=floor, zeta=floor))

    def response(self) -> Sequence[float]:
        return mixed_response(self.filter_beta, FractionalMemory())


def feedback_gains(beta: float, weights: Tensor) -> Sequence[float]:
    """h² of s̃_t = z_t + (1-β)·Σ w_j·s̃_{t-j}: what FO's feedback makes of the noise of its releases."""
    return [h * h for h in feedback_response(beta, weights.tolist())]


def feedback_response(beta: float, weights: Sequence[float]) -> Sequence[float]:
    """h of s̃_t = z_t + (1-β)·Σ w_j·s̃_{t-j}."""
    return _response(tuple(-(1 - beta) * weight for weight in weights), (1.0,))


def mixed_response(beta: float, memory: WindowMemory) -> Sequence[float]:
    """h of v_t = β·z_t + (1-β)·Σ w_j·z_{t-j} once the memory's window is full."""
    return [beta, *((1 - beta) * weight for weight in memory.weights_when_full())]


def _response(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The answer to an impulse, until it has died away."""
    response: list[float] = []
    for n in range(RESPONSE_LENGTH):
        value = b[n] if n < len(b) else 0.0
        value -= sum(factor * response[n - 1 - r] for r, factor in enumerate(a) if n - 1 - r >= 0)
        response.append(value)
        if n > len(b) + len(a) and all(abs(v) < 1e-8 for v in response[-max(1, len(a)) :]):
            break
    return response


def _roots(a: Sequence[float]) -> Sequence[complex]:
    import numpy as np

    return list(np.roots([1.0, *a])) if a else []
