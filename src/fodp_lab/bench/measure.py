"""Rounds over worker processes, whose steps are interleaved, and statistics of paired ratios."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scipy.stats import quantile_test

from fodp_lab.bench.contenders import Contender

Say = Callable[[str], None]

ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}
BURST_SECONDS, LONGEST_BURST = 0.4, 30
TURNS = 3  # in a round


class WorkerError(RuntimeError):
    """What went wrong in a worker, in one line."""


class Worker:
    """A process that holds one contender, idle until asked for steps; all workers share one core."""

    def __init__(self, spec: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fodp_lab.bench.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        # JAX takes as many threads as it sees cores when it starts; on one it is seven times faster.
        if spec["kind"] == "jax-privacy":
            self._stay_on_one_core()
        self.parameters = 0
        self.processor_seconds = self.wall_seconds = 0.0
        self.fastest = math.inf  # seconds of a step
        self.idle_mb: float | None = None
        self.peak_mb: float | None = None

    def wait_until_ready(self) -> None:
        """Until model and data are there."""
        said = self._answer()
        self.parameters, self.idle_mb = said["parameters"], said["idle_mb"]
        self._stay_on_one_core()  # only now: starting may use every core

    def _stay_on_one_core(self) -> None:
        """The same for all workers, of which one runs at a time."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})

    def steps(self, count: int) -> list[float]:
        """Take steps in a row; processor seconds of each."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"steps": count}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the answer says of what
        said = self._answer()
        self.peak_mb = said["peak_mb"]
        self.processor_seconds += sum(said["seconds"])
        self.wall_seconds += said["wall"]
        self.fastest = min(self.fastest, *said["seconds"])
        return list(said["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the process ended with code {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise WorkerError(said["error"])
        return said

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def interleaved(
    specs: dict[str, dict[str, Any]],
    warm_up: dict[str, int],
    rounds: int,
    turns: int,
    burst_seconds: float,
    say: Say,
    settle: dict[str, int] | None = None,
) -> tuple[dict[str, list[float]], dict[str, Worker], dict[str, str]]:
    """Seconds per step of every contender in every round; the closed workers of the first; who failed and why.

    Before they are timed all take their `warm_up` steps, in the first round those of `settle`.

    Every round has new processes: where its memory happens to lie makes a process faster or slower by several
    percent for all its life, so turns of one process agree with each other more than with the truth.
    """
    times: dict[str, list[float]] = {name: [] for name in specs}
    first: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        workers = {name: Worker(spec) for name, spec in specs.items() if name not in failed}
        first = first or workers
        try:
            failed |= _warmed_up(workers, warm_up if number or settle is None else settle, say)
            ready = {name: worker for name, worker in workers.items() if name not in failed}
            found = _turns(ready, turns, burst_seconds, random.Random(number), partial(_said, say, number, rounds))
        finally:
            for worker in workers.values():
                worker.close()
        for name, seconds in found.items():
            times[name].append(seconds)
    return {name: seconds for name, seconds in times.items() if name not in failed}, first, failed


def _said(say: Say, number: int, rounds: int, text: str) -> None:
    say(f"round {number + 1} of {rounds}: {text}")


def _warmed_up(workers: dict[str, Worker], warm_up: dict[str, int], say: Say) -> dict[str, str]:
    """Who failed, and why; all others are ready before the first is timed."""
    failed = {}
    for name, worker in workers.items():
        say(f"starting {name}")
        try:
            worker.wait_until_ready()
            worker.steps(warm_up[name])
        except WorkerError as error:
            failed[name] = str(error)
    return failed


def _turns(
    workers: dict[str, Worker], turns: int, burst_seconds: float, order: random.Random, say: Say
) -> dict[str, float]:
    """Median seconds per step. In each turn every contender takes a burst of steps, in a new order, and nothing else
    runs meanwhile. A burst, because training runs with warm caches: another contender's leftovers are not its cost.
    """
    bursts: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(turns):
        for name in order.sample(list(workers), len(workers)):
            say(name)
            count = max(2, min(LONGEST_BURST, round(burst_seconds / workers[name].fastest)))
            bursts[name].append(statistics.median(workers[name].steps(count)))
    return {name: statistics.median(medians) for name, medians in bursts.items()}


def table(
    workload: str,
    contenders: Sequence[Contender],
    rounds: int,
    turns: int,
    burst_seconds: float,
    settle: int,
    say: Say,
) -> dict[str, Any]:
    """All contenders on one workload: times by round, memory, and which peers could not take part.

    Plain training and this library take at least `settle` steps in the first round, before their memory is
    looked at: it is comparable after as many lots.
    """
    named = {c.name: c for c in contenders if workload in c.workloads}
    times, workers, failed = interleaved(
        {name: c.spec(workload) for name, c in named.items()},
        {name: c.warm_up for name, c in named.items()},
        rounds,
        turns,
        burst_seconds,
        lambda text: say(f"{workload}: {text}"),
        {name: c.warm_up if c.is_peer else max(c.warm_up, settle) for name, c in named.items()},
    )
    ours = [f"{name}: {why}" for name, why in failed.items() if not named[name].is_peer]
    if ours:
        raise WorkerError(ours[0])
    rows = {
        name: {"milliseconds": [round(1e3 * t, 4) for t in seconds], **_memory(named[name], workers[name])}
        for name, seconds in times.items()
    }
    waited = statistics.median(workers[name].wall_seconds / workers[name].processor_seconds for name in times)
    sizes = {w.parameters for name, w in workers.items() if name in times}
    assert len(sizes) == 1, "the contenders train different models"
    return {"parameters": sizes.pop(), "contenders": rows, "failed": failed, "waited": waited}


def peak_memory(workload: str, contender: Contender, batch: int, steps: int = 4) -> dict[str, Any]:
    """Memory of a fresh process that takes some steps with another batch size."""
    worker = Worker(contender.spec(workload, batch=batch))
    try:
        worker.wait_until_ready()
        worker.steps(steps)
    finally:
        worker.close()
    return _memory(contender, worker)


def _memory(contender: Contender, worker: Worker) -> dict[str, Any]:
    """Resident memory before the first step, and at most."""
    kept = {"kind": contender.kind, "window": contender.rows}
    return {**kept, "idle_mb": worker.idle_mb, "peak_mb": worker.peak_mb}


def paired(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios within each round, with its interval."""
    return median_interval([a / b for a, b in zip(over, under, strict=True)])


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The median and an interval that holds the true one with this probability, from order statistics alone.

    Below six values no such interval exists; then it is their whole range.
    """
    low, high = quantile_test(values, p=0.5).confidence_interval(level)
    if math.isnan(low):
        low, high = min(values), max(values)
    return statistics.median(values), float(low), float(high)
