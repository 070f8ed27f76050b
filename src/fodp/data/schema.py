"""The public schema of a table: everything that turns its cells into numbers. Nothing here ever looks at the table.

Bounds, categories, fills and the size are what anybody may know without the data: from a form, a code book, a law.
Read off the data they would tell who is in it, and no ε covers that.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fodp.errors import ConfigurationError
from fodp.support import checks
from fodp.support.checks import shown

MOST_VALUES = 10_000  # each is an input of the model


@dataclass(frozen=True)
class Column:
    """A column of numbers with public `bounds`, or of categories with public `values`.

    A number is clipped to the bounds, which become -1 and 1. A category becomes one place per value and one more for
    every other value. `fill` stands in for a missing cell; without it, a missing category is "other" and a missing
    number is refused.
    """

    name: str
    bounds: tuple[float, float] | None = None
    values: tuple[str, ...] = ()
    fill: float | str | None = None

    @property
    def width(self) -> int:
        """How many inputs of the model it becomes."""
        return 1 if self.bounds is not None else len(self.values) + 1


@dataclass(frozen=True)
class Schema:
    """The public columns of a table, how missing cells are written (beside the empty one), and a public size."""

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = ()
    public_size: int | None = None
    owner: str | None = None  # the column that says whose each row is; nothing is learnt from it

    def split(self, target: str) -> tuple[tuple[Column, ...], Column]:
        """The inputs, and the column that is to be predicted."""
        by_name = {column.name: column for column in self.columns}
        if target not in by_name:
            raise ConfigurationError(
                f"the target must be a column of the schema, {_listed(by_name)}; got {shown(target)}"
            )
        if by_name[target].fill is not None:
            raise ConfigurationError(f"the target {target!r} has a fill: rows without a target cannot be learnt from")
        if by_name[target].bounds is None and len(by_name[target].values) < 2:
            raise ConfigurationError(
                f"the target {target!r} needs at least two values (classes), or bounds (regression)"
            )
        inputs = tuple(column for column in self.columns if column.name != target)
        if not inputs:
            raise ConfigurationError("the schema must have at least one column beside the target")
        return inputs, by_name[target]

    def to_dict(self) -> dict[str, Any]:
        """In the form of a schema file."""
        columns = {}
        for column in self.columns:
            kind = {"values": list(column.values)} if column.bounds is None else {"bounds": list(column.bounds)}
            columns[column.name] = {**kind, **({} if column.fill is None else {"fill": column.fill})}
        size = {} if self.public_size is None else {"public_size": self.public_size}
        owner = {} if self.owner is None else {"owner": self.owner}
        return {**size, **owner, **({"missing": list(self.missing)} if self.missing else {}), "columns": columns}


def read_schema(source: "Schema | Mapping[str, Any] | str | Path") -> Schema:
    """Read the public schema of a table.

    Args:
        source: a `.toml` or `.json` file, a dictionary of the same form (docs/your-data.md), or a schema.

    Returns:
        The schema.

    Raises:
        ConfigurationError: if a column is not described, with the place and what to write.

    Example:
        >>> read_schema({"columns": {"age": {"bounds": [0, 120]}, "smokes": {"values": ["no", "yes"]}}}).columns[0]
        Column(name='age', bounds=(0.0, 120.0), values=(), fill=None)
    """
    if isinstance(source, Schema):
        return source
    content, where = (source, "the schema") if isinstance(source, Mapping) else (_read(Path(source)), str(source))
    _refuse_unknown(content, ("public_size", "missing", "owner", "columns"), where)
    columns, missing, size = content.get("columns"), content.get("missing", []), content.get("public_size")
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigurationError(f"{where} must describe columns: a table [columns.NAME] for each of them")
    if not isinstance(missing, list | tuple) or not all(isinstance(text, str) for text in missing):
        raise ConfigurationError(f"missing of {where} must be a list of texts, got {shown(missing)}")
    owner = content.get("owner")
    if owner is not None and not (isinstance(owner, str) and owner.strip()):
        raise ConfigurationError(f"owner of {where} must be the name of a column, got {shown(owner)}")
    return Schema(
        tuple(_column(str(name), column, where) for name, column in columns.items()),
        tuple(text.strip() for text in missing),
        None if size is None else checks.whole(f"public_size of {where}", size),
        owner,
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:160]
        raise ConfigurationError(f"cannot read the schema {path} ({reason}): give a .toml or .json file") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"the schema {path} must be a table with columns, got {shown(content)}")
    return content


def _column(name: str, content: Any, where: str) -> Column:
    at = f"column {name!r} of {where}"
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{at} must have bounds or values, got {shown(content)}")
    _refuse_unknown(content, ("bounds", "values", "fill"), at)
    if ("bounds" in content) == ("values" in content):
        raise ConfigurationError(
            f"{at} must have either bounds = [low, high] for numbers or values = [...] for categories"
        )
    fill = content.get("fill")
    if "bounds" in content:
        bounds = content["bounds"]
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise ConfigurationError(f"bounds of {at} must be [low, high], got {shown(bounds)}")
        low, high = (checks.number(f"bounds of {at}", bound) for bound in bounds)
        if not low < high or not math.isfinite(high - low):
            raise ConfigurationError(f"bounds of {at} must have a low below a high, got {shown(bounds)}")
        return Column(name, (low, high), fill=None if fill is None else checks.number(f"fill of {at}", fill))
    if not isinstance(content["values"], list | tuple) or not 0 < len(content["values"]) <= MOST_VALUES:
        raise ConfigurationError(f"values of {at} must be a list of categories, got {shown(content['values'])}")
    values = tuple(text_of(value) for value in content["values"])
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ConfigurationError(f"values of {at} must differ; {twice!r} is there twice")
    if fill is not None and text_of(fill) not in values:
        raise ConfigurationError(f"fill of {at} must be one of its values, got {shown(fill)}")
    return Column(name, values=values, fill=None if fill is None else text_of(fill))


def text_of(value: object) -> str:
    """A category as text: 3, 3.0, "3" and "3.0" are the same one, since pandas turns whole numbers into 3.0."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())


def _refuse_unknown(content: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [str(key) for key in content if key not in known]
    if unknown:
        raise ConfigurationError(f"{where} says {unknown[0]!r}, which is none of {', '.join(known)}")


def _listed(names: Mapping[str, Any]) -> str:
    return shown(", ".join(names))
