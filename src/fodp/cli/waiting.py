"""A bar on stderr for what takes longer than expected."""

import threading
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
