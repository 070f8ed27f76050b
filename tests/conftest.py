"""Shared settings: one thread for each test process and for what it starts, so that they do not fight for cores."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by NumPy, SciPy and PyTorch as they load, also in children

import pytest
import torch
from hypothesis import settings

from fodp.clipping.layers.rules import RULES
from fodp.methods import METHODS
from fodp.options import OPTIONS
from tiers import slow_tests

torch.set_num_threads(1)
settings.register_profile("fodp", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fodp")
# The secret that keys fingerprints is made anew, away from the user's own.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="fodp-tests-")


# These have a process of their own, `make apart`: a device that is registered stays for the whole process, and so do
# threads of Ray, so that ranks cannot be forked from it any more.
APART = ("tests/devices/", "tests/workers/")

# Files with long tests, which begin first: a long test that begins last leaves the other process idle.
LONG = {"test_bench.py", "test_bench_ranks.py", "test_examples.py", "test_experiments.py", "test_full_disk.py",
        "test_runner_on_ray.py", "test_survival.py", "test_tune.py"}  # fmt: skip


def pytest_collection_modifyitems(items):
    """Mark what `make quick` leaves out: the list is measured, see tests/tiers.py."""
    slow = slow_tests()
    apart = [item for item in items if item.nodeid.startswith(APART)]
    for item in apart if len(apart) < len(items) else ():
        item.add_marker(pytest.mark.skip(reason=f"has a process of its own: pytest {' '.join(APART)}"))
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def tables_as_they_were():
    """Examples and pages register layers, methods and options of their own: no later test may meet them."""
    rules, methods, options = dict(RULES), dict(METHODS), list(OPTIONS)
    yield
    for table, before in ((RULES, rules), (METHODS, methods)):
        for added in table.keys() - before.keys():
            del table[added]
    OPTIONS[:] = options
