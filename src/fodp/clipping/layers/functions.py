"""Rules by function: from what a function was given and the gradient of what it made to uses of its parameters.

Functions without a rule are run again for each example by itself, vectorised (`by_example`). Which dimension of a
tensor runs over the examples was found out before (`clipping/watching.py`), so none of these rules guesses it.
"""

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fodp.clipping.fallback import Place, Unseparable, by_example
from fodp.clipping.layers import normed, rules
from fodp.clipping.layers.combine import scaled
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.uses import Dense, Outer, Product, Use, wide
from fodp.support.torch_internals import versions, weight_norm

# A function without a rule has its per-example gradients held: at most this many entries (256 MiB of float32).
_HELD_AT_MOST = 1 << 26

Found = Iterator[tuple[Tensor, Use]]
Backs = Sequence[tuple[int, Place, Tensor]]  # of each output that was reached: which, where the examples lie, gradient


@dataclass
class FunctionCall:
    """One call of one function in the recorded forward pass."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]  # the tensors among the arguments, in order
    places: tuple[Place | None, ...]  # where the examples lie in each; None: it is the same for all of them
    outputs: list[tuple[int, Place, Any, torch.Size]] = field(default_factory=list)  # which, where, gradient, shape
    results: list[Tensor] = field(default_factory=list)  # of a call without examples

    def __post_init__(self) -> None:
        self._versions = versions(self.leaves)

    def made(self, results: Sequence[Tensor]) -> None:
        """Note what a call without examples has made."""
        self.results = list(results)

    @property
    def name(self) -> str:
        """For messages."""
        return getattr(self.function, "__name__", None) or str(self.function)

    def refuse_changed(self) -> None:
        """Raise if an argument was changed in place since."""
        if self._versions != versions(self.leaves):
            raise Unseparable(f"an input of {self.name} was changed in place later on")

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in their places."""
        left = iter(leaves)

        def put(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(left)
            if isinstance(value, tuple | list):
                parts = [put(part) for part in value]
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            return {key: put(part) for key, part in value.items()} if isinstance(value, dict) else value

        return put(self.args), put(self.kwargs)

    def named(self, *names: str) -> SimpleNamespace:
        """The arguments by name; None where one was not given."""
        given = dict.fromkeys(names) | dict(zip(names, self.args, strict=False)) | self.kwargs
        return SimpleNamespace(**given)

    def place(self, tensor: Any) -> Place | None:
        """Where the examples lie in this argument."""
        return next((place for leaf, place in zip(self.leaves, self.places, strict=True) if leaf is tensor), None)


def uses_of(call: FunctionCall, backs: Backs, count: int, shared: Container[Tensor]) -> Found:
    """Uses of the shared tensors that a function was given."""
    call.refuse_changed()
    rule = RULES.get(call.function)
    if rule is not None and len(backs) == 1:
        _, place, back = backs[0]
        found = rule(call, Back(place.rows(back, count), place, count, shared))
        if found is not None:
            for tensor, use in found:
                if tensor is not None and tensor in shared:
                    yield tensor, _joined(use, place.entries(back, count))
            return
    yield from _by_example(call, backs, count, shared)


@dataclass(frozen=True)
class Back:
    """The gradient of a function's output."""

    rows: Tensor  # examples first, the entries of each side by side
    place: Place  # where they lay
    count: int  # of examples
    shared: Container[Tensor]

    def like(self, call: FunctionCall, tensor: Any) -> Tensor | None:
        """An argument, examples first; None if they lie otherwise in it than in the output."""
        if call.place(tensor) != self.place:
            return None
        rows: Tensor = self.place.rows(tensor.detach(), self.count)
        return rows if len(rows) == len(self.rows) else None


def _joined(use: Use, copies: int) -> Use:
    """Several rows of an example, side by side, add up."""
    return use if copies == 1 else scaled(use.grouped(copies), float(copies))


def _by_example(call: FunctionCall, backs: Backs, count: int, shared: Container[Tensor]) -> Found:
    places = [place for place, leaf in enumerate(call.leaves) if leaf in shared]
    if count * sum(call.leaves[place].numel() for place in places) > _HELD_AT_MOST:
        raise Unseparable(f"{call.name} has no rule, and its per-example gradients are too large to be held")
    found = by_example(call.function, call.rebuilt, call.leaves, call.places, places, backs, count)
    for place, gradient in zip(places, found, strict=True):
        yield call.leaves[place], Dense(gradient)


# --- rules ----------------------------------------------------------------------------------------------------

# (parameter or None, use) of each parameter; None: the rule does not know this call.
Answer = list[tuple[Tensor | None, Use]] | None
Rule = Callable[[FunctionCall, Back], Answer]


def _linear(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "weight", "bias")
    inputs = back.like(call, given.input)
    if inputs is None or call.place(given.weight) is not None:
        return None
    found = rules.linear(None, inputs, back.rows)  # type: ignore[arg-type]
    return [(getattr(given, name), use) for name, use in found.items()]


def _matmul(call: FunctionCall, back: Back) -> Answer:
    """x·W with W of two dimensions: a Linear whose weight lies the other way."""
    given = call.named("input", "other")
    return _times(call, given.input, getattr(given, "mat2", given.other), back)


def _times(call: FunctionCall, x: Any, weight: Any, back: Back) -> Answer:
    inputs = back.like(call, x)
    if inputs is None or weight.dim() != 2 or call.place(weight) is not None or back.place.dim == x.dim() - 1:
        return None
    if inputs.dim() == 2:
        return [(weight, Product(back.rows, inputs))]
    inputs, outputs = (t.reshape(len(t), 1, -1, t.shape[-1]) for t in (inputs, back.rows))
    return [(weight, Outer(outputs, inputs))]


def _addmm(call: FunctionCall, back: Back) -> Answer:
    """b + x·W, as GPT-2 has it."""
    given = call.named("input", "mat1", "mat2")
    if set(call.kwargs) & {"alpha", "beta"} or len(call.args) > 3 or given.input.dim() > 1:
        return None
    found = _times(call, given.mat1, given.mat2, back)
    return None if found is None else [*found, (given.input, Dense(back.rows))]


def _convolution(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return _convolved(call, given, back, rules.convolution)  # type: ignore[arg-type]


def _transposed_convolution(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    return _convolved(call, given, back, rules.transposed_convolution)


def _convolved(call: FunctionCall, given: SimpleNamespace, back: Back, rule: rules.Rule) -> Answer:
    """By the rule of the layer that calls this function."""
    inputs, kernel = back.like(call, given.input), tuple(given.weight.shape[2:])
    if inputs is None or inputs.dim() != len(kernel) + 2 or call.place(given.weight) is not None:
        return None
    layer: Any = SimpleNamespace(
        kernel_size=kernel,
        stride=_each(given.stride, kernel, 1),
        padding=given.padding if isinstance(given.padding, str) else _each(given.padding, kernel, 0),
        dilation=_each(given.dilation, kernel, 1),
        groups=given.groups or 1,
        padding_mode="zeros",
    )
    return [(getattr(given, name), use) for name, use in rule(layer, inputs, back.rows).items()]


def _each(value: Any, like: Sequence[int], otherwise: int) -> tuple[int, ...]:
    if value is None:
        return (otherwise,) * len(like)
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * len(like) if len(values) == 1 else values


def _embedding(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "weight", "padding_idx")
    indices = back.like(call, given.input)
    return None if indices is None else [(given.weight, _table(given, indices, back.rows))]


def _table(given: SimpleNamespace, indices: Tensor, back: Tensor) -> Use:
    padding, size = given.padding_idx, len(given.weight)
    layer = SimpleNamespace(padding_idx=padding if padding is None else padding % size, num_embeddings=size)
    return rules.embedding(layer, indices, back)["weight"]  # type: ignore[arg-type]


def _embedding_bag(call: FunctionCall, back: Back) -> Answer:
    """Sums or means of rows of a table, for bags of one length or for bags that begin at `offsets`."""
    given = call.named(
        "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
        "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    if given.mode not in (None, "mean", "sum") or back.place != Place(0) or given.per_sample_weights is not None:
        return None
    words = given.input
    if words.dim() == 2:
        inside = torch.ones_like(words, dtype=torch.bool)
    else:
        begin = given.offsets[: len(back.rows)]
        lengths = torch.diff(begin, append=begin.new_tensor([len(words)]))
        if given.include_last_offset:
            lengths = torch.diff(given.offsets)
        inside = torch.arange(int(lengths.max()), device=words.device) < lengths[:, None]
        places = (begin[:, None] + inside.cumsum(1) - 1).clamp(0, max(0, len(words) - 1))
        words = words[places]
    if given.padding_idx is not None:
        inside = inside & (words != given.padding_idx % len(given.weight))
    shares = inside.to(back.rows.dtype)
    if given.mode != "sum":
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    return [(given.weight, Rows(words, back.rows[:, None] * shares[..., None], len(given.weight)))]


def _layer_norm(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if given.eps is None else given.eps
    return _scale_and_shift(call, given, back, lambda x: F.layer_norm(x, given.normalized_shape, eps=eps))


def _rms_norm(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "normalized_shape", "weight", "eps", "bias")  # which it never has
    return _scale_and_shift(call, given, back, lambda x: F.rms_norm(x, given.normalized_shape, eps=given.eps))


def _scale_and_shift(
    call: FunctionCall, given: SimpleNamespace, back: Back, normal: Callable[[Tensor], Tensor]
) -> Answer:
    """Of the last dimensions, whose normalised values are `normal`."""
    width = len(given.normalized_shape)
    if back.place.dim >= given.input.dim() - width:
        return None
    return _affine(call, given, back, normal, tuple(range(1, back.rows.dim() - width)))


def _affine(
    call: FunctionCall,
    given: SimpleNamespace,
    back: Back,
    normal: Callable[[Tensor], Tensor],
    positions: tuple[int, ...],
) -> Answer:
    """Weight times normalised values plus bias; both are the same at all `positions`."""
    inputs = back.like(call, given.input)
    if inputs is None:
        return None
    found: list[tuple[Tensor | None, Use]] = [(given.bias, Dense(_over(wide(back.rows), positions)))]
    if given.weight is not None:
        found.append((given.weight, Dense(_over(wide(back.rows) * wide(normal(inputs)), positions))))
    return found


def _over(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


def _group_norm(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if given.eps is None else given.eps
    return _by_channel(call, given, back, lambda x: F.group_norm(x, given.num_groups, eps=eps))


def _instance_norm(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    stats = True if given.use_input_stats is None else given.use_input_stats
    eps = 1e-5 if given.eps is None else given.eps
    mean, var = (None, None) if stats else (given.running_mean, given.running_var)
    normal = functools.partial(F.instance_norm, running_mean=mean, running_var=var, use_input_stats=stats, eps=eps)
    return _by_channel(call, given, back, normal)


def _batch_norm(call: FunctionCall, back: Back) -> Answer:
    """With fixed statistics: others mix the examples."""
    given = call.named("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    if given.training:
        raise Unseparable("batch_norm in training mode mixes the examples")
    eps = 1e-5 if given.eps is None else given.eps
    return _by_channel(call, given, back, lambda x: F.batch_norm(x, given.running_mean, given.running_var, eps=eps))


def _by_channel(call: FunctionCall, given: SimpleNamespace, back: Back, normal: Callable[[Tensor], Tensor]) -> Answer:
    if back.place.dim != 0:
        return None
    return _affine(call, given, back, normal, tuple(range(2, back.rows.dim())))


def _prelu(call: FunctionCall, back: Back) -> Answer:
    given = call.named("input", "weight")
    inputs = back.like(call, given.input)
    if inputs is None or back.place.dim != 0:
        return None
    slopes = wide(back.rows) * wide(inputs).clamp(max=0)
    if given.weight.numel() == 1:
        return [(given.weight, Dense(slopes.flatten(1).sum(1, keepdim=True)))]
    return [(given.weight, Dense(_over(slopes, tuple(range(2, slopes.dim())))))]


def _add(call: FunctionCall, back: Back) -> Answer:
    return _elementwise(call, back, lambda _: wide(back.rows), call.kwargs.get("alpha", 1))


def _sub(call: FunctionCall, back: Back) -> Answer:
    return _elementwise(call, back, lambda _: wide(back.rows), -call.kwargs.get("alpha", 1))


def _mul(call: FunctionCall, back: Back) -> Answer:
    def times(other: Tensor) -> Tensor:
        full = other.detach().reshape((1,) * (back.rows.dim() - other.dim()) + other.shape)
        spread = full.shape[back.place.dim] == 1  # the same for every example
        return wide(back.rows) * wide(full.movedim(back.place.dim, 0) if spread else back.place.rows(full, back.count))

    return _elementwise(call, back, times, 1)


def _elementwise(call: FunctionCall, back: Back, gradient: Callable[[Tensor], Tensor], factor: float) -> Answer:
    """Of two operands; `gradient(other)` reaches the one, times the factor if that is the second."""
    given = call.named("input", "other")
    found: list[tuple[Tensor | None, Use]] = []
    for tensor, other, times in ((given.input, given.other, 1), (given.other, given.input, factor)):
        if isinstance(tensor, Tensor) and tensor in back.shared:
            reached = _narrowed(gradient(other), tensor.shape, back.place)
            found.append((tensor, Dense(reached if times == 1 else reached * times)))
    return found


def _narrowed(rows: Tensor, shape: torch.Size, place: Place) -> Tensor:
    """What reaches an operand of this shape, which was spread out to the output's: [rows, *shape]."""
    sizes = [1] * (rows.dim() - len(shape)) + list(shape)
    if sizes.pop(place.dim) != 1:
        raise Unseparable("a parameter has entries along the dimension of the examples")
    spread = tuple(at + 1 for at, size in enumerate(sizes) if size == 1 and rows.shape[at + 1] != 1)
    return (rows.sum(spread, keepdim=True) if spread else rows).reshape(len(rows), *shape)


def _expand(call: FunctionCall, back: Back) -> Answer:
    """A parameter that is given to every example."""
    given = call.named("input")
    if given.input.dim() > back.rows.dim():
        return None
    return [(given.input, Dense(_narrowed(wide(back.rows), given.input.shape, back.place)))]


def _repeat(call: FunctionCall, back: Back) -> Answer:
    """The same if nothing but the lot's dimension has grown."""
    given = call.named("input")
    sizes = [1] * (back.rows.dim() - given.input.dim()) + list(given.input.shape)
    sizes.pop(back.place.dim)
    return _expand(call, back) if list(back.rows.shape[1:]) == sizes else None


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    torch.conv_transpose1d: _transposed_convolution,
    torch.conv_transpose2d: _transposed_convolution,
    torch.conv_transpose3d: _transposed_convolution,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
    torch.prelu: _prelu,
    torch.add: _add,
    torch.Tensor.add: _add,
    torch.Tensor.add_: _add,
    torch.Tensor.__radd__: _add,
    torch.sub: _sub,
    torch.Tensor.sub: _sub,
    torch.mul: _mul,
    torch.Tensor.mul: _mul,
    torch.Tensor.mul_: _mul,
    torch.Tensor.__rmul__: _mul,
    torch.Tensor.expand: _expand,
    torch.Tensor.expand_as: _expand,
    torch.broadcast_to: _expand,
    torch.Tensor.repeat: _repeat,
}


# --- back through what is made of parameters alone ------------------------------------------------------------


def pulled_back(
    call: FunctionCall, made: Tensor, use: Use, count: int, shared: Container[Tensor], alive: bool
) -> Found:
    """Uses of the parameters that `made` was made of, from the use of it.

    The function is linear in a gradient, so each example's goes through it by itself.
    """
    leaves = list({id(leaf): leaf for leaf in call.leaves if leaf in shared}.values())
    if call.function == F.embedding:
        given = call.named("input", "weight", "padding_idx")
        indices = given.input.detach().expand(count, *given.input.shape)
        yield given.weight, _table(given, indices, _held(use, made, count))
    elif call.function in _TRANSPOSED and made.dim() == 2 and type(use) in (Outer, Product):
        outer = use.as_outer() if isinstance(use, Product) else use
        assert isinstance(outer, Outer)
        if outer.back.shape[1] == 1:
            yield leaves[0], Outer(outer.back, outer.inputs())
        else:
            yield leaves[0], Dense(_held(use, made, count).mT)
    elif call.function in _SAME and made.shape == leaves[0].shape:
        yield leaves[0], use
    elif call.function in _RESHAPED and isinstance(use, Product | Outer):
        yield leaves[0], use.as_outer() if isinstance(use, Product) else use  # which writes rows, whatever their shape
    elif (found := _through_norm(call, use, count)) is not None:
        yield from ((tensor, each) for tensor, each in found if tensor in shared)
    else:
        if count * (made.numel() + sum(leaf.numel() for leaf in leaves)) > 2 * _HELD_AT_MOST:
            raise Unseparable(f"what {call.name} makes of parameters has per-example gradients too large to be held")
        yield from _through_graph(call, made, leaves, _held(use, made, count), alive)


def _through_norm(call: FunctionCall, use: Use, count: int) -> list[tuple[Tensor, Use]] | None:
    """Of functions that weight and spectral norm are made of, without holding a gradient; None: it is another one."""
    if call.function is weight_norm and len(call.args) == 3 and call.args[2] == 0:
        v, g, _ = call.args
        found = normed.weight_norm(use, v, g)
        return None if found is None else list(zip((v, g), found, strict=True))
    if call.function in _QUOTIENTS and len(call.args) == 2 and not call.kwargs:
        weight, size = call.args
        if not isinstance(use, Product | Outer) or not isinstance(size, Tensor) or size.numel() > 1 or weight is size:
            return None
        outer = use.as_outer() if isinstance(use, Product) else use
        products = normed.row_products(outer, weight.detach()).sum(1)
        factor = size.detach().double().reshape(())
        number = Dense((-products / factor.square()).to(outer.back.dtype).view(count, *size.shape))
        return [(weight, scaled(use, 1 / float(factor))), (size, number)]
    if call.function in (torch.dot, torch.vdot) and isinstance(use, Dense):
        left, right = (vector.detach() for vector in call.args)
        each = use.gradients.view(count, 1)
        return [(call.args[0], Dense(each * right)), (call.args[1], Dense(each * left))]
    if call.function in (torch.mv, torch.Tensor.mv) and isinstance(use, Dense):
        matrix, vector = call.args
        inputs, back = vector.detach().expand(count, -1), use.gradients
        return [(matrix, Product(inputs, back)), (vector, Dense(back @ matrix.detach().to(back.dtype)))]
    return None


_QUOTIENTS = {torch.div, torch.Tensor.div, torch.Tensor.__truediv__}
_TRANSPOSED = {torch.t, torch.Tensor.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__}  # type: ignore[attr-defined]
_SAME = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.contiguous, torch.Tensor.clone, torch.clone}


_RESHAPED = {torch.Tensor.flatten, torch.flatten, torch.Tensor.reshape, torch.reshape, torch.Tensor.view}


def _held(use: Use, made: Tensor, count: int) -> Tensor:
    return use.dense().reshape(count, *made.shape)


def _through_graph(call: FunctionCall, made: Tensor, leaves: list[Tensor], gradients: Tensor, alive: bool) -> Found:
    leaves_now = leaves
    if not alive or len(leaves) > 1:  # one of several may be made of another, and its share would count twice
        made, leaves_now = _again(call, made, leaves)
    gradients = gradients.to(made.dtype)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            made, leaves_now, gradients, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:  # an operation without a batching rule
        rows: list[Any] = [
            torch.autograd.grad(made, leaves_now, gradient, retain_graph=True, allow_unused=True)
            for gradient in gradients
        ]
        found = tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            yield leaf, Dense(gradient)


def _again(call: FunctionCall, made: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The same function of the same tensors, with a graph of its own."""
    fresh = {id(leaf): leaf.detach().requires_grad_() for leaf in leaves}
    args, kwargs = call.rebuilt([fresh.get(id(leaf), leaf.detach()) for leaf in call.leaves])
    place = next(i for i, result in enumerate(call.results) if result is made)
    before = torch.get_rng_state()
    with torch.enable_grad():
        result = call.function(*args, **kwargs)
    if not torch.equal(before, torch.get_rng_state()):
        raise Unseparable(f"{call.name} draws randomness, which a second run cannot repeat")
    flat = result if isinstance(result, tuple | list) else (result,)
    return flat[place], [fresh[id(leaf)] for leaf in leaves]
