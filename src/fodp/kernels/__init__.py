"""Hot loops in C, compiled once per machine where a C compiler exists: keystreams (`keystream.c`), normals
(`normals.c`), the pass over a memory (`recall.c`), norms of gradients (`norms.c`), their weighted sum in a
linear layer (`products.c`), norms and sums of an embedding's (`tables.c`), and an optimizer's update (`updates.c`).

Each does in one reading of memory what NumPy or PyTorch do in several. Their callers hold the same arithmetic
in NumPy or PyTorch, which is the reference and the fallback; results agree to float rounding. The library is
compiled at its first use (under a second) into the user's cache folder and is used only if it reproduces the
reference (`checks.py`). `FODP_KERNELS=0` in the environment does without it.
"""

import ctypes
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

SOURCES = {file.name: file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.[ch]"))}

_FLAGS = "-O3 -march=native -fwrapv -fno-math-errno -fno-trapping-math -fopenmp-simd -shared -fPIC -Wno-psabi"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, None where there is none or it does not reproduce the reference."""
    if os.environ.get("FODP_KERNELS") == "0" or sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        found.fodp_keystream.argtypes = [pointer, size, ctypes.c_char_p, ctypes.c_uint64]
        found.fodp_normals.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_float]
        found.fodp_normals.restype = None
        for recall in (found.fodp_recall, found.fodp_recall_bfloat16):
            rows, kept = (pointer, size, pointer, size, size, pointer), (pointer, size, size, pointer, ctypes.c_float)
            recall.argtypes = [pointer, *rows, *kept, ctypes.c_int, ctypes.c_float]
            recall.restype = None
        for follow in (found.fodp_follow, found.fodp_follow_bfloat16):
            follow.argtypes, follow.restype = [pointer, pointer, ctypes.c_float, size], None
        found.fodp_add_squares.argtypes = [pointer, size, pointer, pointer, pointer, size]
        found.fodp_add_squares.restype = None
        found.fodp_square_sums.argtypes, found.fodp_square_sums.restype = [pointer, pointer, size, size], None
        found.fodp_gram_sums.argtypes, found.fodp_gram_sums.restype = [*[pointer] * 3, *[size] * 3], None
        found.fodp_roots.argtypes = [pointer, pointer, size, ctypes.c_double]
        found.fodp_limits.argtypes = [pointer, pointer, size, *[ctypes.c_float] * 3]
        found.fodp_limits.restype = None
        found.fodp_product.argtypes = [*[pointer] * 4, size, size, size, ctypes.c_int, pointer]
        found.fodp_adambc.argtypes, found.fodp_adambc.restype = [*[pointer] * 4, size, *[ctypes.c_float] * 7], None
        found.fodp_scatter.argtypes = [pointer, size, pointer, pointer, pointer, size, size, size]
        found.fodp_table_squares.argtypes = [pointer] * 4 + [size] * 3 + [pointer, size, pointer]
        found.fodp_table_squares.restype = None
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):  # RuntimeError: no home folder
        return None
    return found if is_right(found) else None


def library_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled library, None also if it cannot read these tensors."""
    return library() if can_read(*tensors) else None


def can_read(*tensors: torch.Tensor) -> bool:
    """Whether compiled loops can: some float32 in main memory, side by side; nothing has no address."""
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
