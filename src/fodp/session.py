"""The one flow: open a step, call the method, compare with the promise, pass the release through the options."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fodp import kernels
from fodp.clipping.maps import Factor, share
from fodp.errors import LedgerError, PrivacyError
from fodp.gradients import Gradients, Points, Source
from fodp.noise import Streams
from fodp.noise.banded import BandedNoise
from fodp.noise.exact import ExactNoise
from fodp.options import Beginning
from fodp.options.average import RunningAverage
from fodp.options.filter import RESPONSE_LENGTH
from fodp.options.quantile import AdaptiveClip
from fodp.options.rate_rules import FollowedTranscript
from fodp.options.scaling import ScalingState
from fodp.plan import Plan
from fodp.processes import ALONE, Processes
from fodp.queries import Query
from fodp.release import FreshNoise, Noise
from fodp.sampling import Lot, Lots
from fodp.step import Step
from fodp.support import checks
from fodp.support.forks import Owner

MakeStep = Callable[["Session", int], Step]


class State(Protocol):
    """What a part of a session carries from step to step; made of releases and public numbers only."""

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that another process needs to go on from here."""

    def load_state_dict(self, state: Any) -> None:
        """Take over a saved state."""


class Witness(Protocol):
    """Sees what a step releases, and says at its end whether that may be used (`fodp.state.witness`)."""

    def begin(self) -> None:
        """A step begins."""

    def see(self, released: Tensor) -> None:
        """It has released this."""

    def confirm(self) -> None:
        """Raise if what it has released may not be used."""


class Session:
    """Carries a plan out, step by step, on whatever gradient source it is given.

    `take_step()` performs one step of the plan's method and returns its private sum. A release whose event is not the
    promised one is refused before its noise is drawn, and so is a model that writes into its buffers, before anything
    of the step is used. A session belongs to the process that made it.

    `source` gives per-example gradients, `lots` draws, `streams` are where lots and records draw from, and
    `noise_streams` where noise does, if that is another place. `states` are the parts by name that carry something from
    step to step: they are saved, loaded and measured in one loop.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        lots: Lots,
        streams: Streams,
        processes: Processes = ALONE,
        *,
        noise_streams: Streams | None = None,
        public_score: Callable[[], float] | None = None,
    ):
        for given in (streams, noise_streams or streams):
            _refuse_other_seed(plan, given)
        self.plan, self.source, self.lots, self.streams, self.processes = plan, source, lots, streams, processes
        self.number = 0  # of the next step
        noise = noise_of(plan, noise_streams or streams)
        self.noise = processes.noise(noise)
        self.rule = plan.options.clip.rule(source.layout.names)
        self.states: dict[str, Any] = started(plan, source, noise, processes)
        self.witness: Witness | None = None
        self._make_step: MakeStep = Step
        self._public_score = public_score
        self._owner, self._ended = Owner(), ""
        # Of the last steps, the newest first: an adapted clip norm, or a normaliser, changes the noise.
        self._noise_stds: deque[float] = deque(maxlen=RESPONSE_LENGTH)

    def take_step(self) -> Tensor:
        """One step of the method: its private sum, filtered, to be divided by the plan's lot size.

        A step that breaks off after its lot was drawn is over: it counts, and its mask and noise are never used again.
        """
        if not self._owner.is_here:
            self.refuse_other_process()
        if self._ended:
            raise PrivacyError(f"this run has ended, make a new one: {self._ended}")
        if self.number >= self.plan.steps:
            raise PrivacyError(f"the plan's {self.plan.steps} steps are done; a longer run needs another plan")
        step = self._make_step(self, self.number)
        if self.witness is not None:
            self.witness.begin()
        try:
            if self.processes.count == 1:
                released = self._carried_out(step)
            else:
                with self.processes.together():
                    released = self._carried_out(step)
        except BaseException:
            self.number += bool(step.lots)
            raise
        if step.count is not None:
            self.states["clip"].move(step.count)
        self._noise_stds.appendleft(step.noise_std)
        self.number += 1
        return self.states["filter"](released) if "filter" in self.states else released

    def _carried_out(self, step: Step) -> Tensor:
        """What the method releases in this step, once it is the promised event and the model has kept nothing."""
        with self.source.unchanged() as kept:
            if "scaling" in self.states:
                self.states["scaling"].factors(step.number)
            released = self.plan.algorithm.step(step, self.states["method"])
            kept.refuse_changes()
            step.close()
            if self.witness is not None:
                self._confirm(self.witness)
        return released

    def gradients(self, number: int, lot: Lot, at: Points) -> Gradients:
        """The gradients of a lot of this step, scaled by the step's public factors."""
        scaling, exact = self.states.get("scaling"), self.plan.exact_noise
        factors = None if scaling is None else scaling.factors(number)
        chunks = self.source.chunks(lot, at, factors, exact)
        total = self.processes.total if self.processes.count > 1 else None
        return Gradients(chunks, self.source.layout, lot, self.rule, factors, exact, total)

    def heard(self, query: Query, released: Tensor, std: float, noise_std: float) -> Tensor:
        """The release without its scaling, once the options that learn from releases have seen it: post-processing."""
        if query.blocks is not None:
            if self.scaling is not None:
                self.scaling.see(query, released, noise_std)
            released = query.map_back_(released)
        rate: FollowedTranscript | None = self.states.get("rate")
        if rate is not None and released.shape == (self.source.layout.size,):
            rate.see(released, std)
        return released

    def shown_to(self, witness: Witness | None) -> None:
        """From now on what steps release is shown to this witness: of a seeded run that is kept in a ledger."""
        self.witness = witness

    def steps_by(self, make_step: MakeStep) -> None:
        """From now on steps are made by this: for audits, whose steps record what they do."""
        self._make_step = make_step

    @property
    def method(self) -> Any:
        """The plan's method, a `fodp.methods.Method`."""
        return self.plan.algorithm

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """What moves the clip norm, where a quantile is set."""
        return self.states.get("clip")

    @property
    def scaling(self) -> ScalingState | None:
        """The public factors before clipping, if there are any."""
        return self.states.get("scaling")

    @property
    def average(self) -> RunningAverage | None:
        """The average of the iterates, if the plan has one."""
        return self.states.get("average")

    @property
    def clip_norm(self) -> float:
        """C of the next step: the plan's, the scheduled or the adapted one."""
        if self.adaptive_clip is not None:
            return self.adaptive_clip.clip_norm
        schedules = self.method.options.schedules
        return (self.plan if schedules is None else schedules.at(self.plan, self.number)).clip_norm

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets: public numbers only. 0 before any noise."""
        if not self._noise_stds:
            return 0.0
        # One of the two is a single number: what must know the variance gets no noise that was filtered twice.
        gains = np.asarray(self.method.noise_gains(self.states["method"]))
        if "filter" in self.states:
            gains = np.convolve(gains, self.states["filter"].noise_gains())
        total = math.fsum(gain * std * std for gain, std in zip(gains.tolist(), self._noise_stds, strict=False))
        return total / self.plan.lot_size**2

    def noise_share(self, parameter: Tensor) -> float:
        """What share of that variance the noise of a parameter has: the mean squared factor of its way back."""
        return share(self.noise_factor(parameter))

    def noise_factor(self, parameter: Tensor) -> Factor:
        """By which number or map the noise of a parameter came back from the last release; 1 without a scaling."""
        if self.scaling is not None:
            for known, factor in zip(self.source.layout.parameters, self.scaling.current, strict=True):
                if known is parameter:
                    return factor
        return 1.0

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector."""
        return self.source.layout.read()

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream, the same in every process."""
        words = self.streams.words(count, self.number, f"uniform.{name}")  # never a lot's own words
        return torch.from_numpy((words >> 11) * 2.0**-53).to(self.source.layout.device, non_blocking=True)

    def public_score(self) -> float:
        """The loss on data declared public."""
        score = self._public_score
        if score is None:
            raise PrivacyError(f"{self.plan.method} scores proposals on public data: give the Trainer public_score")
        return self.processes.number(lambda: float(score()))

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the session, and not one that was forked from it since."""
        return self._owner.is_here

    def refuse_other_process(self) -> None:
        """Raise in a process that was forked from the one that made the session: only one of them would be charged."""
        if not self.is_here:
            raise PrivacyError(
                "this run was made before this process was forked, and it belongs to the process that made it: where "
                "both went on, each would release steps of its own and only one of them would be counted. Make the "
                "run (Trainer, make_private) in the process that trains"
            )

    def _confirm(self, witness: Witness) -> None:
        """Have the step's releases compared with what is known of them. Memories hold them already: a refusal is the
        end of the run."""
        try:
            witness.confirm()
        except BaseException as error:
            self._ended = str(error) or type(error).__name__
            raise

    def state_dict(self, *, views: bool = False) -> dict[str, Any]:
        """The state of every part: releases and public numbers only.

        With `views` large tensors are not copied: for a file that is written before the next step.
        """
        # Earlier noise would let a reader take it off: a secure run that is resumed begins anew instead.
        kept = {name: part for name, part in self.states.items() if name != "noise" or self.plan.seed is not None}
        return {
            "states": {
                name: part.state_views() if views and hasattr(part, "state_views") else part.state_dict()
                for name, part in kept.items()
            },
            "noise_stds": list(self._noise_stds),
            "kernels": kernels.library() is not None,
            "device": self.source.layout.device.type,
            # Where lots are split says something about the records in them; a secure run can do without.
            "source": self.source.state_dict() if self.plan.seed is not None else None,
        }

    def bytes_when_full(self) -> int:
        """How much `state_dict()` will hold at most, as far as its parts tell: a window is empty at first."""
        parts = [part for name, part in self.states.items() if name != "noise" or self.plan.seed is not None]
        layout = self.source.layout
        size = layout.size * layout.dtype.itemsize // 4  # parts count numbers of four bytes
        return sum(part.bytes_when_full(size) for part in parts if hasattr(part, "bytes_when_full"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. A secure run does not know its groups, if its records take turns, and correlates its
        noise with none of before: its next step must begin a round (`Lots.next_round`)."""
        before, now = state.get("device", "cpu"), self.source.layout.device.type
        if self.plan.seed is not None and before != now:
            raise LedgerError(
                f"this seeded run began on {before} and would go on on {now}, where its noise is another: steps that "
                f"are charged once would be released twice. Move the model to {before}, or start a new run"
            )
        for name, part in self.states.items():
            if name == "noise" and self.plan.seed is None:
                part.forget()
            else:
                part.load_state_dict(state["states"][name])
        self._noise_stds.clear()
        self._noise_stds.extend(state["noise_stds"])
        self.source.load_state_dict(state["source"])
        if self.plan.seed is not None and state["kernels"] != (kernels.library() is not None):
            checks.warn(
                "this run began " + ("with" if state["kernels"] else "without") + " compiled kernels and goes on "
                "otherwise: the last bits of seeded noise will differ from those of a run without a break"
            )

    def go_to(self, number: int) -> None:
        """The next step is this one: for a run that goes on from a checkpoint, or leaves a lot that broke off."""
        self.number = number


def _refuse_other_seed(plan: Plan, streams: Streams) -> None:
    """A seeded run must be called seeded, and a secure one must be secure."""
    if streams.seed != plan.seed:
        wanted = "secure streams (seed=None)" if plan.seed is None else f"the seed {plan.seed}"
        raise PrivacyError(f"the plan states {wanted}, these are {streams}: make a plan with their seed")


def noise_of(plan: Plan, streams: Streams) -> Noise:
    """The noise of a plan's releases: exact, correlated over steps where records take turns enough, or fresh."""
    strategy, turns = tuple(plan.algorithm.strategy()), plan.algorithm.turns
    if len(strategy) > turns:
        raise PrivacyError(
            f"{plan.method} correlates its noise over {len(strategy)} steps and lets records take turns "
            f"among {turns} groups: a record would be in two lots whose noise is shared"
        )
    if strategy != (1.0,):
        return BandedNoise(streams, strategy)
    return ExactNoise(streams) if plan.exact_noise else FreshNoise(streams)


def started(plan: Plan, source: Source, noise: Noise, processes: Processes) -> dict[str, Any]:
    """The fresh state of the method and of every option that carries one, by name."""
    chosen, size = plan.options, source.layout.size
    beginning = Beginning(
        plan=plan,
        size=size,
        multipliers=[phase.events[-1].noise_multiplier for phase in plan.events()],
        engine=source.engine,
        sample=source.public_records(chosen.scaling),
        same=processes.from_first,
    )
    states: dict[str, Any] = {"method": plan.algorithm.init(plan, size)}
    named = {
        "filter": chosen.filter,
        "clip": chosen.quantile,
        "scaling": chosen.scaling,
        "average": chosen.average,
        "rate": chosen.rate,
    }
    for name, option in named.items():
        state = None if option is None else option.start(beginning)
        if state is not None:
            states[name] = state
    if hasattr(noise, "load_state_dict"):
        states["noise"] = noise
    return states
