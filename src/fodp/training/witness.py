"""What a seeded run releases, shown to its ledger before anything uses it: a step that is repeated must be the same."""

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from fodp.ledger import Account
from fodp.run import Run

_AT_ONCE = 2**30  # bytes; `cryptography` takes less than twice as many


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
        """The step has released this."""
        if self._cipher is None:
            self._cipher = AESGCM(self._run.streams.record_key(self._run.step, "witness"))
        data = released.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, max(1, len(data)), _AT_ONCE):
            place = len(self._tags).to_bytes(12, "little")  # each under a number of its own
            self._tags += self._cipher.encrypt(place, b"", data[start : start + _AT_ONCE])

    def confirm(self) -> None:
        """Before the step is used: have the ledger compare it, or remember it. All ranks must call it."""

        def shown() -> float:
            assert self._account is not None
            self._account.witness(self._run.step, self._tags)
            return 1.0

        self._run.ranks.number(shown)
