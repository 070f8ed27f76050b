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
from fodp.ranks.fsdp import (
    held_hooks,
    is_divided,
    is_fsdp,
    is_of_fsdp,
    local_part,
    nothing_like,
    put,
    put_slices_back,
    refuse_other_forms,
    replace,
)
from fodp.ranks.group import Alone
from fodp.ranks.slices import Slices


class Shards:
    """The slices of a model on this rank. `whole()` is the model with all of its parameters, on every rank."""

    def __init__(self, model: nn.Module, ranks: Alone):
        self._model, self.ranks = model, ranks
        put_slices_back(model)
        refuse_other_forms(model, ranks)
        self._sharded = [p for p in model.parameters() if is_divided(p)]
        self._slices_of_all = Slices([p.shape for p in self._sharded], ranks)
        self._refuse_other_slices()
        self._stand_ins = [nn.Parameter(nothing_like(p), requires_grad=p.requires_grad) for p in self._sharded]
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
        put_slices_back(self._model)
        self._refuse_other_parameters()
        gathered = self._slices_of_all.gather_each(local_part(parameter).detach() for parameter in self._sharded)
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
                stand_in.data, stand_in.grad = nothing_like(parameter), None
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
        classes = [(module, type(module)) for module in modules if is_fsdp(module)]
        notes = [
            (vars(module), key, vars(module)[key])
            for module in modules
            for key in (STATE_KEY, REGISTRY_KEY)
            if key in vars(module)
        ]
        hooks = [(held, dict(held)) for module in modules for held in held_hooks(module)]
        try:
            for module, name, parameter in places:
                put(module, name, stand_in_of[id(parameter)])
            for module, made in classes:
                module.__class__ = made.__bases__[1]
            for held_notes, key, _ in notes:
                del held_notes[key]
            for held, before in hooks:
                replace(held, {key: hook for key, hook in before.items() if not is_of_fsdp(hook)})
            yield
        finally:
            for module, made in classes:
                module.__class__ = made
            for held_notes, key, note in notes:
                held_notes[key] = note
            for module, name, parameter in places:
                put(module, name, parameter)
            for held, before in hooks:  # what was added or removed meanwhile stays so
                kept = {key: hook for key, hook in before.items() if key in held or is_of_fsdp(hook)}
                replace(held, kept | {key: hook for key, hook in held.items() if key not in kept})

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
                put(module, name, slice_of[id(stand_in)])
            yield
        finally:
            for module, name, stand_in in places:
                put(module, name, stand_in)

    def total(self, part: Tensor) -> Tensor:
        """This rank's slices of the sum of all ranks' parts; a number is summed to the first rank."""
        return self.ranks.total(part) if part.dim() == 0 else self.slices.scatter(part)

    def read(self) -> Tensor:
        """A copy of this rank's slices of the trained parameters, as one flat vector."""
        return torch.cat([local_part(p).detach().reshape(-1).to(self._dtype) for p in self.trained])

    def write(self, flat: Tensor) -> None:
        """Set them."""
        with torch.no_grad():
            for parameter, part in zip(self.trained, flat.split(list(self.slices.sizes)), strict=True):
                local = local_part(parameter)
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
                local.view(local_part(parameter).shape),
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
        count = self.ranks.count
        if all((count - 1) * -(-p.shape[0] // count) >= p.shape[0] for p in self._sharded if p.requires_grad):
            raise ConfigurationError(
                f"the last of {count} ranks would hold nothing of this model, whose parameters have at most "
                f"{max(p.shape[0] for p in self._sharded)} rows: use fewer ranks, or leave the model whole"
            )
        for place, parameter in enumerate(self._sharded):
            if local_part(parameter).numel() != self._slices_of_all.sizes[place]:
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has {local_part(parameter).numel()} numbers on "
                    f"rank {self.ranks.rank}, and {self._slices_of_all.sizes[place]} were expected: divide it by "
                    "fully_shard(model) alone, by the rows of its first dimension"
                )

    def _refuse_other_parameters(self) -> None:
        known = {id(p) for p in self._sharded}
        if {id(p) for p in self._model.parameters() if is_divided(p)} != known:
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
