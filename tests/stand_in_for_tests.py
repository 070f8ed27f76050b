"""A stand-in for an accelerator: a device of PyTorch's open registration, in Python, whose memory is the CPU's.

`torch.device("standin")` behaves as a device in what can go wrong without one: an operation that mixes its tensors with
the CPU's raises (a number in a tensor without dimensions may be mixed, as on CUDA), nothing of it can be read without a
copy, and every call on which a host would wait for a queue of work is written down by `counted()`. It says nothing
about speed, nor about the numerics of another device's library.
"""

import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:  # PyTorch below 2.10
    _setup_privateuseone_for_python_backend = None

NAME = "standin"
IS_THERE = _setup_privateuseone_for_python_backend is not None
aten = torch.ops.aten
# What reads values of its input on the host, or has an output whose size depends on them.
_READS = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "repeat_interleave",
    "allclose",
    "is_nonzero",
}
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
_waits: list[Counter[str]] = []
_libraries: list[Any] = []


class OnStandIn(Tensor):
    """A tensor of the stand-in: metadata in the wrapper, numbers in `held`, a CPU tensor with the same strides."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnStandIn":
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: Tensor):
        self.held = held.detach()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """As every tensor's; setting it gives the wrapper other numbers too."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: "OnStandIn") -> None:
        Tensor.data.__set__(self, value)
        self.held = value.held

    def data_ptr(self) -> int:
        """Where the numbers are, which is only good for telling tensors apart."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where the numbers are, as views share it."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Read, which makes the host wait."""
        _note("tolist")
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnStandIn({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = OnStandIn(self.held.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a CPU tensor: whoever loads it must send it where it belongs."""
        return self.held.__reduce_ex__(protocol)


def device() -> torch.device:
    """The stand-in, registered once in a process."""
    if not _libraries:
        module = types.ModuleType("torch.standin")
        for name, value in {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False}.items():
            setattr(module, name, lambda value=value: value)
        module.device_count, module.current_device = (lambda: 1), (lambda: 0)
        module.manual_seed_all = lambda seed: None
        # Once registered it is every test's accelerator, whose generator PyTorch keeps and puts back.
        module.get_rng_state = lambda device=0: torch.zeros(0, dtype=torch.uint8)
        module.set_rng_state = lambda state, device=0: None
        module.get_amp_supported_dtype = lambda: [torch.bfloat16]
        _setup_privateuseone_for_python_backend(NAME, backend_module=module)
        library = torch.library.Library("aten", "IMPL")
        for name, factory in _factories():
            library.impl(name, _made_there(factory), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _libraries.append(library)
    return torch.device(NAME, 0)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """While in here, calls that make the host wait for the device, by name."""
    found: Counter[str] = Counter()
    _waits.append(found)
    try:
        yield found
    finally:
        _waits.remove(found)


def _note(name: str) -> None:
    for found in _waits:
        found[name] += 1


def _computed(function: Any, args: Any, kwargs: Any) -> Any:
    name = function._schema.name.removeprefix("aten::")
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    there = [leaf for leaf in tensors if isinstance(leaf, OnStandIn)]
    target = kwargs.get("device")
    if name in ("copy_", "_copy_from", "_to_copy"):
        return _copied(name, function, args, kwargs)
    for leaf in tensors:
        if not isinstance(leaf, OnStandIn) and (leaf.dim() or leaf.dtype == torch.bool):
            raise RuntimeError(f"{name} mixes the CPU and the stand-in: shapes {[tuple(t.shape) for t in tensors]}")
    if name in _READS:
        _note(name)
    by_mask = name in _INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if by_mask:
        _note(f"{name} by a mask")
    moved = target is not None and torch.device(target).type != NAME
    if moved:
        _note(f"{name} to {target}")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    by_held = {id(t.held): t for t in there}
    inner_args, inner_kwargs = tree_map(lambda t: t.held if isinstance(t, OnStandIn) else t, (args, kwargs))
    before = [(t, t.held.shape) for t in there]
    made = function(*inner_args, **inner_kwargs)
    for tensor, shape in before:
        assert tensor.held.shape == shape, f"{name} changes the shape of a tensor in place"
    return tree_map(lambda t: by_held.get(id(t), t if moved else OnStandIn(t)) if isinstance(t, Tensor) else t, made)


def _copied(name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Copies within the device, to it and from it."""
    if name == "_to_copy":
        source, target = args[0], kwargs.get("device")
        goes = torch.device(target) if target is not None else source.device
        if goes.type != source.device.type and not kwargs.get("non_blocking"):
            _note(f"_to_copy to {goes.type}")
        elif goes.type != NAME:
            _note(f"_to_copy to {goes.type} unfinished")
        held = source.held if isinstance(source, OnStandIn) else source
        plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        made = function(held, **plain)
        if made is held:
            made = made.clone()
        return OnStandIn(made) if goes.type == NAME else made
    to, source = (args[1], args[0]) if name == "_copy_from" else (args[0], args[1])
    waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    if to.device != source.device and (waits or to.device.type != NAME):
        _note(f"copy_ to {to.device.type}")
    ours, theirs = (t.held if isinstance(t, OnStandIn) else t for t in (to, source))
    ours.copy_(theirs)
    return to


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    return _copied("_copy_from", None, (source, to, non_blocking), {})


def _factories() -> Iterator[tuple[str, Any]]:
    """Operations that make a tensor of no tensor: PyTorch looks for them by their device alone."""
    unwanted = "sparse", "quantized", "cudnn", "mkldnn", "nested", "from_file", "dep_token"
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or any(word in name for word in unwanted):
            continue
        packet, _, overload = name.partition(".")
        try:
            function = getattr(getattr(aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        given, made = function._schema.arguments, function._schema.returns
        if len(made) != 1 or "Tensor" not in str(made[0].type) or not any(a.name == "device" for a in given):
            continue
        if not any("Tensor" in str(a.type) for a in given):
            yield name, function


def _made_there(function: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return OnStandIn(function(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": None}))

    return make
