"""In a loop of one's own: labels that no loss can take are told by record, where PyTorch would say an index is off.

A mode of PyTorch's functions is on between the loader and the step: for the first lot of data that is in memory, whose
whole column of labels is then looked at; for every lot of data that is read record by record.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fodp.errors import DataError
from fodp.inputs.reasons import IGNORED, out_of_range, outside, reason_of, scored
from fodp.lots.reading import Fetcher
from fodp.lots.records import tensor_columns
from fodp.sources.between import enter_below, is_on, leave
from fodp.support.forms import leaves

_LOSSES = (F.cross_entropy, F.nll_loss)
_MEND = "mend or drop that record"


class LossWatch(TorchFunctionMode):
    """Looks at what a loss is given; `refused(error)` makes the error that is raised."""

    def __init__(
        self, dataset: Any, fetcher: Fetcher, refused: Callable[[DataError], DataError], busy: Callable[[], bool]
    ):
        super().__init__()
        self._busy = busy  # whether the model is being looked at, with other rows than the lot's
        self._columns = tensor_columns(dataset) if fetcher.rows_at_once is not None else None
        self._refused = refused
        self._on = self.is_entered = False
        self.is_done = False  # all labels were looked at
        self._batch: Any = None
        self._indices = torch.zeros(0, dtype=torch.int64)

    def start(self, batch: Any, indices: Tensor) -> None:
        """From here on, for the records of this batch."""
        if not len(indices):
            return
        self._batch, self._indices, self._on, self.is_entered = batch, indices, True, True
        if not is_on(self):
            enter_below(self)

    def stop(self) -> None:
        """Until the next batch."""
        self._on, self._batch = False, None
        self.is_entered = not leave(self)  # it cannot be left from inside of a call that it looks at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and look at its labels if it is a loss of classes."""
        kwargs = kwargs or {}
        if not self._on or func not in _LOSSES or self._busy():
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self._explain(func, args, kwargs)
            raise
        self._look(*args, **kwargs)
        return result

    def _look(self, input: Any, target: Any, *rest: Any, **named: Any) -> None:
        """Whether the whole column that these labels are from could be taken."""
        if self._columns is None or not isinstance(target, Tensor) or target.is_floating_point():
            return
        ignored = named.get("ignore_index", rest[2] if len(rest) > 2 else IGNORED)
        for column, part in zip(self._columns, self._leaves(), strict=False):
            if part is target or (part.shape == target.shape and part.data_ptr() == target.data_ptr()):
                self.is_done = True  # for all lots
                wrong = out_of_range(column, scored(input), ignored).nonzero()
                if len(wrong):
                    self._raise(int(wrong[0]), scored(input))

    def _explain(self, func: Any, args: Any, kwargs: Any) -> None:
        """Say which record a loss has failed for, or why for all of them."""
        reason = reason_of(func, args, kwargs)
        input, target = (*args, kwargs.get("input"), kwargs.get("target"))[:2] if len(args) < 2 else args[:2]
        if reason is None or not isinstance(target, Tensor):
            return
        rows = len(self._indices)
        if reason == outside(scored(input)) and target.dim() and len(target) == rows:
            ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED)
            wrong = out_of_range(target, scored(input), ignored).nonzero()
            self._raise(int(self._indices[int(wrong[0])]), scored(input))
        raise self._refused(DataError(f"the records of the data set have {reason.what}: {reason.remedy}")) from None

    def _raise(self, number: int, classes: int) -> None:
        reason = outside(classes)
        raise self._refused(
            DataError(f"record {number} of the data set has {reason.what}: {reason.fix(_MEND)}")
        ) from None

    def _leaves(self) -> list[Tensor]:
        return [leaf for leaf in leaves(self._batch) if isinstance(leaf, Tensor)]
