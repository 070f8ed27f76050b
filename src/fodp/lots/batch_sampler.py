"""Poisson lots for a `DataLoader` of one's own."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    Sampler,
    TensorDataset,
)

from fodp.errors import ConfigurationError, PrivacyError
from fodp.lots.poisson import PoissonSampler
from fodp.lots.records import record_count, tensor_columns
from fodp.sampling import WordStreams
from fodp.support import checks


class PoissonBatchSampler(Sampler[list[int]]):
    """Poisson lots for a `DataLoader` over a map-style data set; use `LotCollate` with it for empty lots.

    Yields exactly `steps` lists of indices, those of steps `start` to `start + steps - 1`, empty ones
    included. It runs once: going over the same lots again and accounting them as fresh ones would break the
    guarantee. `len()` is the number of steps, a public number.

        lots = PoissonBatchSampler(data, rate, steps, streams)
        loader = DataLoader(data, batch_sampler=lots, collate_fn=LotCollate(data))
    """

    def __init__(self, dataset: Any, rate: float, steps: int, streams: WordStreams, start: int = 0) -> None:
        if tensor_columns(dataset) is not None and not isinstance(dataset, TensorDataset):
            raise ConfigurationError("a DataLoader cannot index a tuple of tensors; wrap it: TensorDataset(*tensors)")
        self._sampler = PoissonSampler(record_count(dataset), rate, streams)
        self._steps = range(checks.whole("start", start, minimum=0), start + checks.whole("steps", steps))
        self._used = False

    def __iter__(self) -> Iterator[list[int]]:
        # a generator: a DataLoader with workers asks for two iterators and uses one
        if self._used:
            raise PrivacyError(
                f"the lots of steps {self._steps.start} to {self._steps.stop - 1} were already drawn; "
                f"for more steps make a new PoissonBatchSampler with start={self._steps.stop}"
            )
        self._used = True
        for step in self._steps:
            yield self._sampler.draw(step).indices.tolist()

    def __len__(self) -> int:
        return len(self._steps)
