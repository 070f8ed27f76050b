"""What is known of FSDP2's insides: how it divides parameters, and what it puts into modules."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fodp._checks import ConfigurationError
from fodp.ranks.group import Alone

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FSDP = "torch.distributed.fsdp"


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has divided this model, or a part of it."""
    return any(is_fsdp(module) for module in model.modules())


def refuse_other_forms(model: nn.Module, ranks: Alone) -> None:
    """Raise for what is not one dimension of all ranks, by rows, in the parameters' own type and place."""
    for name, parameter in model.named_parameters():
        if not is_divided(parameter):
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"the trainable parameter {name} of a sharded model is not divided: call fully_shard(model) on the "
                    "whole model, without ignored_params, or freeze it"
                )
            continue
        divided_as: Any = parameter
        mesh, placements = divided_as.device_mesh, divided_as.placements
        divided = len(placements) == 1 and placements[0].is_shard(0)
        if mesh.ndim != 1 or mesh.size() != ranks.count or not divided:
            raise ConfigurationError(
                f"the parameter {name} is divided as {tuple(map(str, placements))} on a mesh of {tuple(mesh.shape)}: "
                f"fodp knows one dimension of all {ranks.count} ranks and rows alone, which fully_shard(model) makes"
            )
        if mesh.mesh.tolist() != list(range(ranks.count)):  # its checkpoints would have the rows in another order
            raise ConfigurationError(
                f"the parameter {name} is divided on a mesh of ranks in the order {mesh.mesh.tolist()}: leave mesh out "
                "of fully_shard(model), or give them as they are numbered"
            )
    for module in model.modules():
        if not is_fsdp(module):
            continue
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        policy = state._mp_policy
        if any(getattr(policy, kind, None) for kind in ("param_dtype", "reduce_dtype", "output_dtype")):
            raise ConfigurationError(
                f"{type(module).__name__} has {policy}: private passes run without FSDP: leave mp_policy out, and use "
                "torch.autocast in the loss"
            )
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        offload = {type(group.offload_policy).__name__ for group in groups if group is not None}
        if offload - {"OffloadPolicy"}:
            raise ConfigurationError(f"{min(offload)} moves slices to the CPU between passes: leave offload_policy out")


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def put_slices_back(model: nn.Module) -> None:
    """A forward pass of the owner's leaves the outermost parameters whole, for a backward pass that may never come."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def is_divided(parameter: Any) -> bool:
    """Whether this process has a part of it."""
    return any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__)


def local_part(parameter: Any) -> Tensor:
    """The slice itself, not a copy."""
    with torch.no_grad():
        return parameter.to_local()


def nothing_like(parameter: Any) -> Tensor:
    """A tensor of the parameter's shape that takes no memory."""
    return torch.zeros((), dtype=parameter.dtype, device=local_part(parameter).device).expand(parameter.shape)


def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """As FSDP does it: past `__setattr__`, unless a module has its own (recurrent layers keep a list)."""
    if getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def held_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Dicts of a module's hooks among which FSDP's may be."""
    for name in _HOOKS:
        held = vars(module).get(name)
        if held:
            yield held


def is_of_fsdp(hook: Any) -> bool:
    """Whether FSDP has set this hook."""
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith(_FSDP)


def replace(held: dict[int, Any], hooks: dict[int, Any]) -> None:
    """In place: handles that remove a hook know this very dict."""
    held.clear()
    held.update(hooks)
