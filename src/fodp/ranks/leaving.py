"""How a process leaves its group: without a thread of PyTorch's, one of which would abort it later.

gloo's threads free the tensors of a sum or a broadcast when they come to it. One that does so while Python already ends
aborts the process ("terminate called without an active exception"), after all files are written. They end with the
group's last reference, so whatever keeps the group beyond `destroy_process_group` is found here.
"""

import gc
import sys
import weakref
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch.distributed as dist


def leave() -> None:
    """End the process group and its threads, if there is a group of gloo's; at the end of a script at the latest."""
    if not dist.is_initialized() or str(dist.get_backend()) != "gloo":  # NCCL has other threads, and waits for devices
        return
    world = dist.group.WORLD
    with suppress(RuntimeError):  # a rank was lost
        dist.destroy_process_group()
    _forget_in_defaults(world)
    _forget_in_meshes(world)
    left = weakref.ref(world)
    del world
    if left() is not None:  # by a model that is gone but for cycles
        gc.collect()


def _forget_in_defaults(world: Any) -> None:
    """Functions of PyTorch's whose module is first loaded in a group, as Dynamo does, keep that as a default."""
    for name in [name for name in sys.modules if name.startswith("torch.distributed.")]:
        for thing in list(vars(sys.modules[name]).values()):
            function = vars(thing).get("__init__") if issubclass(type(thing), type) else thing
            if type(function) is not FunctionType:  # the type itself: PyTorch warns of old names asked for anything
                continue
            values = function.__defaults__ or ()
            if any(value is world for value in values):
                function.__defaults__ = tuple(None if value is world else value for value in values)


def _forget_in_meshes(world: Any) -> None:
    """A mesh of devices, which a sharded model has, is kept in caches that nobody can empty, and keeps its groups."""
    if "torch.distributed.device_mesh" not in sys.modules:
        return
    for thing in gc.get_objects():
        kind = type(thing)
        if kind.__name__ == "DeviceMesh":
            getattr(thing, "_pg_registry", {}).clear()
        elif str(kind.__module__).startswith("torch.distributed.fsdp.") and hasattr(thing, "__dict__"):
            for name, value in list(vars(thing).items()):
                if value is world:
                    vars(thing)[name] = None
