"""A rate that follows the transcript: larger while releases agree with the way that the run has gone lately.

Had the rate been larger lately, would the run now be better off? The loss falls along the recent way x - m, x being the
iterate and m a running average of those before it, by the product of the way with the descent that a release asks for.
The release's own noise is independent of all before it, and it is known: s·B_l·z, z standard normal and B_l what the
query's shape puts on parameter l, a number or a symmetric map. (What is heard is the release itself, before a memory or
a filter mixes in earlier ones. Noise that is correlated over steps is refused: the combination of b releases in which
it is fresh again holds the sums of b lots, which the way holds too, and they agree with themselves.) So the product,
over its deviation,

    v_l = -⟨r_l, x_l - m_l⟩ / (s·|B_l·(x_l - m_l)|),

has variance 1 and, without a signal, the mean 0, whatever was released before. Every parameter has one vote: in whole
vectors the noise of the largest layer would drown what small ones tell. Votes are summed with the average's memory and
divided by the deviation of the sum, which makes z: standard deviations beyond noise. The rate is

    η·2^((z ∓ 2)/3) for z beyond ±2, and η between,   within η/4 and 4η.

Two deviations are chance, and the rate stays what it is. Nothing is heard in the first quarter of the run: then all
releases agree, also where a larger rate is worse in the end, for the noise that is taken up early stays. z falls by
itself when the rate is too large: collected noise is what releases then want to go back from. All of it is
post-processing of releases.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Deviation = Callable[[Tensor], float]
RATE_RULES = ("none", "transcript")
WIDEST = 4.0  # how far the rate may go, up and down
_MEMORY = 0.1  # of the plan's steps
_UNHEARD = 0.25  # of the plan's steps
_CHANCE, _DOUBLES = 2.0, 3.0  # the standard deviations that are chance, and those beyond that double the rate


class FollowedTranscript:
    """The factor on the rate, from iterates, releases and the known noise in them; the same for the same transcript."""

    def __init__(self, steps: int):
        self._keeps = 1 - 1 / max(2.0, _MEMORY * steps)
        self._mean: list[Tensor] | None = None  # of earlier iterates, a tensor for each parameter
        self._unheard = _UNHEARD * steps
        self._seen = 0
        self._votes = self._variance = 0.0
        self._fresh: tuple[Tensor, float] | None = None

    def see(self, released: Tensor, std: float) -> None:
        """The step's last vector as it was released, before a memory or a filter, and the noise in it."""
        self._fresh = released.clone(), std  # memories change a release in place

    def take(self) -> tuple[Tensor, float] | None:
        """What was seen in the step, once."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def factor(self, iterate: Sequence[Tensor], releases: Sequence[Tensor], deviations: Sequence[Deviation]) -> float:
        """For the update that follows. `deviations` tell of the noise in each parameter's release how much of it there
        is in its product with a way."""
        if self._mean is None:
            self._mean = [x.detach().clone() for x in iterate]
        else:
            if self._seen > self._unheard:
                self._vote(iterate, releases, deviations)
            for mean, x in zip(self._mean, iterate, strict=True):
                mean.lerp_(x.detach(), 1 - self._keeps)
        self._seen += 1
        if self._variance == 0:
            return 1.0
        z = self._votes / math.sqrt(self._variance)
        beyond = math.copysign(max(0.0, abs(z) - _CHANCE), z)
        most = math.log2(WIDEST)
        return float(2 ** min(max(beyond / _DOUBLES, -most), most))

    def _vote(self, iterate: Sequence[Tensor], releases: Sequence[Tensor], deviations: Sequence[Deviation]) -> None:
        assert self._mean is not None
        votes = []
        for x, mean, release, deviation in zip(iterate, self._mean, releases, deviations, strict=True):
            way = x.detach().double() - mean.double()
            noise = deviation(way)
            if noise > 0:  # a parameter that has not moved, or has no noise, has nothing to say
                votes.append(-float((release.double() * way).sum()) / noise)
        if votes:
            self._votes = self._keeps * self._votes + sum(votes) / math.sqrt(len(votes))
            self._variance = self._keeps**2 * self._variance + 1

    def state_dict(self) -> dict[str, Any]:
        """The average and the votes: made of releases."""
        return self.state_views() | {"mean": None if self._mean is None else [mean.clone() for mean in self._mean]}

    def state_views(self) -> dict[str, Any]:
        """The same without a copy, to be written to a file before the next step."""
        return {"mean": self._mean, "seen": self._seen, "votes": self._votes, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        mean = state["mean"]
        self._mean = None if mean is None else [one.clone() for one in mean]
        self._seen = int(state["seen"])
        self._votes, self._variance = float(state["votes"]), float(state["variance"])

    def bytes_when_full(self, size: int) -> int:
        """How much a checkpoint of a model with so many trained numbers holds more, at most: the average."""
        return size * 8
