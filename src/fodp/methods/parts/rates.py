"""A learning rate from public numbers: the noise of the whole run is a fixed multiple of the initial weights.

What is known before any data is touched is the noise. With the rate η it moves the weights of layer l, over the run, by
η·W·b_l at random: W is the walk of an optimizer of rate 1 that gets nothing but noise (`noise_walk`), b_l the factor
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fodp import _checks
from fodp._checks import ConfigurationError
from fodp.methods.parts.rate_rules import RATE_RULES
from fodp.methods.parts.updates import CorrectedAdam, Sgd, Update

AUTO = "auto"
AGREEMENT = 0.25  # of the clip norm: how long a mean of clipped gradients is, about
_SMALL = 1e-8  # where a response has died away

Numbers = npt.NDArray[np.float64]

_LEVEL = 0.75  # of a trapezoid
_FALLING: dict[str, Callable[[Numbers], Numbers]] = {  # by the share of the plan's steps that is done
    "constant": np.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + np.cos(np.pi * done)) / 2,
    "trapezoid": lambda done: np.minimum(1.0, (1 - done) / (1 - _LEVEL)),
}
SCHEDULES = tuple(_FALLING)


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Public factors on the learning rate: constant, or falling over the plan's steps, after a warm-up if asked for.

    linear: 1 - t/T at step t = 0, 1, …; cosine: ½(1 + cos(πt/T)); trapezoid: 1 for three quarters of the run, then
    down in a line, 4(1 - t/T). In the first `lr_warmup` steps k it is (t+1)/k of that. `rate_rule` transcript
    multiplies it by what releases say (`rate_rules`).
    """

    lr_schedule: str
    lr_warmup: int
    rate_rule: str = "none"

    def __post_init__(self) -> None:
        _checks.one_of("lr_schedule", self.lr_schedule, SCHEDULES)
        _checks.whole("lr_warmup", self.lr_warmup, minimum=0)
        _checks.one_of("rate_rule", self.rate_rule, RATE_RULES)

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

    def factors(self, steps: int) -> Numbers:
        """Those of all steps of a plan."""
        rising = np.minimum(1.0, np.arange(1, steps + 1) / max(1, self.lr_warmup))
        return _FALLING[self.lr_schedule](np.arange(steps) / steps) * rising

    def at(self, step: int, steps: int) -> float:
        """That of one step."""
        falling = _FALLING[self.lr_schedule](np.asarray(step / steps))
        return float(falling) * min(1.0, (step + 1) / max(1, self.lr_warmup))


CONSTANT = RateSchedule(lr_schedule="constant", lr_warmup=0)


def relative_noise(parameters: Iterable[tuple[Tensor, float]]) -> float:
    """√mean(b²/w²) over matrices, from pairs of a parameter and b²: how a unit of noise compares with the weights."""
    squares = []
    for parameter, share in parameters:
        if parameter.dim() > 1 and parameter.numel():
            inputs = math.prod(parameter.shape[1:])
            own = float(parameter.detach().double().square().mean())
            squares.append(share / max(own, 1 / (3 * inputs)))
    return math.sqrt(sum(squares) / len(squares)) if squares else 1.0


def accumulated(deviations: Sequence[float] | Numbers, response: Sequence[float] | Numbers, weights: Numbers) -> float:
    """The standard deviation of Σ_t weights_t·x_t, where x_t = Σ_k response_k·z_(t-k) and z_s has deviations_s."""
    kernel = np.asarray(response, dtype=np.float64)[: len(weights)]
    ahead = np.concatenate([weights, np.zeros(len(kernel) - 1)])
    of_each = np.convolve(ahead, kernel[::-1], mode="valid")  # what release s adds up to from then on
    return float(np.linalg.norm(of_each * np.asarray(deviations)))


def noise_walk(
    update: Update, deviations: Numbers, response: Sequence[float], factors: Numbers, signal: Numbers
) -> float:
    """How far the update moves a weight at random over the run, with rate 1, by releases that are noise alone.

    `deviations` are those of each step's fresh noise, `response` what is in the update's input of a release, of the one
    before it, …, and `factors` the schedule of the rate. Plain steps are in the releases' units, Adam's have none.
    `signal` is what an entry of the clipped gradients' mean may be beside it, for plain steps.
    """
    if isinstance(update, Sgd):
        momentum = _geometric(1.0, update.momentum)
        noise = accumulated(deviations, np.convolve(response, momentum), factors)
        return math.hypot(noise, accumulated(signal, momentum, factors))
    steps = np.arange(1, len(factors) + 1)
    averaged = np.convolve(response, _geometric(1 - update.beta1, update.beta1))
    variance = _averaged(deviations**2, update.beta2) * float(np.square(response).sum())
    weights = factors / (1 - update.beta1**steps) / np.sqrt(variance)
    if isinstance(update, CorrectedAdam):
        weights = weights * _gain_of_correction(update, response, len(factors))
    return accumulated(deviations, averaged, weights)


def automatic_rate(ratio: float, walk: float, relative: float) -> float:
    """η = c/(W·√mean(b²/w²)); all of it is public: the plan's numbers and the model before training."""
    rate = ratio / (walk * relative) if walk * relative > 0 else math.inf
    if not 0 < rate <= 1e30:
        raise ConfigurationError(f"lr='auto' comes to {rate:g}, which float32 does not hold: give lr as a number")
    return rate


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


def _gain_of_correction(update: CorrectedAdam, response: Sequence[float], steps: int) -> Numbers:
    """How much larger noise makes AdamBC's steps than Adam's: √E[1/max(v - 1, floor)], v the average of its squares.

    v is taken for a χ² of as many degrees of freedom as the average has independent squares; Wilson and Hilferty's
    cube gives its quantiles.
    """
    if update.bc_floor == 0:
        raise ConfigurationError("lr='auto' has no rule for bc_floor=0, where noise alone has no limit: give lr")
    kernel = np.asarray(response, dtype=np.float64)
    correlations = np.correlate(kernel, kernel, mode="full") / float(kernel @ kernel)
    beta, some = update.beta2, np.unique(np.geomspace(1, steps, 64).astype(np.int64))
    left = beta ** some.astype(np.float64)
    shares = (1 - beta) / (1 + beta) * (1 + left) / (1 - left)  # Σ of the average's squared weights
    freedom = np.maximum(1.0, 1 / (shares * float(correlations @ correlations)))[:, None]
    normal = _normal_quantiles(201)[None, :]
    v = np.maximum(0.0, 1 - 2 / (9 * freedom) + normal * np.sqrt(2 / (9 * freedom))) ** 3
    gains = np.sqrt((1 / np.maximum(v - 1, update.bc_floor)).mean(axis=1))
    return np.asarray(np.interp(np.arange(1, steps + 1), some, gains))


def _normal_quantiles(count: int) -> Numbers:
    from statistics import NormalDist

    return np.asarray([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
