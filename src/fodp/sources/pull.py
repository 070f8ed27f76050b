"""The Trainer's source: it reads a lot's records and runs the loss itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp.clipping import self_check
from fodp.clipping.augmentation import Augment, Augmentation
from fodp.clipping.batches import Keyed, Parts, repeat, take
from fodp.clipping.buffers import KeptState
from fodp.clipping.chunks import Chunks
from fodp.clipping.engine import Engine, LossFunction
from fodp.clipping.padding import LOTS_COMPARED, Widths, padded_records, refuse_other_gradient
from fodp.clipping.remembered import Outside
from fodp.draws import Source
from fodp.gradients import Points
from fodp.identity.private_data import PrivateData
from fodp.layout import Layout
from fodp.lots.reading import Fetcher, LotReading
from fodp.noise import Streams
from fodp.options.made_up import made_up
from fodp.options.scaling import Kronecker
from fodp.queries import Factor
from fodp.sampling import Lot, Lots
from fodp.sources.ahead import Ahead, read
from fodp.sources.hooks import Listeners
from fodp.sources.opening import Opening
from fodp.support import checks
from fodp.support.looks import Looks, is_rare


@dataclass(frozen=True, kw_only=True)
class Reading(LotReading):
    """How a Trainer reads the records of a lot and puts them through the model; each field is a keyword of `Trainer`.

    Args, beside those of `fodp.lots.reading.LotReading`:
        owners: for a plan with unit="person", a name for each record that says whose it is (whole numbers or texts; a
            list, an array or a tensor).
        augment: a function of a batch that makes each row anew; it must treat every row by itself.
        copies: how many augmented copies of an example are trained on; their gradients are averaged before clipping.
        engine: "auto", or "loop" for one example at a time.
        public_sample: for the scaling kronecker, a batch of public records as loss_fn takes them, by which layers'
            inputs and back-signals are measured; None makes one up from the shapes and types of the data's tensors.
    """

    owners: Any = None
    augment: Augment | None = None
    copies: int = 1
    engine: str = "auto"
    public_sample: Any = None

    def __post_init__(self) -> None:
        """Raise for values that no lot could be read with, or put through the model."""
        super().__post_init__()
        checks.function("augment", self.augment)
        checks.whole("copies", self.copies)


def pulled(opening: Opening, loss_fn: LossFunction, reading: Reading) -> tuple["Pull", Lots]:
    """The source of a Trainer, and what draws its lots; refuses what does not fit the plan or the other processes."""
    model, dataset, plan = opening.model, opening.dataset, opening.plan
    engine, fetcher = Engine(model, loss_fn, reading.engine), Fetcher(dataset, reading.collate_fn, reading.owners)
    PrivateData(dataset).refuse("public_sample", reading.public_sample)
    augment = reading.augment
    opening.refuse_unfit(
        fetcher,
        reading.owners,
        copies=reading.copies,
        augment=augment is not None,
        engine=reading.engine,
        loss=type(loss_fn).__name__,
    )
    copies, microbatch = reading.copies, reading.microbatch
    lots, ahead = opening.lots(fetcher, reading.owners, copies, reading.num_workers, microbatch, reading.pin_memory)
    source = Pull(
        engine,
        fetcher,
        opening.streams,
        outside=Outside([augment, reading.collate_fn], model, parts=False),
        copies=copies,
        microbatch=microbatch,
        augmentation=None if augment is None else Augmentation(augment, copies),
        summed=plan.person_gradient == "sum",
        ahead=ahead,
        public_sample=reading.public_sample,
    )
    return source, lots


class Pull:
    """Per-example gradients of lots that it reads itself, under a loss that it runs itself.

    A record has `copies` rows, augmented; at most `microbatch` examples are in flight. `summed`: a person's gradient is
    the sum of their records' gradients, else the mean. `ahead` has read lots in worker processes. `outside` is what
    augmentation and `collate_fn` can reach beside the model.
    """

    def __init__(
        self,
        engine: Engine,
        fetcher: Fetcher,
        streams: Streams,
        *,
        outside: Outside,
        copies: int = 1,
        microbatch: int | None = None,
        augmentation: Augmentation | None = None,
        summed: bool = False,
        ahead: Ahead | None = None,
        public_sample: Any = None,
    ):
        self.engine, self.fetcher, self.augmentation, self.copies = engine, fetcher, augmentation, copies
        self._streams, self._microbatch, self._summed, self._ahead = streams, microbatch, summed, ahead
        self._watched = [engine.outside, outside]  # what the loss and the augmentation reach
        self.layout: Layout = engine.layout  # where each trainable parameter lies in the flat vector
        self.listeners = Listeners(engine.model)
        self.public_sample = public_sample
        self._widths = Widths()
        self._collate_looks = Looks(LOTS_COMPARED)  # at what collate_fn makes of records alone
        self.asked: Lot | None = None  # the lot whose gradients were asked for last

    def chunks(self, lot: Lot, at: Points, factors: tuple[Factor, ...] | None, exact: bool) -> Chunks:
        """The lot's examples, in chunks that fit into memory."""
        self.asked = lot
        self.engine.at_step(lot.step)
        if self.fetcher.batched_by is not None and self._collate_looks.due(lot.step, is_rare(lot.step)):
            self._refuse_mixing_collate(lot)
        return Chunks(self.engine, self._batch(lot), at, self.copies, self._microbatch, factors, exact)

    def unchanged(self) -> KeptState:
        """The model's buffers and parameters, and what its loss can reach, as they are before a step."""
        model = self.engine.model
        return KeptState(model, self._watched, tuple(model.parameters()))

    def public_records(self, scaling: Any) -> Callable[[int], Any]:
        """Public records for a step: the user's, or made up from what is public of the data's form."""
        if self.public_sample is not None:
            return lambda _: self.public_sample
        kind = scaling.shape_inputs if isinstance(scaling, Kronecker) else "auto"
        return lambda step: made_up(self.fetcher.forms, self.engine.model, self.engine.loss_fn, kind, step)

    def state_dict(self) -> dict[str, Any]:
        """How many rows are recorded at once: another split of a lot has other last bits."""
        return {"rows_at_once": self.engine.rows_at_once}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state; None: it was left out."""
        self.engine.split_as(None if state is None else state["rows_at_once"])

    def set_augmentation_aside(self) -> None:
        """From now on records are taken as they are: for audits whose records are no data that could be augmented.

        Copies stay: each record still has that many rows, whose gradients are averaged.
        """
        self.augmentation = None

    def refuse_wrong_loss(self) -> None:
        """Raise if the loss function plainly has another form than loss_fn(model, batch) with one loss per example.

        Or if the batches cannot be taken apart, record by record.
        """
        self.fetcher.refuse_what_cannot_be_divided()
        self_check.refuse_wrong_form(self.engine, self.fetcher.fetch(torch.zeros(0, dtype=torch.int64)))

    def close(self) -> None:
        """End the processes that read ahead; another step starts fresh ones."""
        if self._ahead is not None:
            self._ahead.close()

    def _batch(self, lot: Lot) -> Keyed:
        """The lot's records, each with draws of its own; fetched as they are worked on if they are many."""
        source, at_once = Source(self._streams, lot.step, lot.name), self._microbatch
        everyone = torch.arange(len(lot.indices))
        if self.augmentation is None and self.copies == 1 and (most := self.fetcher.rows_at_once) is not None:
            at_once = most if at_once is None else min(at_once, most)
        if at_once is None or len(lot.indices) <= at_once:
            return self._some(lot, source, everyone, is_rare(lot.step))
        rows = self._rows(lot.records)
        parts = Parts(len(rows), at_once * self.copies, lambda part: self._part(lot, source, part))
        return self._keyed(lot, everyone, parts, rows, source)

    def _some(self, lot: Lot, source: Source, places: Tensor, look: bool) -> Keyed:
        """The records at these places of a lot; `look`: whether the augmentation is looked at."""
        records = lot.records[places]
        if self._ahead is None:
            fetched = self.fetcher.fetch(lot.indices[places], source, records)
        else:
            fetched = read(self.fetcher, self._ahead, lot, source, places)
        if self.fetcher.batched_by is not None and len(places) > 1 and self._widths.grow(fetched):
            self._refuse_mixing_collate(lot, places)
        batch = self._keyed(lot, places, repeat(fetched, self.copies), self._rows(records), source)
        return batch if self.augmentation is None else self.augmentation(batch, look)

    def _part(self, lot: Lot, source: Source, part: slice | Tensor) -> Any:
        """Some rows of a lot: their records are fetched, and augmented, without the others."""
        wanted = torch.arange(len(lot.indices) * self.copies)[part]
        places, row_of = torch.unique(wanted // self.copies, return_inverse=True)
        found = self._some(lot, source, places, is_rare(lot.step))
        chosen = row_of * self.copies + wanted % self.copies
        all_rows = len(chosen) == len(found.records) and bool((chosen == torch.arange(len(chosen))).all())
        return found.rows if all_rows else take(found.rows, chosen)

    def _rows(self, records: Tensor) -> Tensor:
        """The numbers that the rows of these records draw under."""
        return records if self.copies == 1 else (records[:, None] * self.copies + torch.arange(self.copies)).flatten()

    def _keyed(self, lot: Lot, places: Tensor, batch: Any, rows: Tensor, source: Source) -> Keyed:
        """The batch of some of the lot's records, with whose they are."""
        owners = None if lot.owners is None else lot.owners[places].repeat_interleave(self.copies)
        return Keyed(batch, rows, source, owners, self._summed)

    def _refuse_mixing_collate(self, lot: Lot, some: Tensor | None = None) -> None:
        """Raise if `collate_fn` makes something else of a record in its lot than alone, and that has an effect.

        `some`: the places in the lot of the records that are collated together.
        """
        some = torch.arange(min(len(lot.indices), self._microbatch or len(lot.indices))) if some is None else some
        if not len(some):
            return
        if len(some) > 1:  # one record alone tells nothing
            self._collate_looks.told(lot.step)
        source, copies = Source(self._streams, lot.step, lot.name), self.copies
        indices, numbers = lot.indices[some], lot.records[some]
        batch = self.fetcher.fetch(indices, source, numbers)
        self._widths.grow(batch)
        padded = padded_records(self.fetcher, indices, numbers, source, batch)
        together = self._some(lot, source, some, False) if padded else None
        for row, _, _ in padded:
            alone = self._some(lot, source, some[row][None], False)
            here = take(together, slice(row * copies, (row + 1) * copies))
            refuse_other_gradient(self.engine, here, alone, copies, self.fetcher.batched_by)
