"""Averages of iterates: what is scored and published of a run, while training goes on from the iterate itself.

Every iterate is post-processing of releases, so an average of them costs no privacy.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp.options.option import Beginning, Option
from fodp.support import checks

_WARM_UP = 9  # until so many times 1/(1-decay) iterates are there, the newest counts for 9 in 10, 9 in 11, …


class Average(Option):
    """Which share every iterate has in the average."""

    def start(self, run: Beginning) -> "RunningAverage":
        return RunningAverage(self)

    def begins(self, end: int) -> int:
        """After which step of a run that ends at `end`: at once."""
        return 0

    def weight(self, earlier: int) -> float:
        """Of an iterate in the average of it and of so many before it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ema(Average):
    """m ← d·m + (1-d)·x with d = min(`average_decay`, (1+t)/(10+t)) for the t-th iterate, and m = x at first.

    The smaller d of the warm-up forgets early iterates; the initial weights are in no average at all.
    """

    average_decay: float = 0.99

    def __post_init__(self) -> None:
        checks.open_fraction("average_decay", self.average_decay)

    def weight(self, earlier: int) -> float:
        return 1.0 if earlier == 0 else max(1 - self.average_decay, _WARM_UP / (_WARM_UP + 1 + earlier))


@dataclass(frozen=True)
class Tail(Average):
    """The plain mean of the iterates in the last `average_share` of the run; before that there is no average."""

    average_share: float = 0.25

    def __post_init__(self) -> None:
        checks.fraction("average_share", self.average_share)

    def begins(self, end: int) -> int:
        return end - max(1, round(self.average_share * end))

    def weight(self, earlier: int) -> float:
        return 1 / (earlier + 1)


@dataclass(frozen=True)
class Power(Average):
    """The t-th iterate counts in proportion to about t^`average_power`: Shamir and Zhang's polynomial decay, ICML 2013.

    The window grows with the run: about the last 1/(power+1) of it, whenever it ends. 0 is the plain mean of all.
    """

    average_power: float = 8.0

    def __post_init__(self) -> None:
        checks.at_least_zero("average_power", self.average_power)

    def weight(self, earlier: int) -> float:
        return (self.average_power + 1) / (self.average_power + 1 + earlier)


class RunningAverage:
    """The average of a run's iterates so far, in float64: in float32 what a late iterate adds is lost in rounding."""

    def __init__(self, kind: Average):
        self.kind = kind
        self._mean: Tensor | None = None
        self._count = 0

    def take(self, iterate: Tensor, step: int, end: int) -> None:
        """Take in the iterate after so many steps of a run that is to end after `end` of them."""
        if step <= self.kind.begins(end):
            self._mean, self._count = None, 0  # also where the end was moved: the last share is a later one now
            return
        if self._mean is None:
            self._mean = iterate.to(torch.float64, copy=True)
        else:
            self._mean.lerp_(iterate.double(), self.kind.weight(self._count))
        self._count += 1

    def value(self) -> Tensor | None:
        """The average so far; None before it has begun."""
        return self._mean

    def state_dict(self) -> dict[str, Any]:
        """The average, and of how many iterates it is."""
        return {"mean": None if self._mean is None else self._mean.clone(), "count": self._count}

    def state_views(self) -> dict[str, Any]:
        """The same without a copy, to be written to a file before the next iterate is taken."""
        return {"mean": self._mean, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        mean = state["mean"]
        self._mean, self._count = None if mean is None else mean.clone(), int(state["count"])

    def bytes_when_full(self, size: int) -> int:
        """How much a checkpoint of a model with so many trained numbers holds more: the average, and the iterate."""
        return size * (8 + 8)
