"""Runs in parallel, on one thread each; what is recorded is not computed again."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fodp.errors import PrivacyError
from fodp.workers import open_pool
from fodp_lab.paper.code_version import code_of
from fodp_lab.paper.records import Records, alone
from fodp_lab.paper.spec import RunSpec


class Runner:
    """Computes the runs that are missing from a file of records, and appends each as soon as it is done.

    Stop it at any moment and start it again: finished runs stay, those under way are computed anew. One
    runner at a time writes to a file, and none of its workers does. They are processes, or with `ray`, the address of
    a cluster, its. `modules` are imported there first, for methods of your own. Records `beside` the file count as
    computed and stay where they are.
    """

    def __init__(
        self,
        path: str | Path,
        jobs: int | None = None,
        *,
        quiet: bool = False,
        modules: Sequence[str] = (),
        beside: Iterable[dict[str, Any]] = (),
        ray: str | None = None,
    ):
        self.records = Records(path, beside=beside)
        self._modules, self._quiet = tuple(modules), quiet
        self._codes: dict[str, str] = {}  # what workers must have, by run
        self._pool = open_pool(jobs, ray)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._pool.close(at_once=kind is not None)

    @property
    def jobs(self) -> int:
        """How many runs are computed at a time."""
        return self._pool.jobs

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
        self._codes = {spec.key: code_of(spec) for spec in missing}
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
            record = future.result()
            if record["code"] != self._codes[record["key"]]:
                raise PrivacyError(
                    f"a worker has other code of {record['algorithm']} than this process: install the same fodp there; "
                    "its record was not kept"
                )
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


def _in_worker(spec: RunSpec, modules: Sequence[str]) -> dict[str, Any]:
    import importlib

    from fodp_lab.paper import twin  # noqa: F401  registers its method
    from fodp_lab.paper.execute import execute

    for name in modules:
        importlib.import_module(name)
    return execute(spec)
