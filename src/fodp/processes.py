"""The processes of one run: what a session asks of them, and the answer of a single process.

`fodp.ranks` has the answer of several: each owns some of the records, the sums are added up, the first one adds noise.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from fodp.noise import Streams
from fodp.release import Noise
from fodp.sampling import Lots


class Turn(NamedTuple):
    """What processes tell each other before a step."""

    step: int
    signal: int  # by which a process was asked to stop, 0: not at all
    stopped: bool  # a callback has seen enough
    last_step: int
    out_of_budget: bool


class Processes:
    """A run in one process: it owns every record, and there is nobody to wait for."""

    rank, count = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this process adds the noise, keeps the ledger, calls callbacks and writes files."""
        return self.rank == 0

    def shared(self, own: Streams) -> Streams:
        """Where lots and records draw from, the same in all processes; noise has the first one's own."""
        return own

    def compare(self, facts: Callable[[bytes], Mapping[str, bytes]]) -> None:
        """Refuse processes that do not agree in all of the facts, given a secret to hash them with."""

    def lots(self, lots: Lots) -> Lots:
        """What draws the lots, each reduced to the records that this process owns."""
        return lots

    def noise(self, noise: Noise) -> Noise:
        """The noise that is added once, by the first process, for all."""
        return noise

    def total(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts on the first one; the others get zeros. Works in place."""
        return part

    def from_first(self, make: Callable[[], Tensor], room: Callable[[], Tensor]) -> Tensor:
        """What the first process makes, in every process; the others give room for it."""
        return make()

    def number(self, make: Callable[[], float]) -> float:
        """A number that the first process computes."""
        return make()

    def text(self, make: Callable[[], str]) -> str:
        """A text that the first process makes; it ends what they do together."""
        return make()

    def turn(self, said: Turn) -> Turn:
        """What all processes do next, from what each of them wants."""
        return said

    def refuse_drift(self, parameters: Callable[[], Tensor]) -> None:
        """Raise if a process's weights are no longer those of the first."""

    def give_up(self) -> None:
        """Tell the others that this process has failed; nothing more can be done together."""

    def together(self) -> AbstractContextManager[None]:
        """While in here, an exception in one process ends all of them."""
        return nullcontext()


ALONE = Processes()
