"""A lot, and the protocol of what draws lots (`fodp.lots.poisson` does).

Nothing but the lot itself shows how many records it has: that number is private.
"""

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class WordStreams(Protocol):
    """What sampling needs of `fodp.noise.Streams`: independent uniform 64-bit words per (step, name)."""

    @property
    def seed(self) -> int | None:
        """What the words can be repeated by; None: nothing."""
        ...

    def words(self, count: int, step: int, name: str) -> npt.NDArray[np.uint64]:
        """`count` independent uniform 64-bit words."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Lot:
    """One Poisson lot. Step, rate and name are public; which and how many records it has is private."""

    step: int
    rate: float
    name: str
    indices: torch.Tensor = dataclasses.field(repr=False)  # int64, increasing
    # What the records are called in draws of their own (`fodp.draws`): their places in the data, unless a replay
    # of the run without one of them says otherwise.
    names: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Where records take turns: those whose turn it was, increasing; None: all.
    among: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Where the unit is a person (`fodp.lots.people`): the number of each record's owner; one's records lie together.
    owners: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Of a lot that several ranks divide (`fodp.ranks`): the places of this rank's records in the whole lot, and how
    # many records that has.
    places: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    drawn: int | None = dataclasses.field(default=None, repr=False)

    @property
    def count(self) -> int:
        """How many have been drawn, on all ranks together: records, or people. Private."""
        if self.drawn is not None:
            return self.drawn
        return len(self.indices if self.owners is None else self.owners.unique_consecutive())

    def own(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of numbers for each record of the whole lot, those of the records here."""
        return numbers if self.places is None else numbers[self.places.to(numbers.device, non_blocking=True)]

    @property
    def records(self) -> torch.Tensor:
        """A number for each record, under which it draws."""
        return self.indices if self.names is None else self.names


class Lots(Protocol):
    """What draws the lots of a run."""

    @property
    def rate(self) -> float:
        """The chance of a record, or of one whose turn it is."""

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step and name, at the usual rate or at one given for this step."""

    def whose_turn(self, step: int) -> torch.Tensor | None:
        """Indices eligible at this step, or None if all are. Secret: for audits only."""

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn."""
