"""Lots that are read ahead by worker processes, in the order of their steps.

Masks of coming steps are drawn earlier than they are needed and are otherwise what they would have been: a lot that is
never stepped is never released. A worker reads and collates a lot with its records' own draws, so a batch does not
depend on which process made it. Workers end with the fit, with the loader, and with the process.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fodp.draws import Source
from fodp.draws.source import DerivedKeys
from fodp.errors import ConfigurationError
from fodp.lots.reading import Fetcher
from fodp.sampling import Lot, Lots
from fodp.support.forms import mapped

Key = tuple[int, int, int]  # a step, and from where to where in its lot


@dataclass(frozen=True)
class _Task:
    """What a worker is to read."""

    key: Key
    indices: Tensor
    records: Tensor
    source: Source


class _Read:
    """A batch on its way from a worker; a DataLoader pins what can pin itself."""

    def __init__(self, key: Key, batch: Any):
        self.key, self.batch = key, batch

    def pin_memory(self, device: Any = None) -> "_Read":
        """The same in memory that an accelerator can copy from while the processor goes on."""
        return _Read(self.key, mapped(self.batch, lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf))


class _Reader(Dataset[_Read]):
    """The data set as a DataLoader's workers see it: a task is an index."""

    def __init__(self, fetcher: Fetcher):
        self._fetcher = fetcher

    def __getitem__(self, task: _Task) -> _Read:
        return _Read(task.key, self._fetcher.fetch(task.indices, task.source, task.records))


class _Tasks(Sampler[_Task]):
    def __init__(self, tasks: Callable[[], Iterator[_Task]]):
        self._tasks = tasks

    def __iter__(self) -> Iterator[_Task]:
        return self._tasks()


class Ahead:
    """The lots of a run and their batches, read by `workers` processes before they are asked for.

    It draws the one lot of each step from `lots` before it is asked for (`rate_of(step)` is the promised rate), and
    otherwise hands the question on. `at_once` is how many records a batch has at most, None for the whole lot.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        lots: Lots,
        streams: DerivedKeys,
        rate_of: Callable[[int], float],
        steps: int,
        *,
        workers: int,
        at_once: int | None,
        pin_memory: bool,
    ):
        self._reader, self._workers, self._steps = _Reader(fetcher), workers, steps
        self._drawn_from, self._streams, self._rate_of, self._at_once = lots, streams, rate_of, at_once
        self._pin = pin_memory and torch.accelerator.is_available()
        self._lots: dict[int, Lot] = {}
        self._reading: Iterator[_Read] | None = None
        self._last: Key = (-1, 0, 0)  # what was handed out last

    @property
    def rate(self) -> float:
        """The chance of a record, or of one whose turn it is."""
        return self._drawn_from.rate

    def whose_turn(self, step: int) -> Tensor | None:
        """The records that this step may draw."""
        return self._drawn_from.whose_turn(step)

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn."""
        return self._drawn_from.next_round(step)

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step, which may have been drawn already."""
        if name != "mask":
            return self._drawn_from.draw(step, name, rate)
        rate = self.rate if rate is None else rate
        self._lots = {known: lot for known, lot in self._lots.items() if known >= step}
        lot = self._known(step)
        if lot.rate != rate:
            raise ConfigurationError(
                f"num_workers reads lots ahead at the promised rate {lot.rate:g}, and this method draws at {rate:g}: "
                "leave num_workers out"
            )
        return lot

    def batch(self, lot: Lot, start: int, stop: int) -> Any | None:
        """The records from `start` to `stop` of a lot, as a worker has read them; None where none was told to."""
        key = lot.step, start, stop
        if self._lots.get(lot.step) is not lot or key <= self._last or key not in self._keys(lot):
            return None
        try:
            if self._reading is None:
                self._reading = iter(self._loader(lot.step))
            for read in self._reading:
                if read.key == key:
                    self._last = key
                    return read.batch
        except BaseException:
            self.close()  # a worker has died, or the data set has raised: fresh ones read on
            raise
        return None

    def close(self) -> None:
        """End the workers. Lots that were drawn stay drawn, and fresh workers read them when they are asked for."""
        # A DataLoader ends its workers when nobody holds its iterator; the traceback of an exception may.
        end, self._reading = getattr(self._reading, "_shutdown_workers", None), None
        if end is not None:
            end()

    def _known(self, step: int) -> Lot:
        if step not in self._lots:
            self._lots[step] = self._drawn_from.draw(step, "mask", self._rate_of(step))
        return self._lots[step]

    def _keys(self, lot: Lot) -> list[Key]:
        count = len(lot.indices)
        size = max(1, count if self._at_once is None else self._at_once)
        return [(lot.step, start, min(start + size, count)) for start in range(0, max(1, count), size)]

    def _loader(self, step: int) -> DataLoader[_Read]:
        def tasks() -> Iterator[_Task]:
            for coming in range(step, self._steps):
                lot = self._known(coming)
                for key in self._keys(lot):
                    places = slice(*key[1:])
                    source = Source(self._streams, lot.step, lot.name)
                    yield _Task(key, lot.indices[places], lot.records[places], source)

        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=_Tasks(tasks),
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            worker_init_fn=_heed_no_keyboard,
            generator=torch.Generator(),  # for the workers' seeds, which would be taken from everybody's generator
        )


def read(fetcher: Fetcher, ahead: Ahead | None, lot: Lot, source: Source, places: Tensor) -> Any:
    """The batch of the records at these places of a lot, from a worker if one has read it."""
    if ahead is not None:
        start = int(places[0]) if len(places) else 0
        side_by_side = not len(places) or int(places[-1]) - start + 1 == len(places)
        batch = ahead.batch(lot, start, start + len(places)) if side_by_side else None
        if batch is not None:
            return batch
    return fetcher.fetch(lot.indices[places], source, lot.records[places])


def _as_it_is(read: Any) -> Any:
    return read


def _heed_no_keyboard(_: int) -> None:
    """Ctrl-C is for the run, which ends after its step: its workers read on until then."""
    for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
        signal.signal(number, signal.SIG_IGN)
