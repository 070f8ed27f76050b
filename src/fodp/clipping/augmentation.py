"""A user's augmentation of a lot: every row is counted, and what it makes of a record depends on that record alone."""

from collections.abc import Callable
from dataclasses import replace

import torch

from fodp import _checks
from fodp._checks import ConfigurationError
from fodp.clipping.batches import Batch, Keyed, batch_size, joined, plain, take, tensors
from fodp.draws import Site, Unkeyable

Augment = Callable[[Batch], Batch]

_FIRST_LOTS = 2  # that are looked at
_COMPARED = 4  # records of a lot that are augmented alone too


class Augmentation:
    """Applies `augment` to a lot in which every record has `copies` rows side by side.

    What it draws is keyed by record (`fodp.draws`). In the first lots, and in some later ones, records are
    augmented alone too; where that gives other rows, it is given one record at a time from then on.
    """

    def __init__(self, augment: Augment, copies: int):
        self.augment, self._copies = augment, copies
        self._site = Site("augment")
        self._agreed = self._looked = 0  # how many lots have shown that records are kept apart, or were looked at

    def __call__(self, batch: Keyed, look: bool) -> Keyed:
        """The augmented lot, its rows in the same order."""
        if batch_size(batch) == 0:
            return self._counted(batch, self.augment(plain(batch)))
        looks = look or self._agreed < _FIRST_LOTS
        if looks and not self._site.alone:
            self._site.look_for_foreign(lambda: self._of_one(batch, 0))
        if look or self._looked < _FIRST_LOTS:
            self._refuse_unsteady(batch)
        if not self._site.alone:
            try:
                augmented = self._apply(_copied(batch) if looks else batch, single=False)
            except Unkeyable as reason:
                self._go_alone(str(reason))
            else:
                if not looks or self._agrees(batch, augmented):
                    return augmented
                if self._agreed:
                    raise ConfigurationError(
                        "augment makes other rows of a record alone than in its lot, which earlier lots did not show; "
                        "what was released from them is not covered by the stated epsilon. Start again with an "
                        "augmentation that treats every row by itself"
                    )
                self._go_alone("a record alone gives other rows than in its lot")
        records = range(batch_size(batch) // self._copies)
        alone = [self._of_one(batch, record) for record in records]
        return replace(batch, rows=joined([plain(rows) for rows in alone]))

    def _refuse_unsteady(self, batch: Keyed) -> None:
        """Raise if it draws for a record from a generator that goes on from record to record."""
        self._looked += 1
        if self._site.quiet:  # a generator object of PyTorch's is seen only by looking for it
            self._site.learn(batch.source, lambda rows: self.augment(plain(take(batch, rows))))
        first, second = (tensors(self._of_one(batch, 0)) for _ in range(2))
        if len(first) != len(second) or not all(map(_same, first, second)):
            raise ConfigurationError(
                "augment made different rows of one record with the same random numbers: it draws from a generator of "
                "its own, or remembers earlier calls, and one record would change what others draw. Draw with "
                "PyTorch's functions (torch.rand, ...), or NumPy's and Python's global ones"
            )

    def _of_one(self, batch: Keyed, record: int) -> Keyed:
        rows = take(batch, slice(record * self._copies, (record + 1) * self._copies))
        return self._apply(_copied(rows), single=True)

    def _apply(self, batch: Keyed, single: bool) -> Keyed:
        augmented = self._site.run(
            lambda current: current.forward(lambda: self.augment(plain(batch))),
            batch.source,
            batch.records,
            lambda rows: self.augment(plain(take(batch, rows))),
            single,
        )
        return self._counted(batch, augmented)

    def _counted(self, batch: Keyed, augmented: Batch) -> Keyed:
        if batch_size(augmented) != batch_size(batch):
            raise ConfigurationError(
                "augment must return as many rows as it was given, each of the record in its place: rows that it adds "
                "would count as further examples. For several views of a record use copies=K, whose K rows lie side "
                "by side and are averaged before clipping"
            )
        return replace(batch, rows=augmented)

    def _agrees(self, batch: Keyed, augmented: Keyed) -> bool:
        """Whether some records, augmented alone, give the rows that they have in the lot."""
        count = batch_size(batch) // self._copies
        for record in torch.linspace(0, count - 1, min(count, _COMPARED)).long().tolist():
            rows = slice(record * self._copies, (record + 1) * self._copies)
            here, alone = tensors(take(augmented, rows)), tensors(self._of_one(batch, record))
            if len(here) != len(alone) or not all(map(_same, here, alone)):
                return False
        self._agreed += 1
        return True

    def _go_alone(self, reason: str) -> None:
        self._site.alone = True
        _checks.warn(
            f"augment is given one record at a time, which is slow: {reason}. It should treat every row by itself, in "
            "the order given, and draw for a whole lot at once (torch.rand(len(rows)), not a loop over rows)"
        )


def _copied(batch: Keyed) -> Keyed:
    """In memory of its own: an augmentation may work in place."""
    copied: Keyed = take(batch, torch.arange(batch_size(batch)))
    return copied


def _same(here: torch.Tensor, alone: torch.Tensor) -> bool:
    if here.shape != alone.shape or here.dtype != alone.dtype:
        return False
    if not here.is_floating_point():
        return torch.equal(here, alone)
    return torch.allclose(here, alone, rtol=1e-4, atol=1e-5, equal_nan=True)
