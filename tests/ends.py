"""`make ends`: do the processes of `torchrun -m fodp train` end as they should, again and again, on a busy machine?

A thread of PyTorch's that outlives its process group may free a tensor while Python ends, which aborts the process
("terminate called without an active exception") though all files are written: once in eight runs, before
`fodp.ranks.leaving`. The cause is tested by itself (tests/ranks/test_ends.py: no thread is left); this script asks real
ends. Runs beside each other are each other's load.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ["train", "--dataset", "digits", "--method", "fo-dp-sgd", "--target-epsilon", "4", "--epochs", "2",
         "--seed", "3", "--quiet"]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def started(folder, ranks):
    """One training in several processes, as a user starts it."""
    log = (folder / "log").open("w")
    words = [*TORCHRUN, "--nproc-per-node", str(ranks), "-m", "fodp", *WORDS, "--out", str(folder / "run")]
    return subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def search(ends, at_once, ranks):
    """How many of so many runs did not end with 0; the runs take the numbers of ranks in turn."""
    done = bad = 0
    top = Path(tempfile.mkdtemp(prefix="fodp-ends-"))
    while done < ends:
        batch = []
        for number in range(done, min(done + at_once, ends)):
            folder = Path(tempfile.mkdtemp(dir=top))
            count = ranks[number % len(ranks)]
            batch.append((folder, count, started(folder, count)))
        for folder, count, run in batch:
            code = run.wait()
            done += 1
            if code:
                bad += 1
                print(f"run {done} on {count} ranks: exit code {code}\n{(folder / 'log').read_text()}", flush=True)
            shutil.rmtree(folder)
        print(f"{done} runs have ended, {bad} of them not with 0", flush=True)
    shutil.rmtree(top)
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=200, help="runs")
    parser.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="numbers of processes, in turn")
    options = parser.parse_args()
    sys.exit(search(options.ends, options.at_once, options.ranks) > 0)
