"""Signals that ask a run to end: it ends in good order, and a second one breaks off at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Ctrl-C, a job scheduler or container that stops the job, a terminal that was closed; not every system has all.
_ASKING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def orderly_stop(remember: Callable[[int], bool]) -> Iterator[None]:
    """While in here, give signals that ask for an end to `remember`; where it says False, break off at once.

    Breaking off raises KeyboardInterrupt with the signal's number. A SIGHUP that is ignored (`nohup`) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return

    def handle(number: int, frame: Any) -> None:
        if not remember(number):
            raise KeyboardInterrupt(number)

    before = {number: signal.getsignal(number) for number in _ASKING}
    asking = [n for n in _ASKING if n == signal.SIGINT or before[n] is not signal.SIG_IGN]
    for number in asking:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in asking:
            signal.signal(number, before[number] if before[number] is not None else signal.SIG_DFL)
