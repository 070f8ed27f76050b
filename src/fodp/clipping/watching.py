"""Every PyTorch function that is given a trainable parameter, wherever it is called from.

Layers are known by their modules, but parameters are also used behind a module's back (a tied decoder), by modules of
any kind (a class token, a scale), by functions that hold a whole layer (attention), or by way of something that is made
of parameters alone: the positions of a text, a normalised weight. A `Watch` sees all of them, for PyTorch shows a mode
each function that is called.

Which dimension of a tensor is the lot's cannot be seen from one pass. So the code is run on two and on three copies of
one row (`learned`): what grows is the lot's, and what does not grow and is made of parameters is *shared*, the same for
every example. A function of shared tensors alone gives a shared tensor. A function of a shared tensor that gives
something for each example is where the example's gradient is found (`calls`); from there it goes back through the
shared tensors, example by example, to the parameters (`uses`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from fodp.clipping.fallback import Place, Unseparable
from fodp.clipping.layers.attention_and_rnn import in_parts
from fodp.clipping.layers.combine import merged
from fodp.clipping.layers.functions import FunctionCall, pulled_back, uses_of
from fodp.clipping.layers.rules import has_registered, is_own
from fodp.clipping.layers.uses import Use
from fodp.clipping.recording import LayerCall
from fodp.support.torch_internals import DisableTorchFunction, base, origin, version


class Unseen(Unseparable):
    """A function was called in a way that no pass of learning showed."""


Places = tuple[Place | None, ...]
_SET = torch.Tensor.__setitem__


@dataclass(frozen=True)
class Axes:
    """Where the examples lie in what functions take and give, by function, parameters and numbers of dimensions."""

    places: dict[Any, tuple[Places, Places]] = field(default_factory=dict)

    def with_more(self, other: "Axes") -> "Axes":
        """What both say; what they say differently is not known."""
        both, mine, others = self.places | other.places, self.places, other.places
        return Axes({key: found for key, found in both.items() if mine.get(key, found) == others.get(key, found)})


def learned(parameters: Sequence[Tensor], run: Callable[[int, Callable[[], TorchFunctionMode]], Any]) -> Axes:
    """Where the examples lie, from `run(copies, mode)`, which runs the model on copies of a row under a new mode()."""
    shapes: list[_Shapes] = []
    found: list[_Learning] = []

    def first() -> TorchFunctionMode:
        shapes.append(_Shapes())
        return shapes[-1]

    def second() -> TorchFunctionMode:
        found.append(_Learning(parameters, shapes[-1].seen))
        return found[-1]

    run(2, first)
    run(3, second)
    return found[-1].axes()


class _Mode(TorchFunctionMode):
    """Sees functions, also within those that hold a whole layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = in_parts(func, args, kwargs)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        before = self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            with DisableTorchFunction():  # other modes would be asked for every attribute of a tensor
                self.after(func, before, kwargs, args[0] if func == _SET else result)
        return result

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `after` is to have of the arguments; None: nothing, the call is of no interest."""
        raise NotImplementedError

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A function was called."""
        raise NotImplementedError


class _Shapes(_Mode):
    """The shapes that go through each function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, list[torch.Size], list[torch.Size]]] = []

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Every call is of interest."""
        return args

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = _tensors(result)
        if outputs:
            self.seen.append((func, _shapes(_tensors((args, kwargs))), _shapes(outputs)))


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


class _Shared:
    """The tensors of a pass that are made of parameters alone, by their identity; kept, so that none is reused."""

    def __init__(self, parameters: Sequence[Tensor]):
        self._known: dict[int, tuple[Tensor, Any, FunctionCall | None]] = {
            id(parameter): (parameter, place, None) for place, parameter in enumerate(parameters)
        }
        self.derived: list[tuple[Tensor, FunctionCall]] = []

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._known

    def name(self, tensor: Tensor) -> Any:
        """The same in every pass: which parameter it is, or what it was made by."""
        return self._known[id(tensor)][1] if tensor in self else None

    def add(self, tensor: Tensor, name: Any, call: FunctionCall) -> None:
        self._known[id(tensor)] = (tensor, name, call)
        self.derived.append((tensor, call))

    def hide(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Forget these for a while: what is made of them is nobody's business. Returns what remembers them again."""
        hidden = {id(tensor): self._known.pop(id(tensor)) for tensor in tensors if id(tensor) in self._known}
        return lambda: self._known.update(hidden)

    def any_in(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return id(value) in self._known
        if type(value) in (tuple, list):
            return any(self.any_in(part) for part in value)
        return type(value) is dict and any(self.any_in(part) for part in value.values())

    def key(self, func: Any, leaves: Sequence[Tensor]) -> Any:
        return func, tuple((leaf.dim(), self.name(leaf)) for leaf in leaves)


class _Tracking(_Mode):
    """Follows what is made of parameters.

    Layers with a rule that a user has registered are left to that rule: their own parameters are not followed in them.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        super().__init__()
        self.shared = _Shared(parameters)
        self._inside: list[tuple[nn.Module, Callable[[], None]]] = []  # layers with a rule that are running now
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        if has_registered() and not self._hooks:  # entered again for a function that is opened
            self._hooks = [
                register_module_forward_pre_hook(self._enter_layer),
                register_module_forward_hook(self._leave_layer, with_kwargs=True),
            ]
            self._depth = 0
        if self._hooks:
            self._depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]
        if self._hooks:
            self._depth -= 1
            if not self._depth:
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []

    def _enter_layer(self, layer: nn.Module, args: Any) -> None:
        if is_own(layer) and not self.shared.any_in(args):
            self._inside.append((layer, self.shared.hide(list(layer.parameters(recurse=False)))))

    def _leave_layer(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside and self._inside[-1][0] is layer:
            self._inside.pop()[1]()
            with DisableTorchFunction():
                self.layer_called(layer, args, kwargs, output)

    def layer_called(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A layer with a rule of the user's has run."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.shared.any_in(args) and not (kwargs and self.shared.any_in(kwargs)):
            return None
        return _with_first_kept(args) if _writes(func) else args


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return func == _SET or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _with_first_kept(args: Any) -> Any:
    """The arguments, with the value that the first one has now."""
    with DisableTorchFunction():
        return (args[0].detach().clone(), *args[1:]) if args and isinstance(args[0], Tensor) else args


class _Learning(_Tracking):
    """Compares with the shapes of a pass over fewer copies."""

    def __init__(self, parameters: Sequence[Tensor], fewer: list[tuple[Any, list[torch.Size], list[torch.Size]]]):
        super().__init__(parameters)
        self._fewer, self._at = fewer, 0
        self._found: dict[Any, set[tuple[Places, Places]]] = {}

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Every call is of interest."""
        return args

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = _tensors(result)
        if not outputs:
            return
        leaves = _tensors((args, kwargs))
        other, before, after = self._fewer[self._at] if self._at < len(self._fewer) else (None, [], [])
        self._at += 1
        if other != func or len(before) != len(leaves) or len(after) != len(outputs):
            raise Unseparable("the model calls other functions on another number of examples")
        if any(leaf in self.shared for leaf in leaves) and any(output.requires_grad for output in outputs):
            self._learn(func, args, kwargs, leaves, outputs, before, after)

    def _learn(
        self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor], outputs: list[Tensor], before: Any, after: Any
    ) -> None:
        places = tuple(
            None if leaf in self.shared else _grown(shape, leaf) for shape, leaf in zip(before, leaves, strict=True)
        )
        made = tuple(_grown(shape, output) for shape, output in zip(after, outputs, strict=True))
        key = self.shared.key(func, leaves)
        self._found.setdefault(key, set()).add((places, made))
        if set(places) | set(made) == {None}:
            _add_derived(self.shared, key, FunctionCall(func, args, kwargs, leaves, places), outputs)

    def axes(self) -> Axes:
        """What was learned; a function that takes the same parameter in two ways cannot be told."""
        return Axes({key: next(iter(found)) for key, found in self._found.items() if len(found) == 1})


def _grown(two: torch.Size, three: Tensor) -> Place | None:
    """Where the examples lie in a tensor of three copies of a row, which had this shape for two; None if nowhere."""
    if len(two) != three.dim():
        raise Unseparable("a tensor has another number of dimensions for another number of examples")
    grown = [dim for dim, (a, b) in enumerate(zip(two, three.shape, strict=True)) if a != b]
    if not grown:
        return None
    dim = grown[0]
    if len(grown) > 1 or 3 * two[dim] != 2 * three.shape[dim]:
        raise Unseparable("a tensor does not have a part for each example")
    if three.shape[dim] == 3:
        return Place(dim)
    side_by_side, apart = (_alike(*Place(dim, apart).cut(three.detach(), 3)) for apart in (False, True))
    return Place(dim, apart and not side_by_side)


def _alike(parts: Tensor, dim: int) -> bool:
    """Whether three copies have the same numbers, up to rounding."""
    one, *others = parts.unbind(dim)
    if not one.is_floating_point():
        return all(torch.equal(one, other) for other in others)
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True) for other in others)


def _add_derived(shared: _Shared, key: Any, call: FunctionCall, outputs: Sequence[Tensor]) -> None:
    for place, output in enumerate(outputs):
        if output.requires_grad and output not in shared:
            call.made(outputs)
            shared.add(output, (key, place), call)


class Watch(_Tracking):
    """Records, in one forward pass, each function that makes something for each example of a shared tensor."""

    def __init__(self, parameters: Sequence[Tensor], axes: Axes, catch: Callable[[Tensor], Any] = get_gradient_edge):
        super().__init__(parameters)
        self._axes, self._catch = axes, catch
        self.calls: list[FunctionCall | LayerCall] = []
        self.half_precision = False

    def layer_called(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record it as layers are recorded."""
        own = {name: p for name, p in layer.named_parameters(recurse=False) if p in self.shared}
        if own and isinstance(output, Tensor) and output.requires_grad:
            self.half_precision |= output.dtype not in (torch.float32, torch.float64)
            caught = self._catch(origin(output))
            if caught is not None:
                inputs = args[0] if args else kwargs["input"]
                self.calls.append(LayerCall(layer, own, inputs, version(inputs), caught, output.shape))

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A function was given something shared."""
        outputs = _tensors(result)
        if not any(output.requires_grad for output in outputs):
            return
        leaves = _tensors((args, kwargs))
        key = self.shared.key(func, leaves)
        if key not in self._axes.places:
            raise Unseen(f"{_name(func)} uses a parameter in a way that was not seen before")
        places, made = self._axes.places[key]
        call = FunctionCall(func, args, kwargs, leaves, places)
        if set(places) | set(made) == {None}:
            return _add_derived(self.shared, key, call, outputs)
        for index, (output, place) in enumerate(zip(outputs, made, strict=True)):
            if output.requires_grad:
                if place is None:
                    raise Unseparable(f"{_name(func)} makes one tensor of all examples")
                self.half_precision |= output.dtype not in (torch.float32, torch.float64)
                # Not the parameter itself, of which it may be a view.
                caught = self._catch(output if base(output) in self.shared else origin(output))
                call.outputs.append((index, place, caught, output.shape))
        self.calls.append(call)

    def targets(self) -> list[Any]:
        """Where gradients are asked for: what was caught of each tensor."""
        return [caught for call in self.calls for _, _, caught, _ in call.outputs]

    def examples_first(self, gradients: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
        """The gradients at `targets`, a row for each example."""
        shaped = [(shape, place) for call in self.calls for _, place, _, shape in call.outputs]
        return [
            g if g is None else place.rows(g.reshape(shape), count).reshape(count, -1)
            for g, (shape, place) in zip(gradients, shaped, strict=True)
        ]

    def numbers(self) -> int:
        """How many numbers the calls hold."""
        return sum(leaf.numel() for call in self.calls for leaf in call.leaves if leaf not in self.shared) + sum(
            shape.numel() for call in self.calls for *_, shape in call.outputs
        )

    def uses(self, gradients: Sequence[Tensor | None], count: int, alive: bool = True) -> Iterator[tuple[int, Use]]:
        """(parameter id, use) for each use of a parameter, from the gradients at `targets`.

        `alive`: the pass's graph of shared tensors is still there to go back through.
        """
        waiting: dict[int, list[Use]] = {}
        left = iter(gradients)
        for call in self.calls:
            back = [(index, place, next(left), shape) for index, place, _, shape in call.outputs]
            reached = [(i, place, g.reshape(shape)) for i, place, g, shape in back if g is not None]
            if not reached:
                continue
            found: Iterable[tuple[Tensor, Use]]
            if isinstance(call, LayerCall):
                found = call.uses(reached[0][2], count)
            else:
                found = uses_of(call, reached, count, self.shared)
            for tensor, use in found:
                waiting.setdefault(id(tensor), []).append(use)
        for tensor, call in reversed(self.shared.derived):
            uses = waiting.pop(id(tensor), None)
            if uses:
                for leaf, use in pulled_back(call, tensor, merged(uses), count, self.shared, alive):
                    waiting.setdefault(id(leaf), []).append(use)
        for identity, uses in waiting.items():
            for use in uses:
                yield identity, use


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)
