"""How processes of a group end: no thread of PyTorch's is left that could free a tensor while Python ends.

Real ends, again and again: `make ends`.
"""

import atexit
import importlib
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fodp.ranks import here
from fodp.ranks.leaving import leave
from ranks_for_tests import forked, in_ranks, waited
from test_faults import free_port

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by /proc")


def threads():
    return len(os.listdir("/proc/self/task"))


def load_in_the_group():
    """What Dynamo does at the first optimizer: functions of a module that is loaded now keep the group as a default."""
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
        del sys.modules[name]
    importlib.import_module("torch.distributed.nn.functional")


def test_the_command_leaves_no_thread_of_its_group():
    def work(rank):
        from fodp.cli.ranks import joined

        place = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()})
        with joined(30.0) as ranks:
            load_in_the_group()
            found = ranks.number(lambda: 3.0), threads() > 1
        return *found, threads()

    port = free_port()
    assert waited([forked(rank, work) for rank in range(2)]) == [(3.0, True, 1)] * 2


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_script_that_does_not_end_its_group_leaves_no_thread_either(sharded):
    """fodp does it at exit, though the model is still there."""

    def work(rank):
        atexit.register = (at_exit := []).append
        model, before = nn.Linear(4, 4), threads()
        if sharded:
            fully_shard(model)(torch.ones(2, 4))
        found = here().number(lambda: 3.0)
        load_in_the_group()
        for end in at_exit:
            end()
        return found, before > 1, threads(), dist.is_initialized()

    assert in_ranks(2, work) == [(3.0, True, 1, False)] * 2


def test_a_group_that_the_script_ends_is_held_by_nobody():
    def work(rank):
        ranks, world = here(), weakref.ref(dist.group.WORLD)
        number = ranks.number(lambda: 3.0)
        dist.destroy_process_group()
        return number, world() is None, here().count, threads()

    assert in_ranks(2, work) == [(3.0, True, 1, 1)] * 2


def test_leaving_without_a_group_does_nothing():
    leave()
    assert not dist.is_initialized()
