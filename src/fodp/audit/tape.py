"""A run on tape: every lot it drew, every query it released, and what the world saw of it.

Given the tape of a run on D, a run on D' is fed D's masks, random numbers and released values. Both then share
one transcript and differ only in what they would have added noise to.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fodp.audit.report import Progress, silent, stepping
from fodp.callbacks import Callback
from fodp.plan import Plan
from fodp.queries import Query
from fodp.ranks import refuse_group
from fodp.sampling import Lot
from fodp.session import Session
from fodp.step import Step
from fodp.trainer import Trainer


@dataclass(frozen=True)
class Released:
    """One visit to the noise site."""

    step: int
    lot: Lot
    value: Tensor
    bound: float
    std: float
    result: Tensor


@dataclass
class Tape:
    """What one run did."""

    lots: dict[tuple[int, str], Lot] = field(default_factory=dict)
    uniforms: dict[tuple[int, str], tuple[Tensor, Lot]] = field(default_factory=dict)
    releases: list[Released] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)  # after each step: parameters, state, optimizer

    def events(self) -> list[tuple[float, float]]:
        """(rate, joint noise multiplier) of each lot that released something, in order."""
        multipliers: dict[Lot, list[float]] = {}
        for r in self.releases:
            multipliers.setdefault(r.lot, []).append(r.std / r.bound)
        return [(lot.rate, sum(z**-2 for z in each) ** -0.5) for lot, each in multipliers.items()]


def record(
    trainer: Trainer,
    *,
    steps: int | None = None,
    of: Tape | None = None,
    without: int = -1,
    watch: bool = True,
    progress: Progress = silent,
) -> Tape:
    """Train for `steps` steps, or to the end of the plan, and keep the tape.

    With `of`, replay that tape on the same data without row `without`, or without the person who comes there in the
    order of their first records. `watch` also keeps all that leaves the
    run after each step.
    """
    refuse_group("an audit")
    tape = Tape()
    last = trainer.plan.steps if steps is None else steps
    trainer.session.steps_by(lambda session, number: TapedStep(session, number, tape, of, without))
    trainer.callbacks.append(_Watch(tape, last, watch, progress))
    with stepping():
        trainer.fit()
    if trainer.step < last:
        raise KeyboardInterrupt  # half a tape would look like missing events
    return tape


class TapedStep(Step):
    """A step that is recorded on a tape, and replays what another one holds."""

    def __init__(self, session: Session, number: int, tape: Tape, of: Tape | None, without: int):
        super().__init__(session, number)
        self._tape, self._of, self._without = tape, of, without

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """The lot of this step; in a replay that of the tape, without the missing record."""
        lot, of, without = super().draw(rate, name), self._of, self._without
        # What is drawn for people is a function of their names: one less must change nothing, and nothing is exchanged.
        if of is not None and lot.owners is None and (self.number, lot.name) in of.lots:
            drawn = of.lots[self.number, lot.name].indices
            others = drawn[drawn != without]
            # The step knows this very lot, so its records are exchanged in place. They keep their numbers, under which
            # they draw: who comes after the missing one has another place in the data, and is the same record.
            object.__setattr__(lot, "indices", others - (others > without).long())
            object.__setattr__(lot, "names", others)
        self._tape.lots[self.number, lot.name] = lot
        return lot

    def uniform(self, count: int, name: str) -> Tensor:
        """The numbers of this step; in a replay those of the tape, without the missing record's."""
        if self._of is None or (self.number, name) not in self._of.uniforms:
            numbers = super().uniform(count, name)
            if self.lots:
                self._tape.uniforms[self.number, name] = (numbers, self.lots[-1])
            return numbers
        numbers, lot = self._of.uniforms[self.number, name]
        drawn = lot.indices if lot.owners is None else lot.owners.unique_consecutive()
        return numbers if len(numbers) == count else numbers[drawn != self._without]

    def noised(self, query: Query, std: float, name: str) -> Tensor:
        """The query with its noise; in a replay what was released on the tape."""
        result, releases = super().noised(query, std, name), self._tape.releases
        if self._of is not None and len(releases) < len(self._of.releases):
            result = self._of.releases[len(releases)].result.clone()
        assert isinstance(query.lot, Lot)
        value = query.value.clone()
        releases.append(Released(self.number, query.lot, value, float(query.bound), float(std), result.clone()))
        return result


class _Watch(Callback):
    """Notes after each step what leaves the run, and ends it where the tape ends."""

    def __init__(self, tape: Tape, last: int, watch: bool, progress: Progress):
        self._tape, self._last, self._watch, self._progress = tape, last, watch, progress

    def on_step(self, trainer: Trainer) -> None:
        """One more step."""
        if self._watch:
            self._tape.seen.append(
                {
                    "parameters": trainer.session.parameters().clone(),
                    "state": trainer.session.state_dict(),
                    "optimizer": _copied(trainer.optimizer.state_dict()),
                }
            )
        if trainer.step >= self._last:
            trainer.interrupt()
        self._progress(trainer.step / self._last)


def promised(plan: Plan, steps: int | None = None) -> list[tuple[float, float]]:
    """Every event of the plan's first steps as (rate, noise multiplier), in order."""
    every = [phase.events for phase in plan.events() for _ in range(phase.steps)][:steps]
    return [(event.sampling_rate, event.noise_multiplier) for events in every for event in events]


def event_faults(plan: Plan, tape: Tape, steps: int | None = None) -> list[str]:
    """Where what was released in the first steps is not what was promised; a lower rate costs less and is none."""
    emitted, expected = tape.events(), promised(plan, steps)
    faults = []
    if len(emitted) != len(expected):
        faults.append(f"{len(emitted)} events were emitted, {len(expected)} promised")
    faults += [
        f"event {i} is ({rate:g}, {z:g}), promised was {expected[i]}"
        for i, (rate, z) in enumerate(emitted[: len(expected)])
        if rate > expected[i][0] or not math.isclose(z, expected[i][1], rel_tol=1e-9)
    ]
    return faults


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _copied(state: Any) -> Any:
    """An optimizer's state holds its live tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list | tuple) else state
