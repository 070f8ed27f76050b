"""The paper's 250-epoch CIFAR-10 run as users start it, by the clock."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fodp.errors import PrivacyError
from fodp_lab.bench.measure import ONE_THREAD, Say

COMMAND = "train --preset paper --dataset cifar10 --seed 0 --threads 1 --eval-every 1 --json --quiet"


def paper_run(repeats: int, say: Say) -> list[dict[str, Any]]:
    """`fodp train --preset paper` on one thread: seconds of the whole command and of training with evaluation."""
    if not os.environ.get("FODP_DATA"):
        raise PrivacyError("--paper-run trains on CIFAR-10: set FODP_DATA to the folder that holds it")
    rows = []
    for number in range(repeats):
        say(f"the paper's run: {number + 1} of {repeats}")
        with tempfile.TemporaryDirectory() as folder:
            start, used = time.perf_counter(), _processor_seconds()
            done = subprocess.run(
                [sys.executable, "-m", "fodp.cli.main", *COMMAND.split(), "--out", str(Path(folder) / "run")],
                env={**os.environ, **ONE_THREAD},
                capture_output=True,
                text=True,
            )
            seconds, used = time.perf_counter() - start, _processor_seconds() - used
        if done.returncode:
            raise PrivacyError(f"the paper's run failed: {done.stderr.strip().splitlines()[-1]}")
        result = json.loads(done.stdout.splitlines()[-1])
        kept = {name: result[name] for name in ("steps", "final_accuracy", "epsilon")}
        clocks = dict(command_seconds=seconds, processor_seconds=used, training_seconds=result["seconds"])
        rows.append({**clocks, **kept})
    return rows


def _processor_seconds() -> float:
    """What all finished child processes have used."""
    times = os.times()
    return times.children_user + times.children_system
