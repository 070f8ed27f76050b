"""What workers are given in tests: functions that can be imported by name, wherever they run."""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_MARK = "FODP_TEST_STARTED_BY"


def who(value):
    """The value back, and who has seen it."""
    import torch

    return value, os.getpid(), torch.get_num_threads(), os.environ.get("FODP_DATA")


def refuse(text):
    raise ValueError(text)


def die(folder, times):
    """Kill this worker in the middle, as often as said; each attempt leaves a file."""
    Path(folder, f"{time.monotonic_ns()}").touch()
    if len(list(Path(folder).iterdir())) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def sleep(seconds):
    time.sleep(seconds)


@contextlib.contextmanager
def everything_ended() -> Iterator[dict[str, str]]:
    """An environment for processes that a test starts; what is left of them at the end is killed, by its id.

    Ray's agents outlive a driver that is killed, in sessions of their own; the environment they inherit tells them.
    """
    mark = secrets.token_hex(8)
    try:
        yield {**os.environ, _MARK: mark}
    finally:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
