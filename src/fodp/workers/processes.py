"""Processes of this machine, started afresh."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from fodp.workers import WorkerDied


class _Noting(SpawnContext):
    """Starts processes afresh, not forked (torch's thread pools do not survive a fork), and knows which."""

    def __init__(self) -> None:
        self.started: list[BaseProcess] = []

    def Process(self, *args: Any, **words: Any) -> BaseProcess:  # type: ignore[override]
        """A new process."""
        self.started.append(super().Process(*args, **words))
        return self.started[-1]


class ProcessPool:
    """A process for each run at a time, and none that outlives this one. A killed process ends the whole pool."""

    def __init__(self, jobs: int | None = None):
        self._jobs = jobs or os.cpu_count() or 1
        self._context = _Noting()
        self._executor = ProcessPoolExecutor(self._jobs, self._context, _end_with_parent)

    @property
    def jobs(self) -> int:
        """As many processes."""
        return self._jobs

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it in the next process that is free."""
        inner = self._executor.submit(function, *arguments)
        outer: Future[Any] = Future()
        inner.add_done_callback(lambda done: _hand_on(done, outer))
        return outer

    def close(self, *, at_once: bool) -> None:
        """Wait for what is under way, or do not."""
        if at_once:  # what is under way is lost anyway; do not make Ctrl-C wait for it
            for process in self._context.started:
                if process.is_alive():
                    process.terminate()
        self._executor.shutdown(cancel_futures=True)


def _hand_on(done: Future[Any], outer: Future[Any]) -> None:
    if done.cancelled():
        outer.cancel()
        return
    error = done.exception()
    if isinstance(error, BrokenProcessPool):
        error = WorkerDied(
            "a worker process was killed, perhaps for lack of memory: start again, with fewer --jobs; what is recorded "
            "stays"
        )
    if error is None:
        outer.set_result(done.result())
    else:
        outer.set_exception(error)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
