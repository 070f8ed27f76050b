"""What the steps of seeded runs released, as keyed hashes: a repeated step is granted only if it is the same release.

A seeded run that is resumed repeats its noise. On the same sums that is the same release, which costs nothing more; on
other sums (another loss, another optimizer) the two releases differ by sums without noise. So the ledger keeps a hash
of eight bytes for each step, keyed with the ledger's own key, and a repeated step is compared before anything uses it.

Hashes are written into the ledger with the next row of the run. Until then they are in a small file beside the ledger,
the tail, written before the release is used but not synced: it is whole after a kill, perhaps not after a crash of the
system. Charged steps that a whole tail does not have were never used, and are taken for the first time. Of other
charged steps nobody knows what they released: they are not granted again, and are lost as those of a secure run are.
"""

import base64
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fodp.errors import LedgerError
from fodp.ledger.rows import Entry
from fodp.ledger.store import Store
from fodp.support.files import is_still

_SIZE = 8  # bytes of a hash, and of a step's number
_RECORD = 3 * _SIZE  # of the file: step, hash, and a checksum of both
_HEAD = 2**64 - 1  # the step of a file's first record, which says when the system was started
_LIVING, _TAKEN = ".tail", ".taken"  # files of a process that trains, and of one whose run another has taken over
Digests = dict[int, bytes]  # by step

TAKEN_OVER = "this run was resumed by another process, which goes on with it: this one stops here"


def to_data(digests: Mapping[int, bytes]) -> dict[str, Any]:
    """As a row has them: [first step, hashes] for each stretch of steps without a gap."""
    stretches: list[tuple[int, bytearray]] = []
    for step in sorted(digests):
        if not stretches or step != stretches[-1][0] + len(stretches[-1][1]) // _SIZE:
            stretches.append((step, bytearray()))
        stretches[-1][1].extend(digests[step])
    return {"released": [[first, base64.b64encode(hashes).decode()] for first, hashes in stretches]}


def known(store: Store, run: str) -> Digests:
    """What the ledger knows of a run's steps. Of a step that has two hashes the older one holds."""
    found: Digests = {}
    for entry in store.found("run", run):  # the newest first
        for start, text in entry.data.get("released", ()):
            hashes = base64.b64decode(text)
            found |= {start + place // _SIZE: hashes[place : place + _SIZE] for place in range(0, len(hashes), _SIZE)}
    return found


class ReleaseLog:
    """What one process of a seeded run releases: hashes that are in no row yet are in the tail while it trains."""

    def __init__(self, store: Store, opened: Entry):
        self._store, self._run = store, opened.run
        self._before = opened.of_run.steps or 0  # steps that were charged before this process
        # Charged steps from here on that have no hash were never used; and from here on this process witnessed none.
        self._unused_from = self._next = int(opened.data["unused_from"])
        self._known: Digests | None = None  # of steps that earlier processes took; read when it is asked for
        self._pending: Digests = {}  # hashes that are in no row yet
        self._path, self._handle = _path(store, opened.run, f"{opened.id}{_LIVING}"), -1
        self.open()

    def open(self) -> None:
        """Make the tail, before the first step is taken: without it nobody could tell that no step was."""
        if self._handle < 0:
            with self._plainly():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
                self._write(_HEAD, _boot(self._store) or bytes(_SIZE))

    def repeats(self, step: int) -> bool:
        """May the charged steps from this one on be taken again? Only where it is known what each released."""
        found = self._known_steps()
        return all(place in found for place in range(step, min(self._unused_from, self._before)))

    def see(self, step: int, tags: bytes) -> None:
        """Write down what a step is about to use; raise if it released something else before, or if nobody knows.

        Raises too once another process goes on with the run.
        """
        hashed = _keyed(self._store, b"release", self._run, step.to_bytes(_SIZE, "little") + tags)
        before = self._known_steps().get(step)
        if before is None and step >= self._next:
            self.open()
            with self._plainly():
                self._write(step, hashed)
                # In this order: whoever takes the run over renames the file first, and reads it then.
                mine = is_still(self._handle, self._path)
            if not mine:
                raise LedgerError(TAKEN_OVER)
            self._pending[step], self._next = hashed, step + 1
        elif before is None:
            raise LedgerError(
                f"step {step} of this seeded run was charged, and the ledger does not know what it released, so it "
                "cannot be repeated: go on from a checkpoint, or start a new run with another seed"
            )
        elif before != hashed:
            raise LedgerError(
                f"step {step} of this seeded run was charged before, and it would now release something else under the "
                "same noise: who sees both takes the noise off. What has changed since? It may be another loss, model, "
                "augmentation, number of copies, owners, optimizer, rate, collate_fn or data; or, in the last bits "
                "alone, another engine, microbatch, number of threads or processes, machine or device. Resume with "
                "everything as it was, or start a new run with another seed"
            )

    def pending(self) -> dict[str, Any]:
        """What the next row of the run says of its steps since the row before."""
        return to_data(self._pending)

    def forget_pending(self) -> None:
        """The hashes are in a row now."""
        self._pending.clear()
        if self._handle >= 0:
            with self._plainly():
                os.ftruncate(self._handle, _RECORD)

    def remove(self) -> None:
        """The process has stopped in good order."""
        if self._handle >= 0:
            with suppress(OSError):
                if is_still(self._handle, self._path):
                    self._path.unlink()
            os.close(self._handle)
            self._handle = -1

    def _known_steps(self) -> Digests:
        if self._known is None:
            self._known = known(self._store, self._run) if self._before else {}
        return self._known

    def _write(self, step: int, hashed: bytes) -> None:
        if os.write(self._handle, _record(self._store, self._run, step, hashed)) != _RECORD:
            raise OSError(errno.ENOSPC, "the disk is full")

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"{self._path}, where a seeded run keeps hashes of its releases, could not be written "
                f"({error.strerror or error}): nothing of this step was used; free the disk or the file, then resume"
            ) from None


class Left(NamedTuple):
    """What the processes before this one left: hashes that are in no row, and the files that had them.

    Charged steps from `unused_from` on that have no hash were never used.
    """

    digests: Digests
    unused_from: int
    files: list[Path]


def left_behind(store: Store, run: str) -> Left:
    """Take a run over from the process that had it last; within `writing()`, so that only one does."""
    state = store.of_run(run)
    last, newest = store.entry(state.opened), store.entry(state.used)
    found, whole, files = _taken_over(store, run, state.opened)
    whole |= newest.kind == "settle" and newest.id > state.opened  # it stopped in good order, and said everything
    before = last.data.get("unused_from") if whole else None
    return Left(found, (state.steps or 0) if before is None else before, files)


def _taken_over(store: Store, run: str, opened: int) -> tuple[Digests, bool, list[Path]]:
    """What is in the files of earlier processes; whether all is there that the last one, of row `opened`, used."""
    found: Digests = {}
    whole, files, boot = False, [], _boot(store)
    pattern = _path(store, run, "*")
    for file in sorted(pattern.parent.glob(pattern.name)):
        with suppress(OSError):
            if file.name.endswith(_LIVING):
                file = file.replace(file.with_name(file.name.removesuffix(_LIVING) + _TAKEN))
            records = dict(reversed(list(_records(store, run, file.read_bytes()))))
            head = records.pop(_HEAD, None)
            # After a crash of the system the end of a file that was not synced may be lost.
            whole |= file.name.endswith(f".{opened}{_TAKEN}") and head == boot
            found = records | found
            files.append(file)
    return found, whole, files


def _records(store: Store, run: str, content: bytes) -> Iterator[tuple[int, bytes]]:
    """Whole records of this run and ledger; half a record at the end, or a damaged one, is skipped."""
    for start in range(0, len(content) - _RECORD + 1, _RECORD):
        step, hashed = int.from_bytes(content[start : start + _SIZE], "little"), content[start + _SIZE :][:_SIZE]
        if content[start : start + _RECORD] == _record(store, run, step, hashed):
            yield step, hashed


def _record(store: Store, run: str, step: int, hashed: bytes) -> bytes:
    record = step.to_bytes(_SIZE, "little") + hashed
    return record + _keyed(store, b"tail", run, record)


def _boot(store: Store) -> bytes | None:
    """A hash of when this system was started: the same until it crashes. None where a system does not tell."""
    with suppress(OSError):
        return _keyed(store, b"boot", "", Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return None


def _path(store: Store, run: str, end: str) -> Path:
    """Beside the ledger's mark: where the ledger is, or among the user's own files for a ledger on a server."""
    name = _keyed(store, b"file", run, b"").hex()
    return store.mark.with_name(f"{store.mark.name.removesuffix('.mark')}.{name}.{end}")


def _keyed(store: Store, kind: bytes, run: str, content: bytes) -> bytes:
    text = run.encode()
    place = len(text).to_bytes(_SIZE, "little") + text + content
    return hashlib.blake2b(place, digest_size=_SIZE, key=store.header.key, person=b"fodp." + kind).digest()
