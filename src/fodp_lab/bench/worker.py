"""One contender in a process of its own: waits for a number of steps, takes them, says how long each took.

Spoken by lines of JSON: the specification on the command line, then `{"steps": n}` on stdin, answers on stdout.
"""

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any


def serve(spec: dict[str, Any]) -> None:
    """Build the contender's step and take steps until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        step, parameters = _build(spec)
        answer(parameters=parameters, idle_mb=resident_mb("VmRSS"))
        for line in sys.stdin:
            start, count = time.perf_counter(), json.loads(line)["steps"]
            seconds = [_timed(step) for _ in range(count)] if "device" not in spec else _burst(step, count, spec)
            answer(seconds=seconds, wall=time.perf_counter() - start, peak_mb=resident_mb("VmHWM"))
    except Exception as error:  # a missing peer, a layer it does not know: the parent decides what that means
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _build(spec: dict[str, Any]) -> Any:
    import torch

    from fodp_lab.bench.contenders import build
    from fodp_lab.bench.workloads import WORKLOADS, mlp

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    workload = WORKLOADS[spec["workload"]]
    if "batch" in spec:
        workload = replace(workload, batch=spec["batch"])
    if "width" in spec:
        workload = replace(workload, model=partial(mlp, spec["width"]))
    there = {"device": spec["device"]} if "device" in spec else {}
    return build(spec["kind"], workload, {**spec["settings"], **there})


def _timed(step: Any) -> float:
    """Processor time of all threads: the wall time of an idle machine, and no credit for a second thread."""
    start = time.process_time()
    step()
    return time.process_time() - start


def _burst(step: Any, count: int, spec: dict[str, Any]) -> list[float]:
    """Seconds by the clock of a burst of steps, shared equally: a device works on while the host goes ahead."""
    import torch

    from fodp.support import devices

    device = torch.device(spec["device"])
    devices.finish(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    devices.finish(device)
    return [(time.perf_counter() - start) / count] * count


def resident_mb(field: str) -> float | None:
    """Resident memory now (VmRSS) or at most (VmHWM) in MB; None where there is no /proc.

    Not `getrusage`: its maximum is inherited from the parent across fork and exec.
    """
    try:
        with open("/proc/self/status") as file:
            kilobytes = next(line.split()[1] for line in file if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return None
    return int(kilobytes) / 1024


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
