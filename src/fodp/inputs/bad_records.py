"""Which record an exception is about. Records are tried alone once something has failed; what they hold is never said.

An exception that does not come again, of a network drive for one, is left as it is; so is one that every record
raises and that no reason is known for, since then the code is at fault.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from fodp.clipping.batches import repeat
from fodp.draws import generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.errors import DataError, PrivacyError
from fodp.inputs.reasons import Reason, reason_of
from fodp.lots.reading import Fetcher
from fodp.lots.records import tensor_columns

if TYPE_CHECKING:
    from fodp.sources.pull import Pull

_TRIED_ALONE = 8  # records that are asked whether they fail too
_MEND = "mend or drop that record"
_NONE = Reason("None where a value is expected")
_NOTHING = "Nothing was released or charged"
Trial = Callable[[list[int]], None]  # of records with these numbers; raises what they raise


class BadRecord(DataError):
    """A record that a step could not be made with: that step is lost, and another `fit()` goes on with the next one."""


class _Stage(Exception):
    """What failed, and why as far as known; its cause is the exception itself."""

    def __init__(self, what: str, reason: Reason | None):
        super().__init__(what)
        self.what, self.reason = what, reason


class LastFailure(TorchFunctionMode):
    """Remembers the function of PyTorch's that raised last, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.call = func, args, kwargs or {}
            raise

    @property
    def reason(self) -> Reason | None:
        """Why it raised, if that is known."""
        return None if self.call is None else reason_of(*self.call)


def explain_step(source: "Pull", step: int, error: BaseException) -> DataError | None:
    """What to raise instead of an exception of a step; None where it is about no record."""
    lot = source.asked
    return None if lot is None or lot.step != step else explain(source, lot.indices.tolist(), error)


def explain(source: "Pull", numbers: Sequence[int], error: BaseException) -> DataError | None:
    """The same of an exception that some records raise when data, augmentation, model and loss are run on them."""
    return explained(_trial_of(source), _with_first(source.fetcher, numbers), error, fetcher=source.fetcher)


def explain_reading(fetcher: Fetcher, numbers: Sequence[int], error: BaseException) -> DataError | None:
    """The same of an exception that was raised when records were read and made a batch."""

    def trial(some: list[int]) -> None:
        _kept(lambda: _batch(fetcher, some))

    return explained(trial, _with_first(fetcher, numbers), error, fetcher=fetcher)


def explain_rows(
    forwards: Callable[[list[int]], Any], numbers: Sequence[int], error: BaseException
) -> DataError | None:
    """The same of an exception of a model that was given rows of a lot; `numbers` are those of their records."""
    places = {number: place for place, number in enumerate(numbers)}

    def trial(some: list[int]) -> None:
        with _staged("makes the model raise"):
            forwards([places[number] for number in some])

    return explained(trial, numbers, error)


def explained(
    trial: Trial, numbers: Sequence[int], error: BaseException, fetcher: Fetcher | None = None
) -> DataError | None:
    """What to say of an exception: which record raises it alone, or what all of them have that does not fit."""
    if isinstance(error, DataError) and fetcher is not None:
        return _missing(fetcher, numbers)  # of a collate function that leaves it out
    if isinstance(error, PrivacyError | MemoryError | torch.OutOfMemoryError) or not isinstance(error, Exception):
        return None
    some = sorted(set(numbers))
    if not some or _failure(trial, some) is None:
        return None  # it does not come again
    guilty = _narrowed(trial, some)
    if guilty is None:
        return None if fetcher is None else _unlike(fetcher, some)
    failure = _failure(trial, [guilty])
    if failure is None:
        return None
    spread = [] if fetcher is None else [0, fetcher.size // 2, fetcher.size - 1]
    others = [number for number in dict.fromkeys([some[-1], some[0], *spread, *some]) if number != guilty]
    is_alone = any(_failure(trial, [number]) is None for number in others[:_TRIED_ALONE])
    reason = failure.reason
    if reason is None and fetcher is not None and _missing(fetcher, [guilty]) is not None:
        reason = _NONE
    if is_alone:
        what = failure.what if reason is None else f"has {reason.what}"
        found = BadRecord(f"record {guilty} of the data set {what}: {_MEND if reason is None else reason.fix(_MEND)}")
    elif reason is not None:
        found = BadRecord(f"the records of the data set have {reason.what}: {reason.remedy}")
    else:
        return None
    # PyTorch's own words may hold values; an exception of the user's own code is shown as its cause.
    found.__cause__, found.__suppress_context__ = (failure.__cause__ if reason is None else None), True
    return found


def _with_first(fetcher: Fetcher, numbers: Sequence[int]) -> list[int]:
    """The form of batches is learned of the first record, where data is no tensors: it may be the one that fails."""
    return [*numbers] if fetcher.rows_at_once is not None else [*numbers, 0]


def _trial_of(source: "Pull") -> Trial:
    def trial(numbers: list[int]) -> None:
        kept = source.unchanged()
        try:
            _kept(lambda: forwards(numbers))
        finally:
            kept.restore()

    def forwards(numbers: list[int]) -> None:
        batch = repeat(_batch(source.fetcher, numbers), source.copies)
        with _staged("makes augment raise"):
            batch = batch if source.augmentation is None else source.augmentation.augment(batch)
        with _staged("makes the model or the loss raise"), torch.no_grad():
            source.engine.loss_fn(source.engine.model, batch)

    return trial


def _kept(work: Callable[[], Any]) -> None:
    """Nobody's random numbers are moved by a trial."""
    foreign = foreign_state()
    try:
        with generators_kept():
            work()
    finally:
        restore_foreign(foreign)


class _staged:
    """Raises `_Stage` for whatever is raised inside."""

    def __init__(self, what: str):
        self._what, self._last = what, LastFailure()

    def __enter__(self) -> None:
        self._last.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._last.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, Exception) and not isinstance(error, _Stage):
            raise _Stage(f"{self._what} {type(error).__name__}", self._last.reason) from error


def _batch(fetcher: Fetcher, numbers: list[int]) -> Any:
    """The batch of some records, without learning anything of others."""
    if fetcher.rows_at_once is not None:
        return fetcher.fetch(torch.tensor(numbers))
    with _staged("cannot be read: the data set raised"):
        records = fetcher.records_of(numbers)
    try:
        return fetcher.made_batch(records)
    except Exception as error:
        raise _Stage(f"cannot be made a batch: collating raised {type(error).__name__}", None) from error


def _failure(trial: Trial, numbers: list[int]) -> _Stage | None:
    try:
        trial(numbers)
    except _Stage as stage:
        return stage
    return None


def _narrowed(trial: Trial, numbers: list[int]) -> int | None:
    """One that fails alone, by halves; None where they only fail together."""
    while len(numbers) > 1:
        middle = len(numbers) // 2
        halves = [half for half in (numbers[:middle], numbers[middle:]) if _failure(trial, half) is not None]
        if not halves:
            return None
        numbers = halves[0]
    return numbers[0]


def _missing(fetcher: Fetcher, numbers: Sequence[int]) -> DataError | None:
    """Of the first of these records that has None somewhere."""
    if fetcher.rows_at_once is None:
        with suppress(Exception):
            for number in numbers:
                if _has_none(fetcher.records_of([number])[0]):
                    return BadRecord(f"record {number} of the data set has {_NONE.what}: {_MEND}")
    return None


def _unlike(fetcher: Fetcher, numbers: list[int]) -> DataError | None:
    """Of records that can be read and not be put together: the first one of another form than most have."""
    with suppress(Exception):
        forms = {n: _form(fetcher.records_of([n])[0]) for n in numbers}
        usual = max(forms.values(), key=list(forms.values()).count)
        for number, form in forms.items():
            if form != usual:
                return unlike(number)
    return None


def unlike(number: int) -> DataError:
    """Of a record that is not like others."""
    return BadRecord(
        f"record {number} of the data set has another form than others (another shape, other parts, or None), and "
        f"records become one batch: {_MEND}, pad or crop all to one public size, or give a collate_fn that does"
    )


def refuse_unlike(dataset: Any) -> None:
    """Raise if the records of a list, which are to become one batch, are not alike. Other data is not read for this."""
    if type(dataset) not in (list, tuple) or not dataset or tensor_columns(dataset) is not None:
        return
    first = _form(dataset[0])
    for number, record in enumerate(dataset):
        if _has_none(record):
            raise DataError(f"record {number} of the data set has {_NONE.what}: {_MEND}. {_NOTHING}")
        if _form(record) != first:
            raise DataError(f"{unlike(number)}. {_NOTHING}")


def _form(record: Any) -> Any:
    """What default_collate wants to be the same in all records."""
    if isinstance(record, Mapping):
        return ("mapping", *((name, _form(part)) for name, part in record.items()))
    if isinstance(record, list | tuple):
        return (len(record), *(_form(part) for part in record))
    if isinstance(record, bool | int | float):
        return "number"
    shape = getattr(record, "shape", None)
    if shape is not None:
        return ("array", *shape)
    return type(record).__name__


def _has_none(record: Any) -> bool:
    if isinstance(record, Mapping):
        return any(map(_has_none, record.values()))
    return record is None or (isinstance(record, list | tuple) and any(map(_has_none, record)))
