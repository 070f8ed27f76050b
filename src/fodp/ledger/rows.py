"""The rows of a ledger: what each one says, what it knows of all rows before it, and how damage to it shows.

Each row carries the state of its data set and of its run after it. So the newest row of either says what is left and
what was used, however large the ledger is. A keyed hash seals every row, and another one chains it to the row before.
The key lies in the ledger: it protects against damage, not against somebody who rewrites the file.
"""

import hashlib
import json
import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fodp.errors import LedgerError

UNNAMED = "unnamed data of run "
RESTORE = (
    "restore a copy, and see that it can be believed with `fodp ledger check COPY`; never begin a new ledger in its "
    "place, which would be a new budget"
)


class NoLedger(LedgerError):
    """There is no ledger where one was named."""


class DataState(NamedTuple):
    """What the newest row of a data set knows of all its rows.

    `spent` is the divergence that all runs have used; `taken` also counts what they hold for steps to come. Both are
    rounded up.
    """

    budget: int = 0  # the row that fixed the budget
    data: int = 0  # the newest row with a fingerprint
    runs: int = 0  # runs and selections that were begun
    holders: int = 0  # runs that hold more than they used
    spent: float = 0.0
    taken: float = 0.0


class RunState(NamedTuple):
    """What the newest row of a run knows of all its rows."""

    first: int = 0  # the row that began the run
    opened: int = 0  # the row of the process that goes on with it
    used: int = 0  # the newest row that says how many steps were used
    steps: int | None = None
    rdp: float | None = None
    hold: float | None = None  # divergence that is kept free for the run, including what it used

    @property
    def taken(self) -> float:
        """What the run keeps others from using."""
        return max(self.rdp or 0.0, self.hold or 0.0)

    @property
    def holds(self) -> bool:
        """Does the run keep more than it used?"""
        return self.taken > (self.rdp or 0.0)


class Entry(NamedTuple):
    """One row. `steps` and `rdp` say how much of the run was used up to here, in total."""

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


class Raw(namedtuple("Raw", "id at kind dataset run steps rdp data state by_dataset by_run by_mark chain seal")):
    """A row as the database keeps it. The `by_` columns, keyed hashes of names and marks, are for finding it."""

    def entry(self) -> Entry:
        """The row as everybody else reads it; only for rows whose seal is right."""
        of_data, of_run = json.loads(self.state)
        return Entry(*self[:7], json.loads(self.data), DataState(*of_data), RunState(*of_run), self.chain)


class Header(NamedTuple):
    """Which ledger this is: its random name, and the key of its hashes. Written once, when the ledger is made."""

    identity: str
    key: bytes

    @classmethod
    def new(cls, key: bytes) -> "Header":
        """Of a ledger that begins; the name follows from the key, which nobody else has drawn."""
        return cls(hashlib.blake2b(b"the name of a ledger;" + key, digest_size=16).hexdigest(), key)

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]], where: object) -> "Header":
        """What a ledger says about itself; refuses what is damaged."""
        for row in rows[:1]:
            try:
                header = cls.new(bytes.fromhex(row[1]))
            except (TypeError, ValueError):
                continue
            if len(rows) == 1 and header.values() == tuple(row):
                return header
        raise LedgerError(f"the ledger {where} is damaged (its header): {RESTORE}")

    def values(self) -> tuple[str, str, str]:
        """As it is written down, with a checksum of the key."""
        return self.identity, self.key.hex(), hashlib.blake2b(self.key, digest_size=16).hexdigest()

    def number(self, *words: str) -> int:
        """A number by which a row is found: 63 bits, so that an index holds whole numbers only."""
        return int.from_bytes(self._hash(8, "number", _text(words)), "big") >> 1

    def sealed(self, before: str, values: Sequence[Any]) -> Raw:
        """The row with its place in the chain, after `before`, and its own seal."""
        text = _text(values)
        chain = self._hash(32, before, text).hex()
        return Raw._make((*values, chain, self._hash(16, chain, text).hex()))

    def intact(self, row: Raw, before: str | None = None) -> bool:
        """Is the row what was written; and, if `before` is given, after a row whose chain ends in `before`?"""
        text = _text(row[:-2])
        right = row.seal == self._hash(16, row.chain, text).hex()
        return right and (before is None or row.chain == self._hash(32, before, text).hex())

    def _hash(self, size: int, before: object, text: str) -> bytes:
        # The size is part of what is hashed: a seal is never a chain.
        return hashlib.blake2b(f"{before};{text}".encode("utf-8", "replace"), digest_size=size, key=self.key).digest()


_text = json.JSONEncoder(default=repr).encode  # repr: bytes in the place of text are damage anyway


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
    row: int,
    kind: str,
    steps: int | None,
    rdp: float | None,
    data: Mapping[str, Any],
    of_data: DataState,
    run: RunState,
) -> tuple[DataState, RunState]:
    """The states of a data set and a run after one more row of them. `fodp ledger check` computes all of them again."""
    of_run = run
    if kind in ("run", "selection"):
        of_run, of_data = of_run._replace(first=row), of_data._replace(runs=of_data.runs + 1)
    if kind in ("run", "resume"):
        of_run = of_run._replace(opened=row, hold=data.get("hold"))
    if kind in ("settle", "release"):
        of_run = of_run._replace(hold=None)
    if steps is not None:
        of_run = of_run._replace(used=row, steps=steps, rdp=rdp)
    of_data = of_data._replace(
        budget=row if kind == "budget" else of_data.budget,
        data=row if kind == "data" else of_data.data,
        holders=of_data.holders + of_run.holds - run.holds,
        spent=moved(of_data.spent, run.rdp or 0.0, of_run.rdp or 0.0),
        taken=moved(of_data.taken, run.taken, of_run.taken),
    )
    return of_data, of_run


def moved(total: float, old: float, new: float) -> float:
    """The sum after one part changed, rounded up: over a million rows this adds at most 1e-10 of the sum."""
    if old == new:
        return total
    if math.isinf(total) or math.isinf(new):
        return math.inf
    return math.nextafter(math.fsum((total, -old, new)), math.inf)
