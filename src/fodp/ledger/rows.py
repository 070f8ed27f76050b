"""The rows of a ledger: what each one says, what it knows of all before it, and how damage to it shows.

Each row carries the state of its data set and of its run after it, so that the newest row of either answers what is
left and what was used, whatever the size of the ledger. A keyed hash seals every row, and another one chains it to
the row before. The key lies in the ledger: it is there against damage, not against somebody who rewrites the file.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

UNNAMED = "unnamed data of run "


class DataState(NamedTuple):
    """What the newest row of a data set knows of all of its rows.

    `spent` is the divergence that all runs count as having used; `taken` counts what they hold for the steps to come
    as well. Both are sums that were rounded up.
    """

    budget: int = 0  # the row that fixed the budget
    data: int = 0  # the newest row with a fingerprint
    runs: int = 0  # runs and selections that were begun
    holders: int = 0  # runs that hold more than they used
    spent: float = 0.0
    taken: float = 0.0


class RunState(NamedTuple):
    """What the newest row of a run knows of all of its rows."""

    first: int = 0  # the row that began it
    opened: int = 0  # the row of the process that goes on with it
    used: int = 0  # the newest row that says how many steps count as used
    steps: int | None = None
    rdp: float | None = None
    hold: float | None = None  # divergence that is kept free for the run, what it used included

    @property
    def taken(self) -> float:
        """What the run keeps others from using."""
        return max(self.rdp or 0.0, self.hold or 0.0)

    @property
    def holds(self) -> bool:
        """Does it keep more than it used?"""
        return self.taken > (self.rdp or 0.0)


class Entry(NamedTuple):
    """One row. `steps` and `rdp` say how much of the run counts as used from here on, all of it together."""

    id: int
    at: float
    kind: str
    dataset: str
    run: str
    steps: int | None
    rdp: float | None
    data: dict[str, Any]
    of_data: DataState
    of_run: RunState
    chain: str


class Raw(NamedTuple):
    """A row as the database keeps it. The three numbers are what it is found by: keyed hashes of names and marks."""

    id: int
    at: float
    kind: str
    dataset: str
    run: str
    steps: int | None
    rdp: float | None
    data: str
    state: str
    by_dataset: int
    by_run: int
    by_mark: int | None
    chain: str
    seal: str

    def entry(self) -> Entry:
        """The row as everybody else reads it; only for rows whose seal is right."""
        of_data, of_run = json.loads(self.state)
        return Entry(*self[:7], json.loads(self.data), DataState(*of_data), RunState(*of_run), self.chain)


class Seals:
    """The keyed hashes of one ledger."""

    def __init__(self, key: bytes):
        self._key = key

    def number(self, *words: str) -> int:
        """What a row is found by: 63 bits, so that an index holds whole numbers only."""
        return int.from_bytes(self._hash(8, "number", _text(words)), "big") >> 1

    def sealed(self, before: str, values: Sequence[Any]) -> Raw:
        """The row with its place in the chain and its own seal."""
        text = _text(values)
        chain = self._hash(32, before, text).hex()
        return Raw._make((*values, chain, self._hash(16, chain, text).hex()))

    def intact(self, row: Raw) -> bool:
        """Is the row, for itself, what was written?"""
        return row.seal == self._hash(16, row.chain, _text(row[:-2])).hex()

    def follows(self, before: str, row: Raw) -> bool:
        """Is the row what was written, and after a row whose chain ends in `before`?"""
        text = _text(row[:-2])
        right = row.seal == self._hash(16, row.chain, text).hex()
        return right and row.chain == self._hash(32, before, text).hex()

    def _hash(self, size: int, before: object, text: str) -> bytes:
        # The size is part of what is hashed: a seal is never a chain.
        return hashlib.blake2b(f"{before};{text}".encode("utf-8", "replace"), digest_size=size, key=self._key).digest()


_text = json.JSONEncoder(default=repr).encode  # repr: bytes where text should be are not ours anyway


def mark_of(kind: str, dataset: str, data: Mapping[str, Any]) -> str | None:
    """What else a row is found by: a run by its seed, data by its fingerprint or its unit, a checkpoint by its digest.

    Unnamed data is kept apart: there may be as much of it as there are runs, and nobody looks for all of it.
    """
    if kind == "data":
        return f"data {'unnamed ' if dataset.startswith(UNNAMED) else ''}{data.get('fingerprint')}"
    if kind == "unit":
        return f"unit of {dataset}"
    name = {"run": "seed", "checkpoint": "digest"}.get(kind)
    return None if name is None or data.get(name) is None else f"{name} {data[name]}"


def states_after(
    number: int,
    kind: str,
    steps: int | None,
    rdp: float | None,
    data: Mapping[str, Any],
    of_data: DataState,
    of_run: RunState,
) -> tuple[DataState, RunState]:
    """The states of a data set and a run after one more row of them. `fodp ledger check` computes all of them again."""
    before = of_run
    if kind in ("run", "selection"):
        of_run = of_run._replace(first=number)
        of_data = of_data._replace(runs=of_data.runs + 1)
    if kind in ("run", "resume"):
        of_run = of_run._replace(opened=number, hold=data.get("hold"))
    if kind in ("settle", "release"):
        of_run = of_run._replace(hold=None)
    if steps is not None:
        of_run = of_run._replace(used=number, steps=steps, rdp=rdp)
    of_data = of_data._replace(
        budget=number if kind == "budget" else of_data.budget,
        data=number if kind == "data" else of_data.data,
        holders=of_data.holders + of_run.holds - before.holds,
        spent=_moved(of_data.spent, before.rdp or 0.0, of_run.rdp or 0.0),
        taken=_moved(of_data.taken, before.taken, of_run.taken),
    )
    return of_data, of_run


def without(total: float, part: float) -> float:
    """A sum without one of its parts, rounded up."""
    return _moved(total, part, 0.0)


def _moved(total: float, old: float, new: float) -> float:
    """The sum in which one part has changed, rounded up: a million rows add 1e-10 of it at most."""
    if old == new:
        return total
    if math.isinf(total) or math.isinf(new):
        return math.inf
    return math.nextafter(math.fsum((total, -old, new)), math.inf)
