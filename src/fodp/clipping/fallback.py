"""Per-example gradients of functions without a rule: the function alone, again, one example at a time.

Vectorised (`torch.func.vmap`) where PyTorch can, a plain loop over examples where it cannot. Only what is shared by all
examples is differentiated, against the gradient that the outputs received.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fodp.clipping.layers.uses import wide


class Unseparable(Exception):
    """The examples of this call cannot be told apart; the whole model must run one at a time."""


class Place(NamedTuple):
    """Where the examples lie in a tensor: in this dimension, each with as many entries there as it has.

    An example's entries lie side by side, or (`apart`) the examples' first entries come first, then their second ones:
    a [time, lot] that was flattened.
    """

    dim: int
    apart: bool = False

    def cut(self, tensor: Tensor, count: int) -> tuple[Tensor, int]:
        """The tensor with a dimension for the examples, and which that is."""
        if tensor.shape[self.dim] % count:
            raise Unseparable("a tensor does not have a part for each example")
        sizes = (-1, count) if self.apart else (count, -1)
        return tensor.unflatten(self.dim, sizes), self.dim + self.apart

    def entries(self, tensor: Tensor, count: int) -> int:
        """How many entries an example has in the dimension."""
        return tensor.shape[self.dim] // count

    def rows(self, tensor: Tensor, count: int) -> Tensor:
        """The tensor with the examples' entries first, one example after the other."""
        if tensor.shape[self.dim] == count or not self.apart:
            if tensor.shape[self.dim] % count:
                raise Unseparable("a tensor does not have a part for each example")
            return tensor.movedim(self.dim, 0)
        parts, dim = self.cut(tensor, count)
        return parts.movedim((dim, self.dim), (0, 1)).flatten(0, 1)


def by_example(
    function: Callable[..., Any],
    rebuilt: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    leaves: Sequence[Tensor],
    where: Sequence[Place | None],
    places: Sequence[int],
    backs: Sequence[tuple[int, Place, Tensor]],
    count: int,
) -> list[Tensor]:
    """Gradients of the arguments at `places`, one for each example: [count, *shape].

    `rebuilt` makes the arguments of tensors in the places of `leaves`; `where` says where the examples lie in
    each; `backs` lists (place of the output, where the examples lie, its gradient).
    """
    cut = [_cut(_float(leaf.detach()), place, count) for leaf, place in zip(leaves, where, strict=True)]
    inputs, dims = [tensor for tensor, _ in cut], [dim for _, dim in cut]
    back_cut = [place.cut(_float(back), count) for _, place, back in backs]
    gradients, back_dims = [tensor for tensor, _ in back_cut], [dim for _, dim in back_cut]
    chosen = [index for index, _, _ in backs]

    def pairing(values: list[Tensor], others: list[Tensor], back: list[Tensor]) -> Tensor:
        """⟨outputs on one example, their gradients⟩: its gradient is the example's."""
        given = dict(zip(places, values, strict=True))
        parts = [given.get(place, other) for place, other in enumerate(others)]
        args, kwargs = rebuilt([parts[0].clone(), *parts[1:]])  # the function may write into its first argument
        result = function(*args, **kwargs)
        outputs = _tensors(args[0] if result is None else result)
        pairs = [(outputs[place], g) for place, g in zip(chosen, back, strict=True)]
        return torch.stack([(output * g.reshape(output.shape)).sum() for output, g in pairs]).sum()

    values = [inputs[place] for place in places]
    with torch.no_grad():  # no graph beyond the gradient that is asked for
        found = _vectorised(pairing, values, inputs, dims, gradients, back_dims)
        if found is None:
            found = _one_by_one(pairing, values, inputs, dims, gradients, back_dims, count)
    return found


def _float(tensor: Tensor) -> Tensor:
    return wide(tensor) if tensor.is_floating_point() else tensor


def _cut(tensor: Tensor, place: Place | None, count: int) -> tuple[Tensor, int | None]:
    return (tensor, None) if place is None else place.cut(tensor, count)


def _vectorised(
    pairing: Callable[..., Tensor],
    values: list[Tensor],
    inputs: list[Tensor],
    dims: Sequence[int | None],
    gradients: list[Tensor],
    back_dims: list[int],
) -> list[Tensor] | None:
    try:
        mapped = vmap(grad(pairing), in_dims=(None, list(dims), back_dims), randomness="error")
        with warnings.catch_warnings():  # slower than it might be, which nobody here can change
            warnings.filterwarnings("ignore", "There is a performance drop")
            return mapped(values, inputs, gradients)
    except Exception:  # an operation without a batching rule, data-dependent control flow, a function's own refusal
        return None


def _one_by_one(
    pairing: Callable[..., Tensor],
    values: list[Tensor],
    inputs: list[Tensor],
    dims: Sequence[int | None],
    gradients: list[Tensor],
    back_dims: list[int],
    count: int,
) -> list[Tensor]:
    rows: list[tuple[Tensor, ...]] = []
    before = torch.get_rng_state()
    for i in range(count):
        mine = [value.clone().requires_grad_() for value in values]
        others = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in zip(inputs, dims, strict=True)]
        back = [g.select(dim, i) for g, dim in zip(gradients, back_dims, strict=True)]
        try:
            with torch.enable_grad():
                found = torch.autograd.grad(pairing(mine, others, back), mine, allow_unused=True)
        except Exception as error:
            raise Unseparable(f"a function that uses a parameter cannot be run on one example ({error})") from None
        rows.append(tuple(torch.zeros_like(v) if g is None else g for v, g in zip(mine, found, strict=True)))
    if not torch.equal(before, torch.get_rng_state()):
        raise Unseparable("a function that uses a parameter draws randomness, which a second run cannot repeat")
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a function's output, nested tuples flattened."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, tuple | list) else []
