"""A rehearsal before the first private step: mistakes that would show in it are found while nothing is charged."""

from typing import TYPE_CHECKING, Any

import torch

from fodp.clipping.batches import repeat, tensors
from fodp.draws import generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.errors import DataError, PrivacyError
from fodp.inputs.bad_records import explain, refuse_unlike
from fodp.inputs.columns import whole_numbers

if TYPE_CHECKING:
    from fodp.sources.pull import Pull

_COLUMNS = 6  # of whole numbers that records are chosen by


def rehearse(source: "Pull", dataset: Any) -> None:
    """Run augmentation and loss forwards on a few records, those with the extremes of columns of whole numbers.

    Buffers and generators are left as they were; a model that writes what it sees is refused. Records that do not fit
    (types, labels out of range, another form) are a `DataError` that names one; any other exception is the user's own,
    with a note.
    """
    source.listeners.refuse()
    if source.fetcher.batched_by is None:
        refuse_unlike(dataset)
    kept, foreign = source.unchanged(), foreign_state()
    batch, chosen = None, telling(dataset)  # type: Any, torch.Tensor
    try:
        with generators_kept():
            source.fetcher.refuse_what_cannot_be_divided()
            batch = repeat(source.fetcher.fetch(chosen), source.copies)
            if source.augmentation is not None:
                batch = source.augmentation.augment(batch)
            source.engine.loss_fn(source.engine.model, batch)
    except Exception as error:
        found = explain(source, chosen.tolist(), error)
        if found is not None:
            raise DataError(f"{found}. Nothing was released or charged") from found.__cause__
        error.add_note(
            f"fodp: found in a rehearsal on a few records{_form(batch)}; the parameters are {source.layout.dtype}. "
            "Nothing was released or charged"
        )
        raise
    finally:
        restore_foreign(foreign)
        kept.refuse_changes()  # also after an exception: what a model has written of records must not stay
        kept.restore()  # nor what was kept in an attribute that was empty


def telling(dataset: Any) -> torch.Tensor:
    """Two records for each column of whole numbers, with its smallest and its largest: labels may be among them."""
    found: list[int] = []
    for column in whole_numbers(dataset)[:_COLUMNS]:
        flat = column.flatten()
        each = max(1, len(flat) // max(1, len(column)))
        found += [int(flat.argmin()) // each, int(flat.argmax()) // each]
    return torch.tensor(list(dict.fromkeys(found)) if len(set(found)) > 1 else [*found, 0, 0][:2])


def _form(batch: Any) -> str:
    try:
        return " (" + ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors(batch)) + ")"
    except PrivacyError:  # not made of tensors
        return ""
