"""Freed memory that the C library keeps: no page faults in every step."""

import platform
import subprocess
import sys

import pytest

from fodp.cli import _malloc
from fodp.cli._malloc import keep_freed_memory

FAULTS = """
import resource, torch
from fodp.cli._malloc import keep_freed_memory
kept = {call}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.empty(2_000_000).fill_(1)  # 8 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def faults_of(call: str) -> list[str]:
    environment = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # as it is before it adapts
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.split()


@needs_glibc
def test_memory_that_is_used_again_in_every_step_is_not_mapped_anew():
    kept, faults = faults_of("keep_freed_memory()")
    assert kept == "True"
    assert 10 * int(faults) < int(faults_of("False")[1])


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(_malloc.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
