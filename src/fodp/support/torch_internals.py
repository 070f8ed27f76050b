"""What PyTorch has no public name for, in one place: every other module uses these names.

`tests/house.py` lists why each is needed. A release of PyTorch that renames one breaks this file alone.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

# A context in which no function mode is asked, not even for an attribute of a tensor.
DisableTorchFunction: Final[Any] = torch._C.DisableTorchFunction

# The number of the backward pass that is under way.
current_backward: Final[Callable[[], int]] = torch._C._current_graph_task_id

# What F.weight_norm calls in a module with a normalised weight.
weight_norm: Final[Any] = torch._weight_norm

# What saves tensors at this moment otherwise than autograd does; older versions of PyTorch do not tell (None).
top_saved_tensors_hooks: Final[Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def version(tensor: Tensor) -> int:
    """How often the tensor was written into in place; -1 for an inference tensor, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The versions of many tensors: asked for all parameters in every step, so in one call."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def base(tensor: Tensor) -> Tensor | None:
    """The tensor of which this one is a view; None if it is no view."""
    return tensor._base


def origin(output: Tensor) -> Tensor:
    """The tensor that a layer's output is a view of: changing the view in place cuts off its own edge."""
    viewed = output._base
    if viewed is None or viewed.numel() != output.numel():
        return output
    return viewed if viewed.is_contiguous() and output.is_contiguous() else output


def has_buffers(module: nn.Module) -> bool:
    """Whether the module or a part of it has a buffer: asked twice in a step, so without a name for each part."""
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        if part._buffers:
            return True
        waiting += part._modules.values()
    return False


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name; writing to the dict changes the module."""
    return module._buffers


def parts_of(module: nn.Module) -> list[nn.Module | None]:
    """The modules directly inside."""
    return list(module._modules.values())


def device_generators() -> list[torch.Generator]:
    """PyTorch's generators of accelerators that are in use."""
    if torch.cuda.is_initialized():
        return list(torch.cuda.default_generators)
    return [torch.mps._get_default_mps_generator()] if _HAS_MPS else []


def set_reentrant_checkpoint(checkpoint: Any) -> Any:
    """Let reentrant activation checkpoints run by this class; returns the class that ran them before."""
    before = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = checkpoint  # type: ignore[misc]
    return before


_HAS_MPS = torch.backends.mps.is_available()
