"""Two hot loops in C (`loops.c`): Gaussian noise, and the pass over a memory. docs/performance.md says what each saves.

Each reads memory once where NumPy or PyTorch read it several times. The callers hold the same arithmetic in NumPy or
PyTorch, which is the reference and the fallback; results agree to float rounding. The loops are compiled at their first
use (a second or two) into the user's cache folder, once per machine, where a C compiler exists. They are used only if
they reproduce the reference (`checks.py`). With `FODP_KERNELS=0` in the environment they are not used.
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

SOURCE = Path(__file__).with_name("loops.c").read_text(encoding="utf-8")

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
    """The compiled loops; None unless these tensors are float32 in main memory, contiguous and not empty."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.numel() == 0 or not tensor.is_contiguous():
            return None
    return library()


def _compiled() -> Path:
    """The library's file in the cache folder of this user, for this source, compiler and processor."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler")
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = "".join(sorted({line for line in processors if line.startswith(("flags", "Features"))}))
    identity = "\n".join([SOURCE, _FLAGS, os.path.realpath(compiler), platform.machine(), cpu])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fodp"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, result = Path(scratch, "loops.c"), Path(scratch, "kernels.so")
            source.write_text(SOURCE, encoding="utf-8")
            command = [compiler, *_FLAGS.split(), str(source), "-o", str(result), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            os.replace(result, path)  # at once: other processes may be doing the same
    for owned in (folder, path):  # nobody else may have put it there
        about = owned.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{owned} can be written by others")
    return path
