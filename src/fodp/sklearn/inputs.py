"""What turns rows into numbers of the model: declared bounds or a public schema, and nothing that the rows say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fodp._checks import ConfigurationError, shown
from fodp.data.schema import Schema, read_schema
from fodp.data.tables import encode_columns

Floats = NDArray[np.float64]


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
    return ConfigurationError(
        f"{name} must be a pair (low, high) that holds for all features, or one pair for each of the {features}, low "
        f"below high, known without the data; got {shown(bounds)}"
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
