"""A rehearsal before the first private step: mistakes that would show in it are found while nothing is charged."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fodp.clipping.batches import repeat, tensors
from fodp.draws import generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.inputs.bad_records import explain, refuse_unlike
from fodp.inputs.columns import whole_numbers
from fodp.support.imports import one_line

if TYPE_CHECKING:
    from fodp.sources.pull import Pull

_COLUMNS = 6  # of whole numbers that records are chosen by
_NOTE = "fodp: found in a rehearsal"


def rehearse(source: "Pull", dataset: Any) -> None:
    """Run augmentation and loss forwards and backwards on a few records: those with extremes of whole-number columns.

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
            _try_public(source)
            source.fetcher.refuse_what_cannot_be_divided()
            batch = repeat(source.fetcher.fetch(chosen), source.copies)
            if source.augmentation is not None:
                batch = source.augmentation.augment(batch)
            _differentiate(source.engine.loss_fn(source.engine.model, batch), source.layout.parameters)
    except ConfigurationError:
        raise
    except Exception as error:
        found = explain(source, chosen.tolist(), error)
        if found is not None:
            raise DataError(f"{found}. Nothing was released or charged") from found.__cause__
        error.add_note(
            f"{_NOTE} on a few records{_form(batch)}; the parameters are {source.layout.dtype}. "
            "Nothing was released or charged"
        )
        raise
    finally:
        restore_foreign(foreign)
        kept.refuse_changes()  # also after an exception: what a model has written of records must not stay
        kept.restore()  # nor what was kept in an attribute that was empty


def _try_public(source: "Pull") -> None:
    """Raise for a public sample that the loss does not take."""
    if source.public_sample is None:
        return
    try:
        with torch.no_grad():
            source.engine.loss_fn(source.engine.model, source.public_sample)
    except Exception as error:
        raise ConfigurationError(
            "public_sample must be a batch of public records as loss_fn takes them, which fails: "
            f"{one_line(error)}. Nothing was released or charged"
        ) from error


def _differentiate(losses: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Run backwards, for a model may fail there; that the losses have the right form is looked at later."""
    if not isinstance(losses, torch.Tensor) or not losses.requires_grad:
        return
    if not losses.isfinite().any():
        raise ConfigurationError(
            "the losses of a few records are not finite: look at the model's initial weights and at the scale of the "
            "data. Nothing was released or charged"
        )
    torch.autograd.grad(losses.sum(), parameters, allow_unused=True)


def rehearsed(error: BaseException) -> str | None:
    """What broke in a rehearsal, on one line; None for an error that does not come from one."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    if not notes or not isinstance(error, Exception):
        return None
    return f"fails ({type(error).__name__}: {one_line(error)}), {notes[0].removeprefix('fodp: ')}"


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
