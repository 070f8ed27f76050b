"""Tables of your own, from CSV files or pandas, encoded by a public schema alone."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fodp.data.cards import Card, own_card
from fodp.data.loading import Splits, refuse_other_kind
from fodp.data.schema import Column, Schema, read_schema, text_of
from fodp.errors import ConfigurationError, DataError
from fodp.support import checks
from fodp.support.checks import shown

Cells = Sequence[Any]  # of one column; None is a missing cell


def from_table(
    table: Any,
    schema: Schema | Mapping[str, Any] | str | Path,
    target: str,
    *,
    public_size: int | None = None,
    test: Any = None,
    name: str | None = None,
    owner: str | None = None,
) -> Splits:
    """Make a table into tensors and a public card, by its public schema alone.

    Guarantee: each row of the result depends on its own row of the table only, and the card on no row at all. A cell
    that cannot be read is refused with its line and column.

    Args:
        table: the path of a `.csv` or `.tsv` file with a header, a pandas DataFrame, or a dictionary of columns.
        schema: see `docs/your-data.md`; columns of the table that it does not name are not used.
        target: the column to predict; with `values` it is a class, with `bounds` a number (regression).
        public_size: the public size of the table, from which rates follow, if the schema does not say it.
        test: a table of the same columns that is public, to score on; it may be left out.
        name: of the data, in the card.
        owner: the column that says whose each row is, if the schema does not say it; see `docs/people.md`.

    Returns:
        The tensors to train and to test on, and the public card.

    Example:
        >>> rows = {"age": [31, 64], "smokes": ["no", "yes"]}
        >>> columns = {"age": {"bounds": [0, 128]}, "smokes": {"values": ["no", "yes"]}}
        >>> from_table(rows, {"public_size": 1000, "columns": columns}, "smokes").train[1]
        (tensor([0.]), tensor(1))
    """
    public = read_schema(schema)
    inputs, goal = public.split(target)
    size = public.public_size if public_size is None else checks.whole("public_size", public_size)
    if size is None:
        raise ConfigurationError(
            "state the public size of the table, as public_size in the schema or as an argument (--assume-size): "
            "counted from the rows it would reveal who is in them"
        )
    if public.public_size not in (None, size):
        raise ConfigurationError(f"public_size is {size} here and {public.public_size} in the schema: say one of them")
    read = _Table(table)
    train = _encode(read, inputs, goal, public)
    scored = _encode(_Table(test), inputs, goal, public) if test is not None else TensorDataset(*train[:0])
    card = own_card(
        name or (Path(table).name if isinstance(table, str | Path) else "table"),
        assume_size=size,
        test_size=len(scored),
        classes=1 if goal.bounds is not None else len(goal.values),
        shape=(sum(column.width for column in inputs),),
        is_uint8=False,
        schema={**public.to_dict(), "target": target},
    )
    owners = _owners(read, public, owner or public.owner)
    return Splits(card=card, train=train, validation=TensorDataset(*train[:0]), test=scored, owners=owners)


def _owners(table: "_Table", schema: Schema, column: str | None) -> list[str] | None:
    """Whose each row is, as texts; None where no column says it."""
    if column is None:
        return None
    if column in {known.name for known in schema.columns}:
        raise ConfigurationError(
            f"{column!r} says whose each row is, and the schema has it as a column to learn from: take it out there"
        )
    cells = table.column(column, schema)
    for row, cell in enumerate(cells):
        if cell is None:
            raise DataError(f"{table.where(row, column)} names no owner: give the row a name of its own, or drop it")
    return [text_of(cell) for cell in cells]


def encode_inputs(table: Any, card: Card) -> torch.Tensor:
    """The inputs of a model for rows of a table whose target need not be known, by the schema in a card."""
    public, inputs, _ = _schema_of(card)
    return torch.from_numpy(_input_rows(_Table(table), inputs, public))


def encode_records(table: Any, card: Card) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of rows of another table, by the schema in a card."""
    public, inputs, goal = _schema_of(card)
    return _encode(_Table(table), inputs, goal, public).tensors


def _schema_of(card: Card) -> tuple[Schema, Sequence[Column], Column]:
    """A card's schema, its columns to learn from, and the one to predict."""
    if card.schema is None:
        raise DataError(f"{card.name} is no table: its card has no schema")
    said = dict(card.schema)
    target = said.pop("target")
    public = read_schema(said)
    return public, *public.split(target)


def encode_columns(table: Any, schema: Schema) -> torch.Tensor:
    """The inputs of a model for rows of a table: all columns of a schema that names no target."""
    return torch.from_numpy(_input_rows(_Table(table), schema.columns, schema))


def unused_columns(path: str | Path, schema: Schema) -> list[str]:
    """Columns of a file that the schema does not name, and that training does not use."""
    named = {*(column.name for column in schema.columns), schema.owner}
    return [name for name in _header(Path(path)) if name not in named]


def _encode(read: "_Table", inputs: Sequence[Column], goal: Column, schema: Schema) -> TensorDataset:
    rows = _input_rows(read, inputs, schema)
    cells = read.column(goal.name, schema)
    if goal.bounds is not None:
        return TensorDataset(torch.from_numpy(rows), torch.from_numpy(_numbers(cells, goal, read.where)))
    labels = _places(cells, goal)
    for place in (len(goal.values), -1):
        if place in labels:
            what = "is missing" if place < 0 else f"is none of the {len(goal.values)} classes of the schema"
            raise DataError(f"{read.where(labels.index(place), goal.name)} {what}: mend or drop that row")
    return TensorDataset(torch.from_numpy(rows), torch.tensor(labels))


def _input_rows(table: "_Table", inputs: Sequence[Column], schema: Schema) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = []
    for column in inputs:
        cells = table.column(column.name, schema)
        if column.bounds is not None:
            parts.append(_numbers(cells, column, table.where)[:, None])
            continue
        other = len(column.values)
        filled = other if column.fill is None else column.values.index(str(column.fill))
        places = np.array([filled if place < 0 else place for place in _places(cells, column)], dtype=np.int64)
        one_hot = np.zeros((len(places), other + 1), dtype=np.float32)
        one_hot[np.arange(len(places)), places] = 1
        parts.append(one_hot)
    rows = np.concatenate(parts, axis=1)
    if not len(rows):
        raise DataError(f"{table.name} must have at least one row below its header")
    return rows


def _numbers(cells: Cells, column: Column, where: Callable[[int, str], str]) -> NDArray[np.float32]:
    """Clipped to the public bounds, which become -1 and 1."""
    assert column.bounds is not None
    low, high = column.bounds
    found = np.empty(len(cells))
    for row, cell in enumerate(cells):
        if cell is None and column.fill is None:
            raise DataError(f"{where(row, column.name)} is missing: give the column a fill, or drop that row")
        try:
            found[row] = float(column.fill if cell is None else cell)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise DataError(f"{where(row, column.name)} is not a number: mend it, or list it as missing") from None
    if np.isnan(found).any():
        raise DataError(f"{where(int(np.isnan(found).argmax()), column.name)} is not a number: mend or drop it")
    return ((found.clip(low, high) - low) / (high - low) * 2 - 1).astype(np.float32)


def _places(cells: Cells, column: Column) -> list[int]:
    """The place of each cell among the values; the last one for any other, -1 where it is missing."""
    places = {value: place for place, value in enumerate(column.values)}
    return [-1 if cell is None else places.get(text_of(cell), len(places)) for cell in cells]


class _Table:
    """Columns by name, from a file, a DataFrame or a dictionary, and where a cell of them stands."""

    def __init__(self, table: Any):
        self.name, self._lines = "the table", None
        if isinstance(table, str | Path):
            self.name = str(table)
            self._columns, self._lines = _read_file(Path(table))
            return
        if not isinstance(table, Mapping) and not hasattr(table, "columns"):
            raise DataError(
                f"the table must be the path of a .csv file, a DataFrame or a dictionary of columns, got "
                f"{'a list of rows' if isinstance(table, list | tuple) else type(table).__name__}"
            )
        names = [str(name) for name in (table if isinstance(table, Mapping) else table.columns)]
        _refuse_twice(names, self.name)
        self._columns = {name: _cells(table[name]) for name in names}
        lengths = {len(cells) for cells in self._columns.values()}
        if len(lengths) > 1:
            raise DataError(f"the columns of the table must have one length, got {sorted(lengths)}")

    def column(self, name: str, schema: Schema) -> Cells:
        """The cells of a column, None where one is missing."""
        if name not in self._columns:
            raise DataError(f"{self.name} has no column {name!r}, which the schema names: {self._known(schema)}")
        gone = {"", *schema.missing}
        return [
            None if cell is None or (isinstance(cell, str) and cell in gone) else cell for cell in self._columns[name]
        ]

    def where(self, row: int, column: str) -> str:
        """What to call a cell. Not what it holds: messages get copied into logs and letters."""
        place = f"row {row}" if self._lines is None else f"line {self._lines[row]}"
        return f"{place}, column {column!r} of {self.name}"

    def _known(self, schema: Schema) -> str:
        """What there is instead; not where the names seem to be a record, which no message shows."""
        if not any(column.name in self._columns for column in schema.columns):
            return "it has none of the schema's names; its first line must be a header"
        return f"it has {shown(', '.join(self._columns))}"


def _cells(column: Any) -> Cells:
    """A pandas column knows itself what is missing; in other columns it is None or NaN."""
    cells = column.tolist() if hasattr(column, "tolist") else list(column)
    gone = column.isna().tolist() if hasattr(column, "isna") else [cell is None or cell != cell for cell in cells]
    return [
        None if is_gone else cell.strip() if isinstance(cell, str) else cell
        for cell, is_gone in zip(cells, gone, strict=True)
    ]


def _read_file(path: Path) -> tuple[dict[str, Cells], list[int]]:
    """The columns of a file, and the line of each row."""
    names = _header(path)
    rows, lines = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=_delimiter(path), skipinitialspace=True, strict=True)
            next(reader)
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(names):
                    raise DataError(
                        f"line {reader.line_num} of {path} has {len(row)} cells, the header {len(names)}: mend it"
                    )
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except (OSError, UnicodeError, csv.Error) as error:
        raise _unreadable(path, error) from None
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return dict(zip(names, columns, strict=True)), lines


def _header(path: Path) -> list[str]:
    refuse_other_kind(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=_delimiter(path), skipinitialspace=True, strict=True)
            names = [name.strip() for name in next(reader, [])]
    except (OSError, UnicodeError, csv.Error) as error:
        raise _unreadable(path, error) from None
    if not names:
        raise DataError(f"{path} is empty: its first line must name the columns")
    other = ";" if ";" in names[0] else "\t" if "\t" in names[0] and _delimiter(path) == "," else None
    if len(names) == 1 and other is not None:
        found, read = "semicolons" if other == ";" else "tabs", "commas" if _delimiter(path) == "," else "tabs"
        raise DataError(
            f"{path} seems to be separated by {found}, and {path.suffix} is read with {read}: save it with commas and "
            "decimal points as .csv, or with tabs as .tsv"
        )
    _refuse_twice(names, str(path))
    return names


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or ("not UTF-8" if isinstance(error, UnicodeError) else str(error))
    return DataError(f"cannot read {path} ({reason}): give a table in UTF-8, with a header and commas (.tsv: tabs)")


def _refuse_twice(names: Sequence[str], where: str) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:  # told by place: without a header the names are those of a record
            raise DataError(f"columns {names.index(name) + 1} and {place + 1} of {where} have one name: rename one")
