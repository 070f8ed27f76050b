"""A bar or a line on stderr for what takes longer than expected."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 2.0  # seconds without a bar


@contextmanager
def slow_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count with the function that is given; on a terminal a bar appears after two seconds, and goes at the end."""
    from rich.console import Console
    from rich.progress import Progress

    console, count = Console(stderr=True), 0
    bar = Progress(console=console, transient=True)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(_PATIENCE, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()

    def tick() -> None:
        nonlocal count
        count += 1
        if count % 1000 == 0:
            bar.update(task, completed=count)

    try:
        yield tick
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()  # it may be about to begin
            bar.stop()


@contextmanager
def slow_note(what: str) -> Iterator[None]:
    """Say on a terminal's stderr, after two seconds, what is being done and for how long; gone at the end."""
    if not sys.stderr.isatty():
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        pause, said = _PATIENCE, False
        while not done.wait(pause):
            print(f"\r{what}, {time.monotonic() - start:.0f} s so far", end="", file=sys.stderr, flush=True)
            pause, said = 1.0, True
        if said:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
