"""A learning rate from public numbers: the noise of the whole run is a fixed multiple of the initial weights."""

import math
import statistics
from collections.abc import Iterable

from torch import Tensor

from fodp._checks import ConfigurationError

AUTO = "auto"


def shaped_scale(parameters: Iterable[tuple[Tensor, float]]) -> float:
    """The initial scale of the weights over the factor b of their shape: the median over matrices that are not zero.

    With the shape fan-in and the usual initial weights, of standard deviation k/√inputs, it is k/√width for every
    layer with at least `width` inputs. Vectors (biases, gains of norms) and matrices that start at zero (LoRA's second
    one, some heads) have no scale of their own; embeddings, whose entries are of order 1, are few.
    """
    found = [
        math.sqrt(float(parameter.detach().double().square().mean())) / b
        for parameter, b in parameters
        if parameter.dim() > 1 and bool(parameter.detach().any())
    ]
    if not found:
        raise ConfigurationError(
            "lr='auto' is measured against the initial weights, and no trainable matrix of this model starts at "
            "anything but zero: give lr as a number"
        )
    return statistics.median(found)


def automatic_rate(ratio: float, lot_size: float, accumulated: float, scale: float) -> float:
    """lr = c·L·w/A, where A is the standard deviation of the noise in the sum of all that the optimizer gets.

    A parameter with the factor b collects noise of b·lr·A/L over the run, and its initial weights are about b·w: the
    ratio of the two is c in every layer. All of it is public: the plan's numbers and the model before training.
    """
    rate = ratio * lot_size * scale / accumulated
    if not 0 < rate <= 1e30:
        raise ConfigurationError(f"lr='auto' comes to {rate:g}, which float32 does not hold: give lr as a number")
    return rate
