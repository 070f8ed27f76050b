"""What a method may ask for in a step: the object that is made for every step, and is gone with it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fodp.accounting import Event, joint
from fodp.errors import PrivacyError
from fodp.gradients import HERE, Gradients, Points
from fodp.queries import Query
from fodp.sampling import Lot

if TYPE_CHECKING:
    from fodp.session import Session


class PublicNumbers(Protocol):
    """What a method may know of a plan before any data is touched; `fodp.Plan` is one."""

    @property
    def sampling_rate(self) -> float:
        """The probability q that an example takes part in a step."""

    @property
    def steps(self) -> int:
        """How many steps the plan has."""

    @property
    def lot_size(self) -> float:
        """The public number L by which sums are divided."""

    @property
    def clip_norm(self) -> float:
        """C, the most one example's gradient may weigh, where it is not adapted."""

    @property
    def noise_multiplier(self) -> float:
        """The method's one noise number, which calibration moves."""


class Known(Protocol):
    """What is known of a session between two steps, for `Method.tune` and `Method.accepts`: public, or made of
    releases."""

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets."""

    def noise_share(self, parameter: Tensor) -> float:
        """What share of that variance the noise of a parameter has: a scaling differs from one to another."""

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream, the same in every process of a run."""

    def public_score(self) -> float:
        """The loss on data declared public."""


class Step:
    """One step of a plan: its lots and what they have spent, its clip norm C and its place in the public schedules.

    A method's `step(step, state)` draws a lot, asks for its gradients, and releases what it has made of them. A release
    that would spend more than the plan promised for this step is refused before its noise is drawn.

    Example, DP-SGD:
        lot = step.draw()
        query = step.gradients(lot).clipped_sum(step.clip_norm)
        return step.release(query, std=step.plan.noise_multiplier * step.clip_norm)
    """

    def __init__(self, session: "Session", number: int):
        self._session, self.number = session, number
        plan = session.plan
        schedules = plan.options.schedules
        self.plan: PublicNumbers = plan if schedules is None else schedules.at(plan, number)
        adapted = session.states.get("clip")
        self.clip_norm: float = self.plan.clip_norm if adapted is None else adapted.clip_norm
        self.promised: tuple[Event, ...] = plan.events_at(number)
        self.lots: list[Lot] = []
        self.spent: list[float | None] = []  # the joint noise multiplier of each lot so far
        self.noise_std = 0.0  # of the last release
        self._releases: dict[int, int] = {}  # how many each lot has made
        self.count: float | None = None  # released, with a quantile: it will move the clip norm

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """A fresh Poisson lot of the declared rate; `name` keeps the lots of one step apart.

        Where records take turns, it is drawn from those whose turn it is, at so many times the declared rate.
        """
        if name and not name.isalnum():
            raise PrivacyError(f"the name of a lot is letters and digits, got {name!r}")
        stream = f"mask{name}"
        if self.lots and any(lot.name == stream for lot in self.lots):
            raise PrivacyError(f"this step has drawn a lot {name!r} already: give the second one another name")
        lot = self._session.lots.draw(self.number, stream, rate)
        self.lots.append(lot)
        self.spent.append(None)
        return lot

    def gradients(self, lot: Lot, at: Points = HERE) -> Gradients:
        """The lot's per-example gradients at the model's parameters, or at points given by releases."""
        self._place(lot)
        return self._session.gradients(self.number, lot, at)

    def adapt_clip(self, gradients: Gradients, query: Query, std: float) -> float:
        """With a quantile: release how many of the gradients are within C, and return the noise the query then needs.

        The count and the query share what the query alone would have cost with `std`: so it gets a little more noise,
        and the pair is the event that the plan promised. After the step the count moves C. Without a quantile nothing
        is released and `std` comes back as it is.
        """
        clip = self._session.states.get("clip")
        if clip is None:
            return std
        place = self._place(gradients.lot)
        if query.lot is not gradients.lot:
            raise PrivacyError("this query was not computed from the lot of the gradients that are counted")
        if self.count is not None:
            raise PrivacyError(f"step {self.number} has released its count already: call adapt_clip once in a step")
        multiplier = query.noise_multiplier(std)
        rest = clip.rest(multiplier)
        clip_norm = clip.clip_norm
        count = gradients.count(lambda norms: norms <= clip_norm)
        self._charge(place, count.noise_multiplier(clip.count_noise))
        self.count = float(self.noised(count, clip.count_noise, "count"))  # on an accelerator the one wait of a step
        return std * rest / multiplier

    def release(self, query: Query, std: float) -> Tensor:
        """query + N(0, std²): charged to its lot, jointly with what that lot has released before.

        A query that was scaled before it was clipped is scaled back once it has its noise.
        """
        place, session = self._place(query.lot), self._session
        self._charge(place, query.noise_multiplier(std))
        earlier = self._releases.get(place, 0)
        self._releases[place] = earlier + 1
        name = self.lots[place].name.replace("mask", "noise", 1) + (f".{earlier}" if earlier else "")
        released = self.noised(query, std, name)
        self.noise_std = std * session.noise.scale()
        return session.heard(query, released, std, self.noise_std)

    def noised(self, query: Query, std: float, name: str) -> Tensor:
        """The query with its noise, the same on all processes; audits put their own in its place."""
        session = self._session
        released = session.noise.add(query, std, self.number, name)
        if session.witness is not None:
            session.witness.see(released)  # of a seeded run
        return released

    @property
    def shapes(self) -> Sequence[torch.Size]:
        """The shapes of the model's trainable parameters, in their order in a flat vector."""
        return tuple(parameter.shape for parameter in self._session.source.layout.parameters)

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector: public, made of releases."""
        return self._session.parameters()

    def norm(self, vector: Tensor) -> Tensor:
        """The ℓ2 norm of a release or a vector like it."""
        return vector.norm()

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream, the same in every process of a run.

        One for each record of a lot: `lot.own(step.uniform(lot.count, name))`, which are those of the records here.
        """
        return self._session.uniform(count, name)

    def unclipped_fraction(self) -> float | None:
        """The released noisy share of examples within the clip norm in this step; None without a quantile."""
        clip = self._session.states.get("clip")
        return None if clip is None or self.count is None else clip.fraction_of(self.count)

    def close(self) -> None:
        """Raise unless the step has emitted what the plan promised for it; then a released count moves C."""
        emitted = []
        for lot, spent in zip(self.lots, self.spent, strict=True):
            if spent:
                emitted.append((lot.rate, spent))
        if not _same(emitted, self.promised):
            events = tuple(Event(*event) for event in emitted)
            raise PrivacyError(f"step {self.number} emitted {events}, its plan promised {self.promised}")
        if self.count is None and "clip" in self._session.states:
            raise PrivacyError(
                f"a quantile is set, and the step of {self._session.plan.method} does not adapt the clip norm: leave "
                "quantile out, or write std = step.adapt_clip(gradients, query, std) before its last release"
            )

    def _place(self, lot: object) -> int:
        for place, known in enumerate(self.lots):
            if known is lot:
                return place
        raise PrivacyError("this lot was not drawn in this step: every step draws its own")

    def _charge(self, place: int, multiplier: float) -> None:
        if multiplier == math.inf:  # no example can change this query, so it costs nothing
            return
        before = self.spent[place]
        spent = multiplier if before is None else joint(before, multiplier)
        promised, rate = self.promised, self.lots[place].rate
        if (
            place >= len(promised)
            or spent < promised[place].noise_multiplier * (1 - 1e-9)
            or rate > promised[place].sampling_rate * (1 + 1e-9)
        ):
            raise PrivacyError(
                f"step {self.number} would spend {spent:g} at rate {rate:g} on lot {place}, promised was {promised}"
            )
        self.spent[place] = spent


def _same(emitted: Sequence[tuple[float, float]], promised: tuple[Event, ...]) -> bool:
    """Equal, but for a rate below the promised one: fewer examples than charged for are no fault."""
    if len(emitted) != len(promised):
        return False
    for (rate, multiplier), event in zip(emitted, promised, strict=True):
        if rate > event.sampling_rate or not math.isclose(multiplier, event.noise_multiplier, rel_tol=1e-9):
            return False
    return True
