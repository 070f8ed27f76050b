"""What turns rows into numbers of the model: declared bounds or a public schema, and nothing that the rows say.

What does not fit is refused with the row's number, never with what it holds: scikit-learn's own messages show arrays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.validation import validate_data

from fodp.data.schema import Schema, read_schema
from fodp.data.tables import encode_columns
from fodp.errors import ConfigurationError, DataError
from fodp.support.checks import shown

Floats = NDArray[np.float64]


class CellError(DataError, TypeError):
    """A cell of another type, for which scikit-learn's users expect a TypeError."""


def checked_rows(estimator: Any, rows: Any, reset: bool) -> Floats:
    """The rows as finite numbers, checked as scikit-learn does; with `reset` their number and names are remembered."""
    problem: Exception
    try:
        found = validate_data(estimator, rows, dtype=np.float64, reset=reset, ensure_all_finite=False)
    except (TypeError, ValueError) as error:
        problem = _explained(rows, error)
    else:
        if np.isfinite(found).all():
            return np.asarray(found)
        row, place = np.argwhere(~np.isfinite(found))[0]
        kind = "NaN (a missing value)" if np.isnan(found[row, place]) else "infinity"
        problem = DataError(
            f"{_where(rows, row, place)} is {kind}: put a public number in its place, for instance by "
            "SimpleImputer(strategy='constant', fill_value=0, keep_empty_features=True), or drop "
            "that row"
        )
    raise problem  # not within the except: the error that it replaces may hold a row


def _explained(rows: Any, error: Exception) -> Exception:
    """What is wrong with the rows, by number; scikit-learn's own error where that shows no row."""
    if sparse.issparse(rows):
        return error  # says .toarray()
    ragged = _first_ragged(rows)
    if ragged is not None:
        return DataError(f"row {ragged} has another number of features than row 0: all rows must have the same")
    try:
        cells = _cells(rows)
    except ValueError:
        return DataError(
            f"the rows must be one table of numbers, got a {type(rows).__name__} that is none: fit(X, y) takes the "
            "rows and the targets as two arguments"
        )
    if cells.ndim < 2:
        kind = "scalar" if cells.ndim == 0 else "1D"
        return DataError(
            f"expected a 2D array, one row for each example, got a {kind} array. Reshape your data: .reshape(-1, 1) if "
            "it is one feature, .reshape(1, -1) if it is one row"
        )
    if cells.ndim > 2:
        return error
    for row, line in enumerate(cells):
        for place, cell in enumerate(line):
            if isinstance(cell, complex | np.complexfloating):
                return DataError(f"{_where(rows, row, place)}: Complex data not supported, give real numbers")
            if not _is_number(cell):
                return _no_number(_where(rows, row, place), cell)
    return error


def _no_number(where: str, cell: Any) -> DataError:
    if isinstance(cell, str):
        return DataError(
            f"{where} is a text, not a number: turn it into numbers by a public rule (schema= with values, or "
            "OneHotEncoder(categories=[...])), or leave the column out"
        )
    return CellError(
        f"{where} is of type {type(cell).__name__}: each cell of the argument must be a string of digits or a real "
        "number"
    )


def _is_number(cell: Any) -> bool:
    try:
        return cell is None or isinstance(float(cell), float)  # None becomes NaN
    except (TypeError, ValueError):
        return False


def _cells(rows: Any) -> NDArray[Any]:
    return rows.to_numpy(dtype=object) if hasattr(rows, "iloc") else np.asarray(rows, dtype=object)


def _first_ragged(rows: Any) -> int | None:
    """The first row of a list of rows that is longer or shorter than the first one."""
    if not isinstance(rows, list | tuple) or not all(hasattr(row, "__len__") for row in rows):
        return None
    return next((place for place, row in enumerate(rows) if len(row) != len(rows[0])), None)


def _where(rows: Any, row: int, place: int) -> str:
    """What to call a cell: rows are counted from 0, and not named by an index, which may tell who they are."""
    named = f" ({rows.columns[place]!r})" if hasattr(rows, "columns") and hasattr(rows, "iloc") else ""
    return f"row {row} (counted from 0), feature {place}{named}"


def declared_bounds(name: str, bounds: Any, features: int) -> tuple[Floats, Floats]:
    """Public lows and highs of all features, from one pair for all of them or one pair for each."""
    try:
        table = np.asarray(bounds, dtype=np.float64)
    except (TypeError, ValueError):
        raise _unfit(name, bounds, features) from None
    if table.shape == (2,):
        table = np.tile(table, (features, 1))
    if table.shape != (features, 2) or not np.isfinite(table).all() or not (table[:, 0] < table[:, 1]).all():
        raise _unfit(name, bounds, features)
    return table[:, 0], table[:, 1]


def _unfit(name: str, bounds: Any, features: int) -> ConfigurationError:
    many = f" that holds for all features, or one pair for each of the {features}" if name == "bounds" else ""
    return ConfigurationError(
        f"{name} must be a pair (low, high){many}, low below high, known without the data; got {shown(bounds)}"
    )


def scaled(rows: Floats, lows: Floats, highs: Floats) -> torch.Tensor:
    """Clipped to the bounds, which become -1 and 1: whatever a row holds, its inputs are bounded."""
    inside = (rows.clip(lows, highs) - lows) / (highs - lows) * 2 - 1
    return torch.from_numpy(inside.astype(np.float32))


def by_schema(table: Any, schema: Schema | Mapping[str, Any] | str | Path) -> torch.Tensor:
    """The inputs for rows of a DataFrame, or of a dictionary of columns, by the columns of a public schema."""
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        raise ConfigurationError(
            f"with schema= the rows come as a DataFrame (or a dictionary of columns), got {type(table).__name__}"
        )
    return encode_columns(table, read_schema(schema))
