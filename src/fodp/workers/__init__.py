"""Who computes many runs: processes of this machine, or the workers of a Ray cluster. One thread each.

A pool takes a function that can be imported, its arguments, and gives a future back; nobody but the caller writes
anything down. What a run raises is raised by its future.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fodp.errors import PrivacyError


class WorkerDied(PrivacyError):
    """A worker ended in the middle of a run, and the run will not be tried again."""


class Pool(Protocol):
    """Runs functions elsewhere, at most `jobs` at a time."""

    @property
    def jobs(self) -> int:
        """How many run at once; what is submitted beyond waits."""
        ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call the function, which can be imported by its name, with these arguments on a worker."""
        ...

    def close(self, *, at_once: bool) -> None:
        """End the workers: when they have done what is under way, or at once and without it."""
        ...


def open_pool(jobs: int | None = None, ray: str | None = None) -> Pool:
    """Processes (as many as there are cores, unless `jobs` says), or the Ray cluster at this address."""
    if ray is not None:
        from fodp.workers.on_ray import RayPool

        return RayPool(ray, jobs)
    from fodp.workers.processes import ProcessPool

    return ProcessPool(jobs)
