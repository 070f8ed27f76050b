"""Shared settings: one thread for each test process and for what it starts, so that they do not fight for cores."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by NumPy, SciPy and PyTorch as they load, also in children

import pytest
import torch
from hypothesis import settings

from tiers import slow_tests

torch.set_num_threads(1)
settings.register_profile("fodp", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fodp")
# The secret that keys fingerprints is made anew, away from the user's own.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="fodp-tests-")


def pytest_collection_modifyitems(items):
    """Mark what `make quick` leaves out: the list is measured, see tests/tiers.py."""
    slow = slow_tests()
    apart = [item for item in items if "tests/devices/" in item.nodeid]
    for item in apart if len(apart) < len(items) else ():
        # A device that is registered stays for the whole process: ranks cannot be forked from it any more.
        item.add_marker(pytest.mark.skip(reason="the stand-in device has a process of its own: pytest tests/devices"))
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
