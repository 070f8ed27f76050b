"""A user's augmentation of a lot: every row is counted, and what it makes of a record depends on that record alone."""

from collections.abc import Callable
from dataclasses import replace

import torch

from fodp.clipping.batches import Batch, Keyed, batch_size, joined, plain, take, tensors
from fodp.draws import Site, Unkeyable
from fodp.errors import ConfigurationError
from fodp.support import checks
from fodp.support.looks import Looks

Augment = Callable[[Batch], Batch]

_COMPARED = 4  # records of a lot that are augmented alone too
_ROUNDING = 8  # units in the last place of the largest number, between two runs of the same code on the same rows


class Augmentation:
    """Applies `augment` to a lot in which every record has `copies` rows side by side.

    What it draws is keyed by record (`fodp.draws`). In the first two steps, and in rare later ones, records are
    augmented alone too, and one of them before and after others: where a record alone gives other rows, it is given one
    record at a time from then on; where it gives other rows later, it remembers, and is refused.
    """

    def __init__(self, augment: Augment, copies: int):
        self.augment, self._copies = augment, copies
        self._site = Site("augment")
        self.looks = Looks()

    def __call__(self, batch: Keyed, look: bool) -> Keyed:
        """The augmented lot, its rows in the same order."""
        if batch_size(batch) == 0:
            return self._counted(batch, self.augment(plain(batch)))
        step = batch.source.step
        looks = self.looks.due(step, look)
        if looks and not self._site.alone:
            self._site.look_for_foreign(lambda: self._of_one(batch, 0))
        if looks:
            self._refuse_unsteady(batch)
            if batch_size(batch) > self._copies:  # one record alone tells little
                self.looks.told(step)
        if not self._site.alone:
            try:
                augmented = self._apply(_copied(batch) if looks else batch, single=False)
            except Unkeyable as reason:
                self._go_alone(str(reason))
            else:
                if not looks or self._agrees(batch, augmented):
                    return augmented
                if any(known != step for known in self.looks.steps):
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
        """Raise if it draws for a record from a generator that goes on from record to record, or remembers records."""
        if self._site.quiet:  # a generator object of PyTorch's is seen only by looking for it
            self._site.learn(batch.source, lambda rows: self.augment(plain(take(batch, rows))))
        count = batch_size(batch) // self._copies
        seen = [tensors(self._of_one(batch, record)) for record in (0, *range(min(count, _COMPARED)), 0)]
        for later in (seen[1], seen[-1]):
            if len(seen[0]) != len(later) or not all(map(_steady, seen[0], later)):
                raise ConfigurationError(
                    "augment made different rows of one record with the same random numbers: it draws from a generator "
                    "of its own, or remembers earlier calls, and one record would change what others draw. Draw with "
                    "PyTorch's functions (torch.rand, ...), or NumPy's and Python's global ones, and keep nothing"
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
        return True

    def _go_alone(self, reason: str) -> None:
        self._site.take_alone()
        checks.warn(
            f"augment is given one record at a time, which is slow: {reason}. It should treat every row by itself, in "
            "the order given, and draw for a whole lot at once (torch.rand(len(rows)), not a loop over rows)"
        )


def _copied(batch: Keyed) -> Keyed:
    """In memory of its own: an augmentation may work in place."""
    copied: Keyed = take(batch, torch.arange(batch_size(batch)))
    return copied


def _steady(first: torch.Tensor, later: torch.Tensor) -> bool:
    """Equal but for rounding: the same code has run on the same rows."""
    if torch.equal(first, later) or not first.is_floating_point() or first.shape != later.shape:
        return torch.equal(first, later)
    allowed = _ROUNDING * torch.finfo(first.dtype).eps * float(first.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(first, later, rtol=0, atol=allowed, equal_nan=True)


def _same(here: torch.Tensor, alone: torch.Tensor) -> bool:
    if here.shape != alone.shape or here.dtype != alone.dtype:
        return False
    if not here.is_floating_point():
        return torch.equal(here, alone)
    return torch.allclose(here, alone, rtol=1e-4, atol=1e-5, equal_nan=True)
