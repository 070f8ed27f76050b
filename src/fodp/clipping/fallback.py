"""Per-example gradients of modules without a rule: the module alone, again, one example at a time.

Vectorised (`torch.func.vmap`) where PyTorch can, a plain loop over examples where it cannot (GRU).
Only the module's own parameters are differentiated, against the gradient that its outputs received.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fodp.clipping.uses import Dense, Use


class Unseparable(Exception):
    """The examples of this call cannot be told apart; the whole model must run one at a time."""


def is_unit(module: nn.Module) -> bool:
    """Modules that use their children's parameters directly, without calling the children."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase)


def uses(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    back: Sequence[tuple[int, Tensor]],
    count: int,
    shared: set[tuple[int, int]],
) -> dict[str, Use]:
    """Uses of `parameters` in one call; `back` lists (index of the output tensor, its gradient).

    `shared` remembers which inputs hold no examples (a mask of shape [T, T]), for lots where T = count.
    """
    if draws_randomness(module):
        raise Unseparable(f"{type(module).__name__} draws randomness (dropout), which a second run cannot repeat")
    leaves, rebuild = _flatten(args, kwargs)
    leaf_dims: list[int | None] = []
    for place, (name, leaf) in enumerate(leaves):
        known = (id(module), place) in shared
        leaf_dims.append(None if known else _leaf_dim(module, name, leaf, count))
        if leaf_dims[-1] is None:
            shared.add((id(module), place))
    back_dims = [output_dim(module, index) for index, _ in back]
    for (_, tensor), dim in zip(back, back_dims, strict=True):
        if tensor.dim() <= dim or tensor.shape[dim] != count:
            raise Unseparable(f"an output of {type(module).__name__} has no dimension for the examples")
    indices = [index for index, _ in back]

    def pairing(values: dict[str, Tensor], inputs: list[Any], gradients: list[Tensor]) -> Tensor:
        """⟨outputs on one example, their gradients⟩: its gradient is the example's parameter gradient."""
        whole = [leaf if dim is None else leaf.unsqueeze(dim) for leaf, dim in zip(inputs, leaf_dims, strict=True)]
        call_args, call_kwargs = rebuild(whole)
        outputs = _tensors(functional_call(module, values, call_args, call_kwargs))
        chosen = [outputs[index].squeeze(dim) for index, dim in zip(indices, back_dims, strict=True)]
        return torch.stack([(o * g).sum() for o, g in zip(chosen, gradients, strict=True)]).sum()

    values = {name: p.detach() for name, p in parameters.items()}
    inputs = [leaf for _, leaf in leaves]
    gradients = [tensor for _, tensor in back]
    with torch.no_grad():  # no graph beyond the gradient that is asked for
        result = _vectorised(pairing, values, inputs, leaf_dims, gradients, back_dims)
        if result is None:
            before = torch.get_rng_state()
            result = _one_by_one(pairing, values, inputs, leaf_dims, gradients, back_dims, count)
            if not torch.equal(before, torch.get_rng_state()):
                raise Unseparable(f"{type(module).__name__} draws randomness, which a second run cannot repeat")
    return {name: Dense(value) for name, value in result.items()}


def _vectorised(
    pairing: Callable[..., Tensor],
    values: dict[str, Tensor],
    inputs: list[Any],
    leaf_dims: list[int | None],
    gradients: list[Tensor],
    back_dims: list[int],
) -> dict[str, Tensor] | None:
    try:
        mapped = vmap(grad(pairing), in_dims=(None, leaf_dims, back_dims), randomness="error")
        with warnings.catch_warnings():  # slower than it might be, which nobody here can change
            warnings.filterwarnings("ignore", "There is a performance drop")
            return mapped(values, inputs, gradients)
    except (RuntimeError, ValueError, NotImplementedError):
        return None  # an operation without a batching rule (GRU, data-dependent control flow)


def _one_by_one(
    pairing: Callable[..., Tensor],
    values: dict[str, Tensor],
    inputs: list[Any],
    leaf_dims: list[int | None],
    gradients: list[Tensor],
    back_dims: list[int],
    count: int,
) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name in values}
    for i in range(count):
        mine = {name: value.clone().requires_grad_() for name, value in values.items()}
        leaves = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in zip(inputs, leaf_dims, strict=True)]
        with torch.enable_grad():
            scalar = pairing(mine, leaves, [g.select(d, i) for g, d in zip(gradients, back_dims, strict=True)])
            found = torch.autograd.grad(scalar, list(mine.values()), allow_unused=True)
        for (name, value), gradient in zip(mine.items(), found, strict=True):
            rows[name].append(torch.zeros_like(value) if gradient is None else gradient)
    return {name: torch.stack(parts) for name, parts in rows.items()}


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Any]], Callable[..., Any]]:
    """Tensors of a call by name, and how to put a call together again. Detached: only parameters count."""
    leaves: list[tuple[str, Any]] = []

    def take(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            leaves.append((name, value.detach()))
            return len(leaves) - 1
        if type(value) in (tuple, list):  # not a subclass such as PackedSequence
            return type(value)([take(name, v) for v in value])
        if value is None or isinstance(value, bool | int | float | str):
            return (None, value)  # marked as not an index
        raise Unseparable(f"an argument of type {type(value).__name__} cannot be cut into examples")

    plan_args = [take(f"arg{i}", value) for i, value in enumerate(args)]
    plan_kwargs = {name: take(name, value) for name, value in kwargs.items()}

    def put(plan: Any, values: list[Any]) -> Any:
        if isinstance(plan, int):
            return values[plan]
        if isinstance(plan, tuple) and len(plan) == 2 and plan[0] is None:
            return plan[1]
        return type(plan)([put(p, values) for p in plan])

    def rebuild(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(put(p, values) for p in plan_args), {k: put(p, values) for k, p in plan_kwargs.items()}

    return leaves, rebuild


def _leaf_dim(module: nn.Module, name: str, leaf: Tensor, count: int) -> int | None:
    """Which dimension of an input runs over the examples; None: the same for all of them."""
    dim = 0
    if isinstance(module, nn.RNNBase):
        dim = 0 if name == "arg0" and module.batch_first else 1
    elif isinstance(module, nn.MultiheadAttention):
        if name == "attn_mask":
            if leaf.dim() != 2:
                raise Unseparable("a per-example attn_mask of MultiheadAttention")
            return None
        dim = 0 if module.batch_first or name == "key_padding_mask" else 1
    if leaf.dim() > dim and leaf.shape[dim] == count:
        return dim
    if is_unit(module):
        raise Unseparable(f"input {name} of {type(module).__name__} has no dimension for the examples")
    return None


def output_dim(module: nn.Module, index: int) -> int:
    """Which dimension of an output runs over the examples."""
    if isinstance(module, nn.RNNBase):
        return 0 if index == 0 and module.batch_first else 1
    if isinstance(module, nn.MultiheadAttention):
        return 0 if index == 1 or module.batch_first else 1
    return 0


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a module's output, nested tuples flattened."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _tensors(part)]
    if output is None:
        return []
    raise Unseparable(f"an output of type {type(output).__name__} cannot be cut into examples")


def drops(module: nn.Module) -> bool:
    """Whether this module, without its children, applies dropout now."""
    rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0)
    return module.training and isinstance(rate, int | float) and rate > 0


def draws_randomness(module: nn.Module) -> bool:
    """Whether this module or a part of it applies dropout now."""
    return any(drops(part) for part in module.modules())
