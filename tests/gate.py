"""Times the gate as a stranger meets it:  python tests/gate.py [--quick-only]

Clones this commit into an empty folder, runs `.ci/run` there with a new environment, then `make quick`, and prints how
long each took beside its aim. Exit code 1: one of them failed. Missing an aim is no failure: machines differ.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
AIMS = {"bash .ci/run": 8 * 60, "make quick": 90}


def main() -> int:
    """Clone, run, print."""
    commands = list(AIMS)[1:] if "--quick-only" in sys.argv else list(AIMS)
    failed = False
    with tempfile.TemporaryDirectory(prefix="fodp-gate-") as folder:
        clone = Path(folder) / "fodp"
        subprocess.run(["git", "clone", "--quiet", str(HERE), str(clone)], check=True)
        beside = HERE.parent / "shared"
        if beside.is_dir():
            os.symlink(beside, clone.parent / "shared")
        for command in commands:
            start = time.monotonic()
            code = subprocess.run(command.split(), cwd=clone, stdin=subprocess.DEVNULL).returncode
            took = time.monotonic() - start
            failed |= code != 0
            result = "passed" if code == 0 else f"failed with {code}"
            print(f"{command}: {result} in {took:.0f} s (aim: at most {AIMS[command]} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
