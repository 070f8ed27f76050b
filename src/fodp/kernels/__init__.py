"""Hot loops in C, compiled once per machine where a C compiler exists: normals (`normals.c`), the pass over a memory
(`recall.c`), squared norms (`squares.c`), norms and sums of an embedding's gradients (`tables.c`). What each of them
saves is in docs/performance.md.

Each does in one reading of memory what NumPy or PyTorch do in several. Their callers hold the same arithmetic
in NumPy or PyTorch, which is the reference and the fallback; results agree to float rounding. The loops are
compiled at their first use (a second or two) into the user's cache folder and are used only if they reproduce the
reference (`checks.py`). `FODP_KERNELS=0` in the environment does without them.
"""

import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fodp.kernels.checks import is_right
from fodp.kernels.library import Library

SOURCES = {file.name: file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.[ch]"))}

_FLAGS = "-O3 -march=native -fwrapv -fno-math-errno -fno-trapping-math -fopenmp-simd -shared -fPIC -Wno-psabi"


@functools.cache
def library() -> Library | None:
    """The compiled loops, None where there are none or they do not reproduce the reference."""
    if os.environ.get("FODP_KERNELS") == "0" or sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        found = Library(_compiled())
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):  # RuntimeError: no home folder
        return None
    return found if is_right(found) else None


def library_for(*tensors: torch.Tensor) -> Library | None:
    """The compiled loops, None also if they cannot read these tensors."""
    return library() if can_read(*tensors) else None


def can_read(*tensors: torch.Tensor) -> bool:
    """Whether compiled loops can read these: float32 in main memory, side by side, and at least one number."""
    for tensor in tensors:  # no generator: this is asked a dozen times in every step
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.numel() == 0 or not tensor.is_contiguous():
            return False
    return True


def _compiled() -> Path:
    """The library's file in the cache folder of this user, for this source, compiler and processor."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler")
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = "".join(sorted({line for line in processors if line.startswith(("flags", "Features"))}))
    identity = "\n".join([*SOURCES.values(), _FLAGS, os.path.realpath(compiler), platform.machine(), cpu])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fodp"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name, text in SOURCES.items():
                Path(scratch, name).write_text(text, encoding="utf-8")
            result = Path(scratch, "kernels.so")
            files = sorted(str(file) for file in Path(scratch).glob("*.c"))
            command = [compiler, *_FLAGS.split(), *files, "-o", str(result), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            os.replace(result, path)  # at once: other processes may be doing the same
    for owned in (folder, path):  # nobody else may have put it there
        about = owned.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{owned} can be written by others")
    return path
