"""Which ledger a file is: its random name, and the key of its checksums."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fodp._checks import LedgerError

RESTORE = (
    "restore a copy, and see that it can be believed with `fodp ledger check COPY`; never begin a new ledger in its "
    "place, which would be a new budget"
)


class NoLedger(LedgerError):
    """There is none where one was named."""


def is_address(path: object) -> bool:
    """Is this a server's address, and not a file?"""
    return str(path).startswith(("postgresql://", "postgres://"))


class Header(NamedTuple):
    """The one row that is written when a ledger is made."""

    identity: str
    key: bytes

    @classmethod
    def new(cls, key: bytes) -> "Header":
        """Of a ledger that begins; the name follows from the key, which nobody else has drawn."""
        return cls(hashlib.blake2b(b"the name of a ledger;" + key, digest_size=16).hexdigest(), key)

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]], where: str) -> "Header":
        """What a ledger says about itself; refuses what is damaged."""
        for identity, key, seal in rows[:1]:
            try:
                header = cls.new(bytes.fromhex(key))
            except (TypeError, ValueError):
                continue
            if len(rows) == 1 and (header.identity, header.seal()) == (identity, seal):
                return header
        raise LedgerError(f"the ledger {where} is damaged (its header): {RESTORE}")

    def seal(self) -> str:
        """A checksum of the key."""
        return hashlib.blake2b(self.key, digest_size=16).hexdigest()

    def values(self) -> tuple[str, str, str]:
        """As they are written down; hexadecimal, so that they may stand in a statement."""
        return self.identity, self.key.hex(), self.seal()
