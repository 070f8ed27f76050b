"""Files that appear complete, durably, or not at all."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fodp.errors import ConfigurationError
from fodp.support.forks import Owner

_SPARE = 2**20  # bytes kept for the small files that a run still writes when the disk is full


@contextmanager
def atomically(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """A file beside `path`, readable by its owner only, that takes the name when the block ends well.

    A crash or a full disk leaves what had the name before. With `keep` it stays anyway: whoever was first wins.
    Where `make_room` was called before, the file is the room that was made: open it with "r+b", write, and truncate.
    """
    room = _room(path)
    if not keep and room.exists():
        yield room
        _sync(room, os.O_RDWR)
        _exchange(room, path)
    else:
        yield from _fresh(path, keep)
    with suppress(PermissionError):  # not every system opens folders
        _sync(path.parent, os.O_RDONLY)


def _fresh(path: Path, keep: bool) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        _sync(part, os.O_RDWR)  # some systems make durable only what is open for writing
        if keep:
            with suppress(FileExistsError):
                os.link(part, path)
        else:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def make_room(path: Path, size: int) -> None:
    """Take so many bytes of the disk now, for what `atomically(path)` will write; OSError if they are not there.

    Beside that a little is kept for small files. The room stays: what had the name becomes the room of what comes next.
    """
    for file, wanted in ((_room(path), size), (_spare(path), _SPARE)):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(handle).st_size < wanted:
                _allocate(handle, wanted)
        except OSError:
            file.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


def give_spare_back(path: Path) -> None:
    """Let small files have what `make_room` kept for them."""
    with suppress(OSError):  # it is in nobody's way
        _spare(path).unlink(missing_ok=True)


def give_room_back(path: Path) -> None:
    """Keep no room any longer."""
    for file in (_room(path), _old(path), _spare(path)):
        with suppress(OSError):  # it is in nobody's way
            file.unlink(missing_ok=True)


def _room(path: Path) -> Path:
    return path.with_name(f"{path.name}.room.part")


def _spare(path: Path) -> Path:
    return path.with_name(f"{path.name}.spare.part")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old.part")


def _exchange(room: Path, path: Path) -> None:
    """Give the room's content the name; what had it becomes the room, where the system can link files."""
    old = _old(path)
    old.unlink(missing_ok=True)
    with suppress(OSError):  # nothing there yet, or no links here
        os.link(path, old)
    os.replace(room, path)
    if old.exists():
        os.replace(old, room)


def _allocate(handle: int, size: int) -> None:
    """Blocks of the disk, not only a length."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
        return
    zeros = bytes(2**20)
    os.lseek(handle, 0, os.SEEK_END)
    while (missing := size - os.fstat(handle).st_size) > 0:
        os.write(handle, zeros[:missing])


def is_address(path: object) -> bool:
    """Is this a server's address, and not a file?"""
    return str(path).startswith(("postgresql://", "postgres://"))


def refuse_unwritable(path: Path) -> None:
    """Raise unless a file of this name can be written, with the folders that are still to be made."""
    reason = ""
    try:
        folder = next((parent for parent in path.parents if parent.exists()), path.parent)
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            reason = "it is a folder" if path.is_dir() else f"{folder} is no folder that may be written into"
    except (OSError, ValueError) as error:  # a name too long, or with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        raise ConfigurationError(f"{path} cannot be written: {reason}; name a file in a folder of your own")


class Hold:
    """A file that one living process holds: the system lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None
        self._owner = Owner()

    def take(self, about: str) -> bool:
        """Hold the file, with a line about who does; False if another process holds it."""
        if not self._owner.is_here:  # a fork shares the open file, and does not hold it
            self._handle, self._owner = None, Owner()
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if not _locked(handle):
                os.close(handle)
                return False
            if is_still(handle, self.path):
                os.truncate(handle, 0)
                os.write(handle, about.encode())
                self._handle = handle
            else:  # whoever held it has just removed it
                os.close(handle)
        return True

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._handle is not None

    def leave(self) -> None:
        """Let go, and remove the file."""
        if self._handle is not None and self._owner.is_here:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._handle)
            self._handle = None


def _locked(handle: int) -> bool:
    """Lock an open file for this process alone; False if another has."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_still(handle: int, path: Path) -> bool:
    """Does the name still belong to the open file?"""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path, access: int) -> None:
    handle = os.open(path, access)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
