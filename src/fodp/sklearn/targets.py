"""Labels and numbers to predict, by declared classes and bounds; what does not fit is refused by its row's number."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import column_or_1d

from fodp.errors import ConfigurationError, DataError
from fodp.support import checks
from fodp.support.checks import shown


def declared_classes(classes: Any) -> NDArray[Any]:
    """The declared labels in order, from a list of them or their number."""
    if isinstance(classes, int | np.integer) and not isinstance(classes, bool):
        return np.arange(checks.whole("classes", classes, minimum=2))
    labels = np.asarray(sorted(classes) if isinstance(classes, set | frozenset) else classes)
    given = labels.tolist()
    if labels.ndim != 1 or len(labels) < 2 or any(_is_missing(label) for label in given):
        raise ConfigurationError(f"classes must be two or more different labels, got {shown(classes)}")
    if len(set(given)) < len(given) or len({isinstance(label, str) for label in classes}) > 1:
        raise ConfigurationError(
            f"classes must be two or more different labels, all texts or all numbers, got {shown(classes)}"
        )
    return np.sort(labels)


def places(y: Any, classes: NDArray[Any]) -> NDArray[np.int64]:
    """The place of each label among the declared classes."""
    labels, known = _column(y).tolist(), {label: place for place, label in enumerate(classes.tolist())}
    found = np.array([_place(label, known) for label in labels], dtype=np.int64)
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        raise DataError(_no_class(row, labels[row], classes))
    return found


def _place(label: Any, known: dict[Any, int]) -> int:
    try:
        return known.get(label, -1)
    except TypeError:  # what cannot be a label at all
        return -1


def _no_class(row: int, label: Any, classes: NDArray[Any]) -> str:
    where, declared = f"the label of row {row} (counted from 0)", shown(classes.tolist())
    if _is_missing(label):
        return f"{where} is missing (None or NaN): mend or drop that row"
    if isinstance(label, float) and math.isinf(label):
        return f"{where} is infinity (inf): mend or drop that row"
    if isinstance(label, float) and not label.is_integer():
        return (
            f"{where} is no whole number. Unknown label type: continuous; the declared classes are {declared}. Take "
            "PrivateRegressor to predict a number"
        )
    texts = isinstance(label, str), classes.dtype.kind in "UO" and isinstance(classes[0], str)
    kinds = f"{where} is {'a text' if texts[0] else 'not a text'} and the declared classes are "
    if texts[0] != texts[1]:
        return f"{kinds}{'texts' if texts[1] else 'numbers'}, {declared}: declare classes= in the type of the labels"
    return f"{where} is none of the declared classes {declared}: mend that row, or declare all labels that may occur"


def numbers(y: Any) -> NDArray[np.float64]:
    """Finite numbers, one for each row."""
    found = _column(y)
    try:
        targets = found.astype(np.float64)
    except (TypeError, ValueError):
        targets = np.array([_number(cell) for cell in found.tolist()])
    if not np.isfinite(targets).all():
        row = int(np.argmin(np.isfinite(targets)))
        raise DataError(
            f"the target of row {row} (counted from 0) is no finite number (a text, missing, NaN or infinity): mend or "
            "drop that row"
        )
    return targets


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


def _column(y: Any) -> NDArray[Any]:
    return np.asarray(column_or_1d(y, warn=True))


def _is_missing(label: Any) -> bool:
    """None, NaN, or one of pandas' own, which are equal to nothing."""
    return (
        label is None or type(label).__name__ in ("NAType", "NaTType") or (isinstance(label, float) and label != label)
    )
