"""Files that appear complete, durably, or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomically(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """A fresh file beside `path`, readable by its owner only, that takes the name when the block ends well.

    A crash or a full disk leaves what had the name before. With `keep` it stays anyway: whoever was first wins.
    """
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
        with suppress(PermissionError):  # not every system opens folders
            _sync(path.parent, os.O_RDONLY)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path, access: int) -> None:
    handle = os.open(path, access)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
