"""A learning rate from public numbers: the noise of the whole run is a fixed multiple of the initial weights.

What is known before any data is touched is the noise. With the rate η it moves the weights of layer l, over the run, by
η·W·b_l at random: W is the walk of an optimizer of rate 1 that gets only noise (its `noise_walk`), b_l the factor
that the query's shape puts on the layer's noise (1 without a shape; Adam divides it out again). Beside weights of size
w_l this disturbs what the layer computes by the share r_l = η·W·b_l/w_l. Layers are disturbed independently, so the
whole by the square root of the sum of squares, and lr="auto" makes the root of their mean a constant:

    c² = mean over matrices of r_l²,   so   η = c / (W·√mean(b_l²/w_l²)).

Smaller, and signal is left lying that the noise would have allowed; larger, and the weights drown. With the shape
fan-in and the usual initial weights all wide layers are disturbed alike; without a shape the widest one counts most.

* w_l is the root mean square of a matrix as it starts, and at least 1/√(3·inputs), what PyTorch would start with: heads
  and LoRA's second matrices that start at zero are measured by where they have to go. Embeddings have entries of order
  1 and are disturbed little; they count as one layer of many.
* Vectors do not count: gains of norms start at 1, and biases are added to activations of order 1, both far above a
  matrix's entries. A model with nothing else to train has the scale 1.
* W is linear response: of each release, what the method, the filter, the momentum and the public schedule of the rate
  make of its noise over the rest of the run. Plain steps: σC/L·√T, over 1 - momentum, and over √3 with a linear decay.
* Plain steps with next to no noise are bounded by the signal: a mean of clipped gradients is at most C long, and about
  C/4 where examples disagree as they do. Its square, spread over all entries, is added to the noise's: then the rate is
  that of gradient descent over a distance, c·|θ|/(|g|·√T), with a length |g| that is known beforehand.
* Adam divides by the size of what it gets, which is noise: its walk is √T whatever σ, C and L are, more if a filter
  made its releases smaller than what they add up to. Weight decay is left out, and so is `adam_eps`.
* With a quantile, plain steps follow the clip norm: a release is scaled by C/C_t, which is made of releases alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.options.option import Beginning, Option, refuse_unused
from fodp.options.rate_rules import RATE_RULES, FollowedTranscript
from fodp.options.schedule import share_of
from fodp.options.update import Numbers
from fodp.support import checks

AUTO = "auto"
AGREEMENT = 0.25  # of the clip norm: how long a mean of clipped gradients is, about

_LEVEL = 0.75  # of a trapezoid
_FALLING: dict[str, Callable[[Numbers], Numbers]] = {  # by the share of the plan's steps that is done
    "constant": np.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + np.cos(np.pi * done)) / 2,
    "trapezoid": lambda done: np.minimum(1.0, (1 - done) / (1 - _LEVEL)),
}
SCHEDULES = tuple(_FALLING)


@dataclass(frozen=True)
class Rate(Option):
    """The learning rate `lr`, a number or auto, and what moves it over the plan: public numbers, or releases.

    auto: so that the noise of the whole run is `auto_ratio` times the initial weights, from public numbers alone
    (`fodp.options.rate`), by methods that know what noise they accumulate. `lr_schedule`: constant, linear (1 - t/T at
    step t = 0, 1, …), cosine (½(1 + cos(πt/T))) or trapezoid (1 for three quarters of the plan, then 4(1 - t/T)). In
    the first `lr_warmup` steps k the rate is (t+1)/k of that; lr is the largest. `rate_rule` transcript: after a
    quarter of the plan the rate is raised, to four times at most, while releases agree with the recent way of the run
    beyond their known noise, and lowered while they want to go back (`fodp.options.rate_rules`).
    """

    lr: float | str = AUTO
    lr_schedule: str = "constant"
    lr_warmup: int = 0
    auto_ratio: float = 2.0
    rate_rule: str = "none"

    def __post_init__(self) -> None:
        if self.lr != AUTO and checks.positive("lr", self.lr) > 1e30:
            raise ConfigurationError(f"lr must be at most 1e30, where float32 holds it; got {self.lr!r}")
        checks.one_of("lr_schedule", self.lr_schedule, SCHEDULES)
        checks.whole("lr_warmup", self.lr_warmup, minimum=0)
        checks.positive("auto_ratio", self.auto_ratio)
        checks.one_of("rate_rule", self.rate_rule, RATE_RULES)
        refuse_unused(self, self.is_automatic, "lr='auto'", "auto_ratio")

    @property
    def is_automatic(self) -> bool:
        """Whether lr follows from public numbers."""
        return self.lr == AUTO

    @cached_property
    def acts(self) -> bool:
        """Whether any factor may differ from 1."""
        return self.lr_schedule != "constant" or self.lr_warmup > 1 or self.follows

    @property
    def follows(self) -> bool:
        """Whether releases move the rate."""
        return self.rate_rule != "none"

    @property
    def moved_by(self) -> str:
        """The parameters that move the rate, for messages."""
        chosen = {
            "lr_schedule": self.lr_schedule != "constant",
            "lr_warmup": self.lr_warmup > 1,
            "rate_rule": self.follows,
        }
        return " and ".join(name for name, acts in chosen.items() if acts)

    @property
    def features(self) -> Mapping[str, str]:
        word = f"rate_rule={self.rate_rule!r}"
        return {word: word}

    def start(self, run: Beginning) -> FollowedTranscript | None:
        return FollowedTranscript(run.plan.steps) if self.follows else None

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return {"lr_warmup": share_of(self.lr_warmup, steps, of)} if self.lr_warmup else {}

    def factors(self, steps: int) -> Numbers:
        """Those of all steps of a plan."""
        rising = np.minimum(1.0, np.arange(1, steps + 1) / max(1, self.lr_warmup))
        return _FALLING[self.lr_schedule](np.arange(steps) / steps) * rising

    def at(self, step: int, steps: int) -> float:
        """That of one step."""
        falling = _FALLING[self.lr_schedule](np.asarray(step / steps))
        return float(falling) * min(1.0, (step + 1) / max(1, self.lr_warmup))


def relative_noise(parameters: Iterable[tuple[Tensor, float]]) -> float:
    """√mean(b²/w²) over matrices, from pairs of a parameter and b²: how a unit of noise compares with the weights."""
    squares = []
    for parameter, share in parameters:
        if parameter.dim() > 1 and parameter.numel():
            inputs = math.prod(parameter.shape[1:])
            own = float(parameter.detach().double().square().mean())
            squares.append(share / max(own, 1 / (3 * inputs)))
    return math.sqrt(sum(squares) / len(squares)) if squares else 1.0


def automatic_rate(ratio: float, walk: float, relative: float) -> float:
    """η = c/(W·√mean(b²/w²)); all of it is public: the plan's numbers and the model before training."""
    rate = ratio / (walk * relative) if walk * relative > 0 else math.inf
    if not 0 < rate <= 1e30:
        raise ConfigurationError(f"lr='auto' comes to {rate:g}, which float32 does not hold: give lr as a number")
    return rate
