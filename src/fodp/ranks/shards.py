"""A model that FSDP2 has divided among ranks (`fully_shard`): whole for private passes, in slices all other time.

Ranks have other numbers of records, so the passes of one cannot wait for those of another: no collective may be called
within them. So all ranks gather the parameters before, put plain stand-ins with all numbers into the modules, take
FSDP's own hooks off, and put the slices back afterwards. Between passes a rank holds its slices alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fodp._checks import ConfigurationError
from fodp.ranks.group import Alone
from fodp.ranks.slices import Slices

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FSDP = "torch.distributed.fsdp"


class Shards:
    """The slices of a model on this rank. `whole()` is the model with all of its parameters, on every rank."""

    def __init__(self, model: nn.Module, ranks: Alone):
        self._model, self.ranks = model, ranks
        _put_slices_back(model)
        _refuse_other_forms(model, ranks)
        self._sharded = [p for p in model.parameters() if _is_sharded(p)]
        self._slices_of_all = Slices([p.shape for p in self._sharded], ranks)
        self._refuse_other_slices()
        self._stand_ins = [nn.Parameter(_nothing(p), requires_grad=p.requires_grad) for p in self._sharded]
        self.trained = tuple(p for p in self._sharded if p.requires_grad)
        self.slices = Slices([p.shape for p in self.trained], ranks)
        is_double = any(p.dtype == torch.float64 for p in self.trained)
        self._dtype = torch.float64 if is_double else torch.float32  # as `clipping.layout.Layout` has it
        self._is_whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The model as one process has it. All ranks must enter together; what is written into weights is refused."""
        if self._is_whole:
            yield
            return
        _put_slices_back(self._model)
        self._refuse_other_parameters()
        gathered = self._slices_of_all.gather_each(_local(parameter).detach() for parameter in self._sharded)
        for numbers, parameter, stand_in in zip(gathered, self._sharded, self._stand_ins, strict=True):
            stand_in.data = numbers.view(parameter.shape)
        versions = [stand_in._version for stand_in in self._stand_ins]
        try:
            with self._in_modules():
                self._is_whole = True
                yield
            written = [stand_in._version for stand_in in self._stand_ins] != versions
        finally:
            self._is_whole = False
            for parameter, stand_in in zip(self._sharded, self._stand_ins, strict=True):
                stand_in.data, stand_in.grad = _nothing(parameter), None
        if written:
            raise ConfigurationError(
                "something has written into the weights of a sharded model while rank 0 looked at them, which is lost: "
                "ranks keep their own slices. Change weights between fits, on all ranks, or train unsharded"
            )

    @contextmanager
    def _in_modules(self) -> Iterator[None]:
        """Stand-ins instead of slices, without FSDP's classes, hooks and notes; afterwards as before.

        So rules for layers, which go by their very type, know them, and a copy of the model is an ordinary one.
        """
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

        stand_in_of = {id(p): s for p, s in zip(self._sharded, self._stand_ins, strict=True)}
        modules = list(self._model.modules())
        places = [(m, n, p) for m in modules for n, p in m._parameters.items() if id(p) in stand_in_of]
        classes = [(module, type(module)) for module in modules if _is_fsdp(module)]
        notes = [
            (vars(module), key, vars(module)[key])
            for module in modules
            for key in (STATE_KEY, REGISTRY_KEY)
            if key in vars(module)
        ]
        hooks = [(held, dict(held)) for module in modules for held in _held_hooks(module)]
        try:
            for module, name, parameter in places:
                _put(module, name, stand_in_of[id(parameter)])
            for module, made in classes:
                module.__class__ = made.__bases__[1]
            for held_notes, key, _ in notes:
                del held_notes[key]
            for held, before in hooks:
                _replace(held, {key: hook for key, hook in before.items() if not _is_of_fsdp(hook)})
            yield
        finally:
            for module, made in classes:
                module.__class__ = made
            for held_notes, key, note in notes:
                held_notes[key] = note
            for module, name, parameter in places:
                _put(module, name, parameter)
            for held, before in hooks:  # what was added or removed meanwhile stays so
                kept = {key: hook for key, hook in before.items() if key in held or _is_of_fsdp(hook)}
                _replace(held, kept | {key: hook for key, hook in held.items() if key not in kept})

    @contextmanager
    def in_slices(self) -> Iterator[None]:
        """The model with its slices while the whole is held elsewhere: for saving them."""
        if not self._is_whole:
            yield
            return
        modules = list(self._model.modules())
        slice_of = {id(s): p for p, s in zip(self._sharded, self._stand_ins, strict=True)}
        places = [(m, n, p) for m in modules for n, p in m._parameters.items() if id(p) in slice_of]
        try:
            for module, name, stand_in in places:
                _put(module, name, slice_of[id(stand_in)])
            yield
        finally:
            for module, name, stand_in in places:
                _put(module, name, stand_in)

    def total(self, part: Tensor) -> Tensor:
        """This rank's slices of the sum of all ranks' parts; a number is summed to the first rank."""
        return self.ranks.total(part) if part.dim() == 0 else self.slices.scatter(part)

    def read(self) -> Tensor:
        """A copy of this rank's slices of the trained parameters, as one flat vector."""
        return torch.cat([_local(p).detach().reshape(-1).to(self._dtype) for p in self.trained])

    def write(self, flat: Tensor) -> None:
        """Set them."""
        with torch.no_grad():
            for parameter, part in zip(self.trained, flat.split(list(self.slices.sizes)), strict=True):
                local = _local(parameter)
                local.copy_(part.view_as(local))

    def norm(self, vector: Tensor) -> Tensor:
        """The norm of a vector of which every rank has its slices."""
        return self.slices.add(vector.double().square().sum()).sqrt().to(vector)

    def add(self, numbers: Any) -> Any:
        """Sums over the ranks of a few numbers, floats or a tensor, that each has made of its slices."""
        if isinstance(numbers, Tensor):
            return self.slices.add(numbers)
        return self.slices.add(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def like(self, parameter: Any, local: Tensor) -> Tensor:
        """A tensor divided as a parameter is, with this slice."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        with torch.no_grad():
            return DTensor.from_local(
                local.view(_local(parameter).shape),
                mesh,
                placements,
                run_check=False,
                shape=shape,
                stride=parameter.stride(),
            )

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks have."""
        most = -(-whole.shape[0] // self.ranks.count)
        return whole[self.ranks.rank * most : (self.ranks.rank + 1) * most]

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor divided as parameters are, not filled."""
        from torch.distributed.tensor import empty

        like: Any = self.trained[0]
        return empty(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)

    def _refuse_other_slices(self) -> None:
        rows = max(p.shape[0] for p in self._sharded)
        if -(-rows // -(-rows // self.ranks.count)) < self.ranks.count:
            raise ConfigurationError(
                f"the largest first dimension of this model is {rows}, so that some of {self.ranks.count} ranks would "
                "hold nothing of it: use fewer ranks, or leave the model whole"
            )
        for place, parameter in enumerate(self._sharded):
            if _local(parameter).numel() != self._slices_of_all.sizes[place]:
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has {_local(parameter).numel()} numbers on rank "
                    f"{self.ranks.rank}, and {self._slices_of_all.sizes[place]} were expected: divide it by "
                    "fully_shard(model) alone, by the rows of its first dimension"
                )

    def _refuse_other_parameters(self) -> None:
        known = {id(p) for p in self._sharded}
        if {id(p) for p in self._model.parameters() if _is_sharded(p)} != known:
            raise ConfigurationError(
                "the sharded model has other parameters than when the run was made (load_state_dict(assign=True), or "
                "moved to another device): do that before the Trainer is made"
            )


class ShardedGradients:
    """The `.grad` of every trained parameter, slices in one buffer of its own: never aliased with a release."""

    def __init__(self, shards: Shards):
        self._shards = shards
        self._buffer = torch.zeros_like(shards.read())

    def set(self, release: Tensor, divisor: float) -> None:
        """Give every parameter its slice of release / divisor."""
        torch.mul(release, 1 / divisor, out=self._buffer)
        parts = self._buffer.split(list(self._shards.slices.sizes))
        for parameter, part in zip(self._shards.trained, parts, strict=True):
            parameter.grad = self._shards.like(parameter, part.to(parameter.dtype))


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has divided this model, or a part of it."""
    return any(_is_fsdp(module) for module in model.modules())


def _refuse_other_forms(model: nn.Module, ranks: Alone) -> None:
    """Raise for what is not one dimension of all ranks, by rows, in the parameters' own type and place."""
    for name, parameter in model.named_parameters():
        if not _is_sharded(parameter):
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
    for module in model.modules():
        if not _is_fsdp(module):
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


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _put_slices_back(model: nn.Module) -> None:
    """A forward pass of the owner's leaves the outermost parameters whole, for a backward pass that may never come."""
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def _is_sharded(parameter: Any) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__)


def _local(parameter: Any) -> Tensor:
    """The slice itself, not a copy."""
    with torch.no_grad():
        return parameter.to_local()


def _nothing(parameter: Any) -> Tensor:
    """A tensor of the parameter's shape that takes no memory."""
    return torch.zeros((), dtype=parameter.dtype, device=_local(parameter).device).expand(parameter.shape)


def _put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """As FSDP does it: past `__setattr__`, unless a module has its own (recurrent layers keep a list)."""
    if getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _held_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    for name in _HOOKS:
        held = vars(module).get(name)
        if held:
            yield held


def _is_of_fsdp(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith(_FSDP)


def _replace(held: dict[int, Any], hooks: dict[int, Any]) -> None:
    """In place: handles that remove a hook know this very dict."""
    held.clear()
    held.update(hooks)
