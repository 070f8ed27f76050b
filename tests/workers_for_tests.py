"""What workers are given in tests: functions that can be imported by name, wherever they run."""

import os
import signal
import time
from pathlib import Path


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
