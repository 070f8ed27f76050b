"""A run: the five verbs on real data. Data only moves to the right; noise is added at `release`."""

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fodp import _checks, exact, kernels, mechanism
from fodp._checks import PrivacyError
from fodp.accounting import Event, joint
from fodp.adaptive_clip import AdaptiveClip
from fodp.augmentation import Augment, Augmentation
from fodp.buffers import KeptState, modules_of
from fodp.clipping.batches import Keyed, Parts, repeat
from fodp.clipping.engine import HERE, Engine, LossFunction, Points
from fodp.clipping.gradients import Gradients
from fodp.draws import Source
from fodp.filters import RESPONSE_LENGTH, Filter
from fodp.mechanism import Query
from fodp.noise import Streams
from fodp.plan import Plan
from fodp.sampling import Fetcher, Lot, PoissonSampler

_LOOKS_IN_256 = 1


class Run:
    """Executes a plan step by step and checks every release against what the plan promised.

    `take_step()` performs one step of the plan's method and returns its private sum. A release whose
    event is not the promised one is refused before its noise is drawn, and so is a model that
    writes into its buffers, before anything of the step is used.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dataset: Any,
        plan: Plan,
        *,
        streams: Streams | None = None,
        engine: str = "auto",
        microbatch: int | None = None,
        augment: Augment | None = None,
        copies: int = 1,
        public_score: Callable[[], float] | None = None,
    ):
        self.plan = plan
        self.step = 0
        if streams is None:
            streams = Streams.secure() if plan.seed is None else Streams.seeded(plan.seed)
        elif streams.seed != plan.seed:
            wanted = "secure streams (seed=None)" if plan.seed is None else f"the seed {plan.seed}"
            raise PrivacyError(f"the plan states {wanted}, these are {streams}: leave streams out, or mend the plan")
        self.streams = streams
        self.engine = Engine(model, loss_fn, engine)
        self._parameters = tuple(model.parameters())
        self._fetcher = Fetcher(dataset)
        self._sampler = PoissonSampler(self._fetcher.size, plan.sampling_rate, streams)
        self._microbatch = None if microbatch is None else _checks.whole("microbatch", microbatch)
        self._copies = _checks.whole("copies", copies)
        self._augmentation = None if augment is None else Augmentation(augment, self._copies)
        self._watched = [*modules_of(loss_fn, model), *modules_of(augment, model)]
        self._public_score = public_score
        self.add_noise: Callable[..., Tensor] = exact.release if plan.exact_noise else mechanism.release
        self.method = plan.algorithm
        self.state = self.method.init(plan, self.engine.layout.size)
        std = plan.noise_multiplier * plan.clip_norm
        self.filter: Filter = self.method.params.make_filter(std, self.engine.layout.size)
        self.adaptive_clip: AdaptiveClip | None = self.method.params.make_clip(plan)
        if self.adaptive_clip is not None:
            for phase in plan.events():
                self.adaptive_clip.rest(phase.events[-1].noise_multiplier)  # refuses a count that takes everything
        # Of the last steps, the newest first: an adapted clip norm, or a normaliser, changes the noise.
        self._noise_stds: deque[float] = deque(maxlen=RESPONSE_LENGTH)
        self._begin()

    def _begin(self) -> None:
        self._lots: list[Lot] = []
        self._asked: dict[int, Gradients] = {}  # the last gradients asked of each lot
        self._spent: list[float | None] = []  # joint noise multiplier of each lot so far in this step
        self._releases: dict[int, int] = {}  # how many each lot has made
        self._count: Tensor | None = None  # the released count that will move the clip norm
        self._noise_std = 0.0  # of the step's last release

    def take_step(self) -> Tensor:
        """One step of the method: its private sum, filtered, to be divided by the plan's lot size."""
        if self.step >= self.plan.steps:
            raise PrivacyError(f"the plan's {self.plan.steps} steps are done; a longer run needs another plan")
        self._begin()
        kept = KeptState(self.engine.model, self._watched, self._parameters)
        try:
            released = self.method.step(self, self.state)
        except BaseException:
            kept.restore()  # un-noised statistics must not outlive a step that broke off
            raise
        kept.refuse_changes()
        emitted = tuple(Event(lot.rate, z) for lot, z in zip(self._lots, self._spent, strict=True) if z)
        if not _same(emitted, self._promised()):
            raise PrivacyError(f"step {self.step} emitted {emitted}, its plan promised {self._promised()}")
        if self.adaptive_clip is not None and self._count is not None:
            self.adaptive_clip.move(float(self._count))
        self._noise_stds.appendleft(self._noise_std)
        self.step += 1
        return self.filter(released)

    def set_augmentation_aside(self) -> None:
        """From now on records are taken as they are: for audits whose records are no data that could be augmented.

        Copies stay: each record still has that many rows, whose gradients are averaged.
        """
        self._augmentation = None

    @property
    def clip_norm(self) -> float:
        """C of this step: the plan's, or the adapted one."""
        return self.plan.clip_norm if self.adaptive_clip is None else self.adaptive_clip.clip_norm

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """A fresh Poisson lot of the declared rate; `name` keeps the lots of one step apart."""
        if name and not name.isalnum():
            raise PrivacyError(f"the name of a lot is letters and digits, got {name!r}")
        stream = f"mask{name}"
        if any(lot.name == stream for lot in self._lots):
            raise PrivacyError(f"this step has drawn a lot {name!r} already: give the second one another name")
        lot = self._sampler.draw(self.step, stream, rate)
        self._lots.append(lot)
        self._spent.append(None)
        return lot

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the model's trainable parameters, in their order in a flat vector."""
        return tuple(parameter.shape for parameter in self.engine.layout.parameters)

    def gradients(
        self, lot: Lot, at: Points = HERE, ascent: float = 0.0, blocks: Sequence[float] | None = None
    ) -> Gradients:
        """The lot's per-example gradients at the model's parameters, or at points given by releases.

        `ascent` ρ > 0 takes each example's gradient at its own point θ + ρ·g_i/‖g_i‖ instead. `blocks` are public
        factors, one per parameter, that scale its part of every gradient.
        """
        place = self._place(lot)
        self.engine.look_again = self._looks_again()
        batch, exactly = self._batch(lot), self.plan.exact_noise
        asked = Gradients(self.engine, batch, at, self._copies, self._microbatch, lot, ascent=ascent, exact=exactly)
        if blocks is not None:
            asked = asked.scaled(blocks)
        self._asked[place] = asked
        return asked

    def _batch(self, lot: Lot) -> Keyed:
        """The lot's records, each with draws of its own."""
        indices, copies = lot.indices, self._copies
        source = Source(self.streams, self.step, lot.name)
        rows = lot.records if copies == 1 else (lot.records[:, None] * copies + torch.arange(copies)).flatten()
        at_once = self._fetcher.rows_at_once
        if self._augmentation is None and copies == 1 and at_once is not None and len(indices) > at_once:
            return Keyed(Parts(len(indices), at_once, lambda part: self._fetcher.fetch(indices[part])), rows, source)
        batch = Keyed(repeat(self._fetcher.fetch(indices, source, lot.records), copies), rows, source)
        # Of the whole lot: what it returns must not depend on how the lot is split.
        return batch if self._augmentation is None else self._augmentation(batch, self._looks_again())

    def _looks_again(self) -> bool:
        """Whether examples are looked at anew in this step: once in a while, at steps that anybody may know."""
        return self.step > 0 and hashlib.blake2b(b"%d" % self.step, person=b"fodp.check").digest()[0] < _LOOKS_IN_256

    def release(self, lot: Lot, query: Query, std: float) -> Tensor:
        """query + N(0, std²): charged to its lot, jointly with what that lot has released before."""
        place = self._place(lot)
        if query.lot is not lot:
            raise PrivacyError("this query was not computed from the lot it is released for")
        multiplier = query.noise_multiplier(std)
        clip = self.adaptive_clip
        if clip is not None and self._count is None and place == len(self._promised()) - 1 and place in self._asked:
            # The count and the sum share what the sum alone would have cost.
            rest = clip.rest(multiplier)
            count = self._asked[place].count(lambda norms: norms <= clip.clip_norm)
            self._charge(place, count.noise_multiplier(clip.count_noise))
            self._count = self.add_noise(count, clip.count_noise, self.streams, self.step, "count")
            multiplier, std = rest, std * rest / multiplier
        self._charge(place, multiplier)
        self._noise_std = std
        earlier = self._releases.get(place, 0)
        self._releases[place] = earlier + 1
        name = lot.name.replace("mask", "noise", 1) + (f".{earlier}" if earlier else "")
        return self.add_noise(query, std, self.streams, self.step, name)

    def _charge(self, place: int, multiplier: float) -> None:
        before = self._spent[place]
        spent = multiplier if before is None else joint(before, multiplier)
        promised, rate = self._promised(), self._lots[place].rate
        if (
            place >= len(promised)
            or spent < promised[place].noise_multiplier * (1 - 1e-9)
            or rate > promised[place].sampling_rate * (1 + 1e-9)
        ):
            raise PrivacyError(
                f"step {self.step} would spend {spent:g} at rate {rate:g} on lot {place}, promised was {promised}"
            )
        self._spent[place] = spent

    def unclipped_fraction(self) -> float | None:
        """The released noisy share of examples within the clip norm in this step; None without a count."""
        if self.adaptive_clip is None or self._count is None:
            return None
        return self.adaptive_clip.fraction_of(float(self._count))

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets: public numbers only. 0 before any noise."""
        if not self._noise_stds:
            return 0.0
        # One of the two is a single number: what must know the variance gets no noise that was filtered twice.
        gains = np.convolve(self.method.noise_gains(self.state), self.filter.noise_gains()).tolist()
        total = math.fsum(gain * std * std for gain, std in zip(gains, self._noise_stds, strict=False))
        return total / self.plan.lot_size**2

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector."""
        return self.engine.layout.read()

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream."""
        words = self.streams.words(count, self.step, f"uniform.{name}")  # never a lot's own words
        return torch.from_numpy((words >> 11) * 2.0**-53).to(self.engine.layout.device)

    def public_score(self) -> float:
        """The loss on data declared public."""
        if self._public_score is None:
            raise PrivacyError(f"{self.plan.method} scores proposals on public data: give the Trainer public_score")
        return float(self._public_score())

    def state_dict(self) -> dict[str, Any]:
        """Method state, filter and clip norm: releases and public numbers only."""
        clip = None if self.adaptive_clip is None else self.adaptive_clip.clip_norm
        return {
            "method": self.state.state_dict(),
            "filter": self.filter.state_dict(),
            "clip_norm": clip,
            "noise_stds": list(self._noise_stds),
            "kernels": kernels.library() is not None,
            # Where lots are split says something about the records in them; a secure run can do without.
            "rows_at_once": self.engine.rows_at_once if self.plan.seed is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.state.load_state_dict(state["method"])
        self.filter.load_state_dict(state["filter"])
        self._noise_stds.clear()
        self._noise_stds.extend(state["noise_stds"])
        self.engine.rows_at_once = state.get("rows_at_once")  # another split of a lot has other last bits
        if self.adaptive_clip is not None:
            self.adaptive_clip.clip_norm = float(state["clip_norm"])
        if self.plan.seed is not None and state["kernels"] != (kernels.library() is not None):
            warnings.warn(
                "this run began " + ("with" if state["kernels"] else "without") + " compiled kernels and goes on "
                "otherwise: the last bits of seeded noise will differ from those of a run without a break",
                stacklevel=2,
            )

    def _place(self, lot: Lot) -> int:
        for place, known in enumerate(self._lots):
            if known is lot:
                return place
        raise PrivacyError("this lot was not drawn in this step: every step draws its own")

    def _promised(self) -> tuple[Event, ...]:
        return self.plan.events_at(self.step)


def _same(emitted: tuple[Event, ...], promised: tuple[Event, ...]) -> bool:
    """Equal, but for a rate below the promised one: fewer examples than charged for are no fault."""
    return len(emitted) == len(promised) and all(
        e.sampling_rate <= p.sampling_rate and math.isclose(e.noise_multiplier, p.noise_multiplier, rel_tol=1e-9)
        for e, p in zip(emitted, promised, strict=True)
    )
