"""Rows that users add to the fair comparison: kept beside the records, so that the report shows them too."""

from pathlib import Path
from typing import Any

from fodp._checks import PrivacyError
from fodp.methods import find
from fodp_lab.paper.fair import ADAM_RATES, ROWS, SGD_RATES, Row
from fodp_lab.paper.records import Records

FILE = "challengers.jsonl"


def challenge(
    folder: Path, label: str, method: str, params: dict[str, Any], lr: float | None, modules: tuple[str, ...]
) -> Row:
    """Write a row down. Without a learning rate it gets the same search as all others."""
    algorithm = find(method).from_dict(params)  # refuses what the method does not know
    if label in {row.label for row in ROWS}:
        raise PrivacyError(f"the comparison has a row {label!r} already: choose another --label")
    if lr is not None:
        params = {**params, "lr": lr}
    rates = () if lr is not None else ADAM_RATES if algorithm.params.update.startswith("adam") else SGD_RATES
    record = {"key": label, "method": method, "params": params, "rates": rates, "modules": modules}
    Records(folder / FILE).append(record)
    return _row(record)


def rows(folder: Path) -> tuple[Row, ...]:
    """All rows of the comparison in this folder: ours, then the challengers."""
    return ROWS + tuple(_row(record) for record in Records(folder / FILE))


def modules(folder: Path) -> tuple[str, ...]:
    """What must be imported for the challengers' methods to exist."""
    return tuple(dict.fromkeys(name for record in Records(folder / FILE) for name in record["modules"]))


def _row(record: dict[str, Any]) -> Row:
    return Row(record["key"], record["method"], record["params"], rates=tuple(record["rates"]))
