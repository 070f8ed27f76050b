"""Runs in parallel processes of one thread each; what is recorded is not computed again."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fodp._checks import PrivacyError
from fodp_lab.paper.code_version import code_of
from fodp_lab.paper.records import Records, alone
from fodp_lab.paper.spec import RunSpec


class Runner:
    """Computes the runs that are missing from a file of records, and appends each as soon as it is done.

    Stop it at any moment and start it again: finished runs stay, those under way are computed anew. One
    runner at a time writes to a file. `modules` are imported first, for methods of your own. Records `beside` the file
    count as computed and stay where they are.
    """

    def __init__(
        self,
        path: str | Path,
        jobs: int | None = None,
        *,
        quiet: bool = False,
        modules: Sequence[str] = (),
        beside: Iterable[dict[str, Any]] = (),
    ):
        self.records = Records(path, beside=beside)
        self.jobs = jobs or os.cpu_count() or 1
        self._modules, self._quiet = tuple(modules), quiet
        # Started afresh, not forked: torch's thread pools do not survive a fork.
        self._pool = ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), _end_with_parent)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:  # what is under way is lost anyway; do not make Ctrl-C wait for it
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def run(self, specs: Iterable[RunSpec], title: str) -> None:
        """See to it that every spec has a record of the present code."""
        wanted = {spec.key: spec for spec in specs}  # a run that several experiments share is computed once
        missing = [spec for key, spec in wanted.items() if self.records.get(key, code_of(spec)) is None]
        with alone(self.records.path), progress_bar(self._quiet) as bar:
            task = bar.add_task(title, total=len(wanted), completed=len(wanted) - len(missing), note="")

            def done(note: str) -> None:
                bar.update(task, advance=1, note=note)
                if not bar.console.is_terminal:  # a log file gets a line per run instead of a moving bar
                    bar.console.print(f"{title}: {bar.tasks[task].completed:g} of {len(wanted)}: {note}")

            self._compute(missing, done)

    def _compute(self, missing: list[RunSpec], done: Callable[[str], None]) -> None:
        under_way: set[Future[dict[str, Any]]] = set()
        for spec in missing:
            under_way.add(self._pool.submit(_in_worker, spec, self._modules))
            if len(under_way) >= 2 * self.jobs:  # the next ones wait at the workers' door, not hundreds
                under_way = self._collect(under_way, done)
        while under_way:
            under_way = self._collect(under_way, done)

    def _collect(
        self, under_way: set[Future[dict[str, Any]]], done: Callable[[str], None]
    ) -> set[Future[dict[str, Any]]]:
        finished, rest = wait(under_way, return_when=FIRST_COMPLETED)
        for future in finished:
            try:
                record = future.result()
            except BrokenProcessPool:
                raise PrivacyError(
                    "a worker process was killed, perhaps for lack of memory: start again, with fewer --jobs; what is "
                    "recorded stays"
                ) from None
            self.records.append(record)
            done(f"{record['algorithm']} on {record['run']['dataset']}: {record['final_accuracy']:.4f}")
        return rest


def progress_bar(quiet: bool) -> Progress:
    """Done, total, time left and the last result, on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True, quiet=quiet),
    )


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_worker(spec: RunSpec, modules: Sequence[str]) -> dict[str, Any]:
    import importlib

    from fodp_lab.paper import twin  # noqa: F401  registers its method
    from fodp_lab.paper.execute import execute

    for name in modules:
        importlib.import_module(name)
    return execute(spec)
