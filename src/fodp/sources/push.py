"""The source of a loop of one's own: the loader hands out its lots, the owner's passes fill it."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fodp.clipping.buffers import KeptState
from fodp.clipping.chunks import Chunks
from fodp.clipping.engine import Engine
from fodp.clipping.padding import LOTS_COMPARED, Widths
from fodp.draws import Source
from fodp.errors import ConfigurationError, DataError
from fodp.gradients import HERE, Chunk, ClipRule, Gradients, Points
from fodp.inputs.bad_records import explain_reading
from fodp.lots.reading import Fetcher, LotReading
from fodp.noise import Streams
from fodp.queries import Factor
from fodp.sampling import Lot, Lots
from fodp.sources.ahead import Ahead, read
from fodp.sources.examiner import TRAINER
from fodp.sources.loss_watch import LossWatch
from fodp.sources.opening import Opening
from fodp.sources.padding import compare_alone
from fodp.sources.parts import GatheredChunk, LotParts
from fodp.sources.recorder import Recorder
from fodp.support.looks import Looks


class HeldLots:
    """The lots of a loop that draws when its loader is asked: a method's step gets the one in the owner's hands."""

    def __init__(self, lots: Lots, method: str):
        self._lots, self._method = lots, method
        self.held: Lot | None = None

    @property
    def rate(self) -> float:
        """The chance of a record, or of one whose turn it is."""
        return self._lots.rate

    def take(self, step: int, rate: float) -> Lot:
        """Draw the lot of the next step, and hold it until `let_go`."""
        self.held = self._lots.draw(step, "mask", rate)
        return self.held

    def let_go(self) -> None:
        """The lot is over."""
        self.held = None

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot in the owner's hands."""
        if self.held is None or name != "mask":
            raise ConfigurationError(f"{self._method} draws more than one lot in a step: {TRAINER}")
        if self.held.rate != (self.rate if rate is None else rate):
            raise ConfigurationError(f"{self._method} draws at another rate than it promised: {TRAINER}")
        return self.held

    def whose_turn(self, step: int) -> Tensor | None:
        """The records that this step may draw."""
        return self._lots.whose_turn(step)

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn."""
        return self._lots.next_round(step)


def pushed(
    opening: Opening,
    recorder: Recorder,
    reading: LotReading,
    refused: Callable[[DataError], DataError],
    abandon: Callable[[], None],
) -> tuple["Push", HeldLots]:
    """The source of a loop of one's own, and what holds its lots; refuses what does not fit the other processes.

    The loop is made later: `refused` asks it when data does not fit, `abandon` tells it that a lot breaks off.
    """
    dataset, microbatch, fetcher = opening.dataset, reading.microbatch, Fetcher(opening.dataset, reading.collate_fn)
    opening.refuse_unfit(fetcher, None, loss=type(recorder.engine.loss_fn).__name__)
    lots, ahead = opening.lots(fetcher, None, 1, reading.num_workers, microbatch, reading.pin_memory)
    source = Push(
        recorder,
        fetcher,
        opening.streams,
        dataset,
        microbatch=microbatch,
        ahead=ahead,
        refused=refused,
        abandon=abandon,
    )
    return source, HeldLots(lots, opening.plan.method)


class Push:
    """Per-example gradients that hooks have recorded in the owner's own passes over a lot, or over its parts."""

    def __init__(
        self,
        recorder: Recorder,
        fetcher: Fetcher,
        streams: Streams,
        dataset: Any,
        *,
        microbatch: int | None = None,
        ahead: Ahead | None = None,
        refused: Callable[[DataError], DataError],
        abandon: Callable[[], None],
    ):
        self.recorder, self._fetcher, self._streams, self._ahead = recorder, fetcher, streams, ahead
        self._microbatch, self._abandon = microbatch, abandon  # what ends a lot that broke off
        self._gathered: GatheredChunk | None = None
        self._parts: LotParts | None = None
        self.engine, self.layout = recorder.engine, recorder.engine.layout
        self._kept: KeptState | None = None  # the model's buffers and versions, as they were when the lot was drawn
        self._widths, self._collate_looks = Widths(), Looks(LOTS_COMPARED)
        self._labels = LossWatch(dataset, fetcher, refused, lambda: recorder.engine.is_looking)

    def chunks(self, lot: Lot, at: Points, factors: tuple[Factor, ...] | None, exact: bool) -> Iterable[Chunk]:
        """What the owner's passes have recorded of the lot."""
        if at is not HERE:
            raise ConfigurationError(f"this method wants gradients at other points than the model's: {TRAINER}")
        current = self.recorder.current
        if self._gathered is not None and (current is None or lot is not current.lot):
            return [self._gathered]
        assert current is not None
        return Chunks(cast(Engine, current.caught), (lot.indices,), factors=factors, exact=exact)

    def keep(self) -> None:
        """A lot is about to be handed out: from here to the end of its step the model may write into nothing."""
        self._kept = KeptState(self.engine.model, (), tuple(self.engine.model.parameters()))

    def unchanged(self) -> KeptState:
        """The model's buffers as they were when the lot was handed out."""
        if self._kept is None:
            self.keep()
        assert self._kept is not None
        return self._kept

    def public_records(self, scaling: Any) -> None:
        """None: there is no loss here that could be shown public records."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: how lots are split is the owner's choice."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing was kept."""

    def refuse_wrong_loss(self) -> None:
        """The loss is the owner's, and is looked at when it is computed."""

    def hand_out(
        self, lot: Lot, rule: ClipRule, bound: float, exact: bool, gradients: Callable[[Lot], Gradients]
    ) -> Any:
        """The batch of a lot; or its parts, each of which is clipped by the rule and summed when its pass is over."""
        if self._microbatch is None:
            return self._hand_out(lot, lot, torch.arange(len(lot.indices)))
        dtype = torch.float64 if exact else self.layout.dtype
        gathered = self._gathered = GatheredChunk(rule, bound, self.layout, dtype)

        def take_in(part: Lot) -> None:
            with self.recorder.unheard():
                try:
                    gathered.add(gradients(part))
                except BaseException:  # perhaps half of it is in the sum, and it must not get there twice
                    self._abandon()
                    raise
                self.recorder.end()

        self._parts = LotParts(
            lot, self._microbatch, lambda part, places: self._hand_out(lot, part, places), self._refuse_part, take_in
        )
        return self._parts

    def finish(self) -> None:
        """Raise unless the owner's passes over the lot are complete and understood."""
        self.stop_listening()  # the owner's loss is over; what follows is no business of it
        if self._parts is None:
            self.recorder.refuse_incomplete()
        else:
            self._parts.finish()

    def let_go(self) -> None:
        """The lot is over."""
        if self._parts is not None:
            self._parts.end()
        self._gathered = self._parts = self._kept = None
        self.stop_listening()
        self.recorder.end()

    def stop_listening(self) -> None:
        """The loop is broken off, or goes on later."""
        if self._labels.is_entered:
            self._labels.stop()

    def abandon(self) -> None:
        """Nobody has the loader any more: end what listens in the whole process."""
        self.stop_listening()
        self.recorder.abandon()

    def close(self) -> None:
        """The run is over: end what listens, and the processes that read ahead."""
        self.recorder.between.close()
        if self._ahead is not None:
            self._ahead.close()

    def _refuse_part(self) -> None:
        with self.recorder.unheard():
            self.recorder.refuse_incomplete()

    def _hand_out(self, lot: Lot, part: Lot, places: Tensor) -> Any:
        """The batch of a part of the lot, or of all of it; from here on the model is listened to."""
        try:
            source = Source(self._streams, lot.step, lot.name)
            self.engine.at_step(lot.step)
            if self._ahead is None:
                batch = self._fetcher.fetch(part.indices, source, part.records)
            else:
                batch = read(self._fetcher, self._ahead, lot, source, places)
            collates, several = self._fetcher.batched_by is not None, len(part.indices) > 1
            looks = collates and self._collate_looks.due(lot.step, self.engine.looks.again)
            looks = looks or (collates and several and self._widths.grow(batch))
            if looks and several:  # one record alone tells nothing
                self._collate_looks.told(lot.step)
            padded = compare_alone(self._fetcher, part, source, batch) if looks else None
            self.recorder.start(part, source, padded, batch)
        except BaseException as error:
            self._abandon()
            found = explain_reading(self._fetcher, part.indices.tolist(), error)
            if found is not None:
                raise found from found.__cause__
            raise
        if not self._labels.is_done:
            self._labels.start(batch, part.indices)
        return batch
