"""A fingerprint of data, keyed with a secret that never leaves this machine.

Without the key nobody can test whether some data gives a fingerprint, so a ledger may be shown to others. It
tells data apart by mistake, not by malice.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from fodp.errors import LedgerError
from fodp.support.files import atomically

_KIND = b"the name of this key, 2"  # marks made in another way are not comparable


def fingerprint(chunks: Iterable[bytes | memoryview]) -> str | None:
    """`key:mark`: which machine's key it was made with, and the keyed hash of the data; None if no key can be kept."""
    key = _secret()
    if key is None:
        return None
    mark = hmac.new(key, digestmod=hashlib.blake2b)
    for chunk in chunks:
        mark.update(chunk)
    name = hmac.new(key, _KIND, hashlib.blake2b).hexdigest()[:12]
    return f"{name}:{mark.hexdigest()[:32]}"


def comparable(one: str, other: str) -> bool:
    """Were both made with the same key?"""
    return one.partition(":")[0] == other.partition(":")[0]


def secret_file() -> Path:
    """Where the secret lives: the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "fodp" / "fingerprint.key"


def _secret() -> bytes | None:
    try:
        path = secret_file()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomically(path, keep=True) as part:  # readable by its owner only
                part.write_bytes(secrets.token_bytes(32))
        # Elsewhere the mode says nothing about others: Windows has lists of rights, and a home is its owner's.
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise LedgerError(f"{path} holds a secret but others may read it: chmod 600 {path}")
        key = path.read_bytes()
    except (OSError, RuntimeError):
        return None  # no home, or one that cannot be written: then there is no fingerprint
    if len(key) != 32:
        raise LedgerError(f"{path} is damaged ({len(key)} bytes instead of 32): restore a copy, or delete it")
    return key
