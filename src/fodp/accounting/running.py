"""ε while a run goes on: cheap enough to be shown after every step of a long one, and never far above the truth."""

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence

from fodp.accounting import composition
from fodp.accounting.events import Event, Phase, truncate
from fodp.accounting.releases import Accountant

TOLERANCE = 1.014  # between one point that was computed and the next; the grid of a display adds half a percent
_DETAIL = 0.25  # of that grid
_FARTHEST, _NEAREST = 0.1, 0.005  # how far ahead of a step, in shares of it, the next point may be


class RunningEpsilon:
    """The ε of the first steps of a plan, for a display.

    Guarantee: `after(n)` is an upper bound for the first n steps, as `epsilon_of(truncate(phases, n), …)`, and at
    most 2% above it (4% in a schedule of more than 128 different releases, which are rounded), and never above the ε of
    all steps. It holds for stopping there by plan, not because of what the data showed.

    More steps never cost less, so the ε of a later step is a bound too. It is computed for steps that lie as far
    apart as the tolerance allows: some three hundred of them for a run of three thousand epochs.
    """

    def __init__(self, phases: Sequence[Phase], delta: float, accountant: str) -> None:
        self.phases, self.delta = phases, delta
        self._ends = list(itertools.accumulate(phase.steps for phase in phases))
        self._name = accountant
        self._spent: Accountant | None = None
        self._step = 0  # what is added to the accountant,
        self._horizon = 0  # and the most that may be
        self._known: dict[int, float] = {0: 0.0}
        self._whole: dict[int, float] = {}  # the ε of runs of so many steps
        self._places = [0]  # the steps that are known, in order
        self._ahead = 0.03

    def after(self, step: int, end: int | None = None) -> float:
        """The ε of the first `step` steps, of `end` that are taken in all (None: the plan's)."""
        end = self._ends[-1] if end is None else max(step, end)
        if end not in self._whole:
            self._whole[end] = composition.epsilon_of(truncate(self.phases, end), self.delta, self._name)
        # Fewer steps never cost more: where a quick bound is above the ε of all of them, that is the better one.
        return self._whole[end] if step == end else min(self._bound(step), self._whole[end])

    def _bound(self, step: int) -> float:
        """A quick upper bound."""
        here = bisect.bisect_left(self._places, step)
        later = self._known[self._places[here]] if here < len(self._places) else None
        if here < len(self._places) and self._places[here] == step:
            return self._known[step]
        before = self._places[here - 1]
        most = TOLERANCE * self._known[before]
        if later is not None and later <= most:
            return later
        if later is None and step < before * (1 + self._ahead / 2):
            found = self._compute(min(self._ends[-1], round(step * (1 + self._ahead))))
            if found <= most:
                self._ahead = min(_FARTHEST, self._ahead * 1.1)
                return found
            self._ahead = max(_NEAREST, self._ahead / 2)
        return self._compute(step)

    def _compute(self, step: int) -> float:
        if self._spent is None or step > self._horizon or 2 * step < self._step:
            # A grid that suits the whole of a schedule may be too coarse for its beginning, and is larger than needed;
            # and the rounding in a spectrum of very many steps does not go away when nearly all are taken back.
            self._horizon, self._step = min(2 * step, self._ends[-1]), 0
            tally = composition.tally(truncate(self.phases, self._horizon))
            self._rounded = composition.rounded_releases(truncate(self.phases, self._horizon))
            self._spent = composition.accountant_of(self._name, tally, detail=_DETAIL)
        side = 1 if step > self._step else -1
        for event, count in self._between(*sorted((self._step, step))).items():
            self._spent.add(*self._rounded[event], side * count)
        self._step = step
        if step not in self._known:
            bisect.insort(self._places, step)
            self._known[step] = self._spent.epsilon(self.delta)
        return self._known[step]

    def _between(self, first: int, last: int) -> Counter[Event]:
        """How often each event happens from one step to another."""
        counts: Counter[Event] = Counter()
        for place in range(bisect.bisect_right(self._ends, first), len(self.phases)):
            begin = self._ends[place] - self.phases[place].steps
            if begin >= last:
                break
            phase = self.phases[place]
            after, before = min(last, self._ends[place]) - begin, max(first, begin) - begin
            for event in phase.events:
                counts[event] += phase.times_after(after) - phase.times_after(before)
        return counts
