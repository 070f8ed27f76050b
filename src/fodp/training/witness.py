"""What a seeded run releases, shown to its ledger before anything uses it: a step that is repeated must be the same."""

import hashlib

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from fodp.ledger import Account
from fodp.run import Run

_AT_ONCE = 2**30  # bytes; `cryptography` takes less than twice as many
_TAG = 16  # bytes


def witness_of(run: Run, account: Account | None) -> "Witness | None":
    """For a seeded run that is kept in a ledger; all ranks must ask, and the first one has the account."""
    if run.plan.seed is None or not run.ranks.number(lambda: float(account is not None)):
        return None
    return Witness(run, account)


class Witness:
    """Collects the hashes of a step's releases. They are message authentication codes, which take next to no time."""

    def __init__(self, run: Run, account: Account | None):
        self._run, self._account = run, account
        self._tags = b""
        self._cipher: AESGCM | None = None

    def begin(self) -> None:
        """A step begins."""
        self._tags, self._cipher = b"", None

    def see(self, released: Tensor) -> None:
        """The step has released this; of a vector in slices, this rank's part."""
        if self._cipher is None:
            self._cipher = AESGCM(self._run.streams.record_key(self._run.step, "witness"))
        data = released.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, max(1, len(data)), _AT_ONCE):
            place = len(self._tags).to_bytes(12, "little")  # each under a number of its own
            self._tags += self._cipher.encrypt(place, b"", data[start : start + _AT_ONCE])

    def confirm(self) -> None:
        """Before the step is used: have the ledger compare it, or remember it. All ranks must call it."""
        run, tags = self._run, self._tags
        if run.shards is not None:
            tags = self._of_all_ranks()

        def shown() -> float:
            assert self._account is not None
            self._account.witness(run.step, tags)
            return 1.0

        run.ranks.number(shown)

    def _of_all_ranks(self) -> bytes:
        """A hash of each rank's tags, one after another."""
        ranks, mine = self._run.ranks, hashlib.blake2b(self._tags, digest_size=_TAG).digest()
        numbers = torch.zeros(ranks.count, _TAG, dtype=torch.float64)
        numbers[ranks.rank] = torch.tensor(list(mine), dtype=torch.float64)
        return bytes(map(int, ranks.added(numbers).flatten().tolist()))
