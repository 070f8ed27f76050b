"""What the C library does with freed memory, for processes that are ours alone."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for them, in malloc.h
_KEPT = 1 << 30
_FROM_THE_HEAP = 1 << 25  # the most that glibc allows


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed; whether it does.

    By its own rule it gives memory at the end of the heap back to the system. Whether the batch and the gradients of a
    step lie there is chance; where they do, every step has them mapped and zeroed anew, a page fault for each 4 KiB.
    A library must not decide that for its user's process, so only commands call it.
    """
    try:
        libc = ctypes.CDLL(None)
        kept = libc.mallopt(_TRIM_THRESHOLD, _KEPT), libc.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return False
    return kept == (1, 1)
