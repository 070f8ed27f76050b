"""Workers of a Ray cluster, or of a Ray of our own on this machine."""

import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fodp.errors import ConfigurationError
from fodp.support import checks
from fodp.support.extras import need
from fodp.workers import WorkerDied

ATTEMPTS = 3  # a run whose worker dies so often will kill the next one too
_LOCAL = "local"
_PATIENCE = 1.0  # seconds between two looks at whether the pool was closed
_PASSED_ON = ("FODP_DATA",)  # what runs read from the environment


class RayPool:
    """One task of one processor per run. A run whose worker dies is begun again, `ATTEMPTS` times in all.

    Ray starts with the first run. A Ray of our own (`local`) has no dashboard, tells nobody that it is used, and leaves
    no file; of a cluster that is there already its owner decides. A cluster's machines need the same fodp and,
    for data sets in files, the same folder.
    """

    def __init__(self, address: str, jobs: int | None = None):
        need("ray", "running on a Ray cluster (--ray)", extra="ray")
        self._address = _checked(address)
        self._jobs = jobs
        self._folder: str | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closing = threading.Event()
        self._call: Any = None

    @property
    def jobs(self) -> int:
        """As many as were asked for, else the cluster's processors."""
        if self._jobs is None:
            self._start()
            import ray

            self._jobs = max(1, int(ray.cluster_resources().get("CPU", 1)))
        return self._jobs

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it on a worker of the cluster; at most `jobs` tasks are in Ray's hands at a time."""
        self._start()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.jobs, "ray")
        return self._threads.submit(self._see_through, pickle.dumps((function, arguments)))

    def close(self, *, at_once: bool) -> None:
        """Wait for what is under way, or cancel it; then leave the cluster, or end our own."""
        if at_once:
            self._closing.set()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._call is not None:
            import ray

            ray.shutdown()
            self._call = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _see_through(self, work: bytes) -> Any:
        """One run, from its first attempt to its result."""
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        died: Exception | None = None
        for _ in range(ATTEMPTS):
            task = self._call.remote(work, os.getcwd(), sys.path, _environment())
            try:
                return self._wait_for(task)
            except RayTaskError as error:
                raise (error.cause or error) from None
            except (WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
                died = error
            finally:
                if self._closing.is_set():
                    ray.cancel(task, force=True)
        raise WorkerDied(
            f"the worker of a run died {ATTEMPTS} times, perhaps for lack of memory ({type(died).__name__}): start "
            "again, with fewer --jobs or on larger machines; what is recorded stays"
        )

    def _wait_for(self, task: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError

        while not self._closing.is_set():
            try:
                return ray.get(task, timeout=_PATIENCE)
            except GetTimeoutError:
                continue
        raise WorkerDied("the pool was closed")

    def _start(self) -> None:
        if self._call is not None:
            return
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing of a run is reported to anybody
        words: dict[str, Any] = {"address": self._address}
        if self._address == _LOCAL:
            self._folder = tempfile.mkdtemp(prefix="ray-")
            words |= dict(num_cpus=self._jobs or os.cpu_count(), include_dashboard=False, _temp_dir=self._folder)
        import ray

        before = signal.getsignal(signal.SIGTERM)
        try:
            _knock(self._address)
            ray.init(log_to_driver=False, logging_level="ERROR", **words)
        except Exception as error:
            self.close(at_once=True)
            why = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"no Ray cluster answers at --ray {self._address} ({why[:200]}): start one with `ray start --head`, or "
                "say --ray local"
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGTERM, before)  # Ray has put its own there
        # Ray's own retries have no end where memory is short, and an exception of a run is no reason for one.
        self._call = ray.remote(num_cpus=1, max_retries=0)(_on_worker)


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address in (_LOCAL, "auto") or (host and "/" not in host and port.isascii() and port.isdecimal()):
        return address
    raise ConfigurationError(f"--ray takes local, auto or HOST:PORT of a cluster, got {checks.shown(address)}")


def _knock(address: str) -> None:
    """Ray would try for minutes where nobody is."""
    if ":" in address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass


def _environment() -> dict[str, str]:
    return {name: str(Path(os.environ[name]).resolve()) for name in _PASSED_ON if os.environ.get(name)}


def _on_worker(work: bytes, folder: str, path: list[str], environment: dict[str, str]) -> Any:
    """What a worker does: look where its driver looks, then work on one thread."""
    os.environ.update(environment)
    sys.path.extend(place for place in (folder, *path) if place and place not in sys.path)
    function, arguments = pickle.loads(work)
    import torch

    torch.set_num_threads(1)
    return function(*arguments)
