"""What an owner's code makes of a lot after the model, function by function, so that it can be run on other rows.

The loss of a loop of one's own is never handed over; it is only called. A tape keeps the calls that a lot reaches, from
the loader to the backward pass. Run again on the same rows they must give the gradients that the real backward pass
gave; run on other rows they show whether one example's gradient depends on another.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fodp.support.torch_internals import DisableTorchFunction, base

_SET = torch.Tensor.__setitem__
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_NUMBERS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__)
_ARRAYS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_NONE: Mapping[int, int] = {}
_ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # what is written there is in the original
_IGNORED = -100  # PyTorch's ignore_index is among the arguments of a loss, and is no count


Memories = dict[int, "weakref.ref[Tensor]"]  # tensors that lots have made or written into, by identity


@dataclass(eq=False)
class Call:
    """One call of a function that was given something of the lot."""

    func: Any
    args: Any
    kwargs: Any
    results: list[Tensor]
    target: Tensor | None  # what it writes into
    with_grad: bool
    autocast: tuple[str, torch.dtype] | None

    def context(self) -> AbstractContextManager[Any]:
        """What was switched on around it."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1], cache_enabled=False)

    def scales(self) -> bool:
        """Whether its numbers are factors."""
        return any(word in getattr(self.func, "__name__", "") for word in ("div", "mul"))


@dataclass(eq=False)
class Leaf:
    """Where a lot comes in: a tensor of the batch, an output of the model, or what code that is not seen has made."""

    tensor: Tensor
    value: Tensor
    with_grad: bool
    of_model: bool
    found: list[Tensor] = field(default_factory=list)  # what the real backward pass brought

    def forget_found(self) -> None:
        """What was found so far is of no interest; copies keep theirs."""
        self.found = []

    def end_lot(self) -> None:
        """The lot was stepped: nothing of it is run again."""
        self.value, self.found = self.tensor, []


class Tape:
    """The calls that a lot of so many rows reaches. `mean`: the loss is declared to be the mean over them."""

    def __init__(self, rows: int, mean: bool, earlier: "Memories | None" = None):
        self.rows, self.mean = rows, mean
        self._earlier: Memories = {} if earlier is None else earlier
        self.by_example = False  # its owner has given one loss per example
        self._leaves: dict[int, Leaf] = {}
        self._model: set[Any] = set()  # the nodes that made the model's outputs
        self._made: dict[int, Tensor] = {}
        self._without_grad: set[int] = set()  # what had none when it was made
        self._calls: list[Call] = []
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # with their originals
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # outside tensors that were written into, as they were
        self._roots: tuple[list[Tensor], list[Tensor | None], int] = ([], [], 0)
        self.numbers_read: list[float] = []  # what left the lot's tensors for Python
        self.was_read_out = False  # into arrays or lists, behind which nothing is seen
        self._stepped = False

    def take_by_example(self) -> None:
        """The owner gives one loss per example, so no reduction is declared."""
        self.by_example = True

    def add(self, tensor: Tensor, of_model: bool = False) -> None:
        """A leaf."""
        if id(tensor) in self._leaves or id(tensor) in self._made:
            return
        leaf = self._leaves[id(tensor)] = Leaf(tensor, tensor.detach().clone(), tensor.requires_grad, of_model)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: leaf.found.append(gradient.detach().clone()))
            if of_model:
                self._model.add(tensor.grad_fn)

    def outputs(self) -> list[Tensor]:
        """The model's outputs for the lot that have a gradient."""
        return [leaf.tensor for leaf in self._leaves.values() if leaf.of_model and leaf.with_grad]

    def forget_found(self) -> None:
        """What was found so far was no backward pass of the owner's."""
        for leaf in self._leaves.values():
            leaf.forget_found()

    def end_lot(self) -> None:
        """The lot was stepped: from here on it is followed, and nothing is kept to be run again."""
        self._stepped = True
        self._calls = []
        for leaf in self._leaves.values():
            leaf.end_lot()

    def before(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """What a call will write into, as it is now, if that is none of the lot's; notes where backward begins."""
        if func in _BACKWARD:
            self._note_roots(func, args, kwargs)
            return None
        if not (_writes(func) and args and isinstance(args[0], Tensor)) or id(args[0]) in self._saved:
            return None
        with DisableTorchFunction():
            inner = id(args[0]) in self._made or id(args[0]) in self._leaves
            reached = any(map(self._is_known, _tensors((args[1:], kwargs)))) or self._is_memory(args[0])
            return args[0].detach().clone() if reached and not inner and args[0].numel() else None

    def after(self, func: Any, args: Any, kwargs: Any, result: Any, before: Tensor | None) -> None:
        """A function was called."""
        if func in _BACKWARD:
            return
        given = _tensors((args, kwargs))
        for tensor in given:
            self._adopt(tensor)
        if func in _ALIASES and not self._stepped:
            self._aliases[id(result)] = result, args[0]
        if not any(map(self._is_known, given)):
            return
        if func in _NUMBERS:
            self.numbers_read += [float(n) for n in tree_leaves(result) if isinstance(n, int | float)]
        self.was_read_out = self.was_read_out or func in _ARRAYS
        target = args[0] if _writes(func) and args and isinstance(args[0], Tensor) else None
        results = _tensors(result)
        if target is not None and before is not None:
            self._saved[id(target)] = (target, before)
            behind = self._aliases.get(id(target), (target, base(target)))[1]
            self._made |= {id(written): written for written in (target, behind) if written is not None}
        for tensor in results:
            if not tensor.is_leaf or not tensor.requires_grad:  # not a parameter that was handed through
                self._made[id(tensor)] = tensor
                (self._without_grad.discard if tensor.requires_grad else self._without_grad.add)(id(tensor))
        if (results or target is not None) and not self._stepped:
            device = (results[0] if results else given[0]).device.type
            cast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
            self._calls.append(Call(func, args, kwargs, results, target, torch.is_grad_enabled(), cast))

    def _adopt(self, tensor: Tensor) -> None:
        """What code has made that is not seen (compiled, or with a backward pass of its own) is a leaf."""
        hidden = not self._is_known(tensor) or id(tensor) in self._without_grad
        if tensor.grad_fn is not None and hidden and not self._stepped:
            self._made.pop(id(tensor), None)
            self._without_grad.discard(id(tensor))
            self.add(tensor)

    def made(self) -> Memories:
        """What was made of the lot or written with it, by identity."""
        return {identity: weakref.ref(tensor) for identity, tensor in self._made.items()}

    def reads_memories(self) -> bool:
        """Whether the loss was given a tensor that earlier lots have made or written into."""
        given = [t for call in self.calls() for t in _tensors((call.args, call.kwargs))]
        return any(self._is_memory(t) for t in (*given, *self._roots[0]) if not self._is_new(t))

    def _is_memory(self, tensor: Tensor) -> bool:
        return id(tensor) in self._earlier and self._earlier[id(tensor)]() is tensor

    def _is_new(self, tensor: Tensor) -> bool:
        return (id(tensor) in self._made and id(tensor) not in self._saved) or id(tensor) in self._leaves

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._made or id(tensor) in self._leaves or self._is_memory(tensor)

    def _note_roots(self, func: Any, args: Any, kwargs: Any) -> None:
        second = "gradient" if func is torch.Tensor.backward else "grad_outputs"
        second = "grad_tensors" if func is torch.autograd.backward else second
        place = 2 if func is torch.autograd.grad else 1
        first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        weights = args[place] if len(args) > place else kwargs.get(second)
        roots = [first] if isinstance(first, Tensor) else list(first)
        given: list[Tensor | None] = [None] * len(roots)
        if weights is not None:
            given = [weights] if isinstance(weights, Tensor) else list(weights)
        for root in roots:
            self._adopt(root)
        self._roots = roots, given, len(self._calls)

    # --- running it again ------------------------------------------------------------------------------------

    def calls(self) -> list[Call]:
        """Those that the backward pass began from."""
        roots, _, end = self._roots
        needed = {id(root) for root in roots}
        storages = {_storage(root) for root in roots}
        found = []
        for call in reversed(self._calls[:end]):
            writes = call.target is not None and _storage(call.target) in storages
            makes = any(id(result) in needed and id(result) not in self._leaves for result in call.results)
            if writes or makes:
                found.append(call)
                for tensor in _tensors((call.args, call.kwargs)):
                    needed.add(id(tensor))
                    storages.add(_storage(tensor))
        return found[::-1]

    def telling(self) -> list[Leaf]:
        """The leaves by which gradients leave the loss for the model: rows of examples, or a loss of the model's."""
        return [
            leaf
            for leaf in self._reached()
            if leaf.with_grad and (self._has_rows(leaf) or (leaf.of_model and leaf.value.dim() == 0))
        ]

    def can_be_followed(self) -> bool:
        """Whether the loss is made of calls that were seen, all the way from rows."""
        telling = self.telling()
        return bool(telling) and not any(
            leaf.with_grad and leaf not in telling and self._comes_from_model(leaf) for leaf in self._reached()
        )

    def _reached(self) -> list[Leaf]:
        used = {id(t) for call in self.calls() for t in _tensors((call.args, call.kwargs))}
        used |= {id(root) for root in self._roots[0]}
        return [leaf for identity, leaf in self._leaves.items() if identity in used]

    def _has_rows(self, leaf: Leaf) -> bool:
        return leaf.value.shape[:1] == (self.rows,)

    def _comes_from_model(self, leaf: Leaf) -> bool:
        """Whether its graph has an output of the model in it; a penalty on weights has none."""
        waiting, known = [leaf.tensor.grad_fn], set[Any]()
        while waiting:
            node = waiting.pop()
            if node in self._model:
                return True
            if node is not None and node not in known:
                known.add(node)
                waiting += [before for before, _ in node.next_functions]
        return False

    def column(self) -> Tensor | None:
        """A whole number for each row, such as a label, if the loss is given one."""
        for leaf in self._reached():
            if self._has_rows(leaf) and leaf.value.dim() == 1 and not leaf.value.is_floating_point():
                return leaf.value
        return None

    def again(self, rows: Callable[[Tensor], Tensor], widths: Mapping[int, int] | None = None) -> list[Tensor]:
        """The gradients at `telling`, with `rows(value)` in place of the value of each leaf that has a row for each
        example; those of rows times the declared mean's number of rows. With `widths`, shapes that the calls name, and
        tensors from outside, have those in place of the lot's."""
        values = [rows(leaf.value) if self._has_rows(leaf) else leaf.value for leaf in self._leaves.values()]
        return self._run(values, widths or {})

    def again_on(self, larger: "Tape") -> list[Tensor]:
        """The same with the first rows of a larger lot."""
        return self._run([t.value[: self.rows] if larger._has_rows(t) else t.value for t in larger._leaves.values()])

    def kept(self) -> "Tape":
        """A copy that can be run again when the lot is over."""
        other = copy.copy(self)
        other._calls = self.calls()
        other._roots = (*self._roots[:2], len(other._calls))
        other._leaves = {identity: replace(leaf) for identity, leaf in self._leaves.items()}
        return other

    def aimed(self, tensors: Sequence[Tensor]) -> "Tape":
        """A copy that ends at these tensors, instead of where a backward pass begins."""
        other = copy.copy(self)
        other._roots = (list(tensors), [], len(self._calls))
        return other

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is of this lot, or of an earlier one."""
        return self._is_known(tensor)

    def ends(self, rows: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What the roots are, with `rows(value)` in place of the value of each leaf that has a row for each example."""
        given_values = [rows(leaf.value) if self._has_rows(leaf) else leaf.value for leaf in self._leaves.values()]
        with torch.random.fork_rng(devices=[]):  # the same draws each time
            given, _ = self._played(given_values)
        return [given(root) for root in self._roots[0]]

    def _run(self, given_values: Sequence[Tensor], widths: Mapping[int, int] = _NONE) -> list[Tensor]:
        given, seeds = self._played(given_values, widths)
        roots, weights, _ = self._roots
        ends = [given(root) for root in roots]
        starts = [_start(end, weight) for end, weight in zip(ends, weights, strict=True)]
        found = torch.autograd.grad(ends, seeds, starts, allow_unused=True)
        filled = [torch.zeros_like(s) if g is None else g for g, s in zip(found, seeds, strict=True)]
        return [self._scaled(gradient) for gradient in filled]

    def _played(
        self, given_values: Sequence[Tensor], widths: Mapping[int, int] = _NONE
    ) -> tuple[Callable[[Any], Any], list[Tensor]]:
        """The calls once more: what each tensor is now, and the new values of `telling`."""
        values: dict[int, Tensor] = {}
        seeds, telling = [], {id(leaf.tensor) for leaf in self.telling()}
        for identity, value in zip(self._leaves, given_values, strict=True):
            if identity in telling:
                value = value.detach().requires_grad_()
                seeds.append(value)
            with torch.enable_grad():
                values[identity] = value.clone()  # it may be written into
        values |= {identity: saved.clone() for identity, (_, saved) in self._saved.items()}

        def given(leaf: Any) -> Any:
            return values[id(leaf)] if isinstance(leaf, Tensor) and id(leaf) in values else leaf

        def reshaped(leaf: Any) -> Any:
            return _narrowed(leaf, widths) if given(leaf) is leaf else given(leaf)

        for call in self.calls():
            change = reshaped if widths and not call.scales() else given
            with torch.set_grad_enabled(call.with_grad), call.context(), warnings.catch_warnings(action="ignore"):
                result = call.func(*tree_map(change, call.args), **tree_map(change, call.kwargs))
            made = zip(call.results, _tensors(result), strict=True)
            values |= {id(old): new for old, new in made if id(old) not in self._leaves or old is call.target}
        return given, seeds

    def has_rows_of_its_own(self) -> bool:
        """Whether the loss is given rows that are not known to be the lot's, labels made by hand for one."""
        given = [t for call in self.calls() for t in _tensors((call.args, call.kwargs))]
        return any(t.shape[:1] == (self.rows,) and t.numel() > 1 and not self._is_known(t) for t in given)

    def real(self) -> list[Tensor]:
        """The gradients at `telling` that the owner's backward pass brought, scaled alike."""
        return [
            self._scaled(sum(leaf.found[1:], leaf.found[0]) if leaf.found else torch.zeros_like(leaf.value))
            for leaf in self.telling()
        ]

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient * len(gradient) if self.mean and not self.by_example and gradient.dim() else gradient

    def numbers(self) -> list[float]:
        """The plain numbers that its calls were given, in order; tensors of one number are such, too."""
        found: list[float] = []
        for call in self.calls():
            for leaf in tree_leaves((call.args, call.kwargs)):
                if isinstance(leaf, Tensor) and leaf.numel() == 1 and not self._is_known(leaf):
                    found.append(float(leaf.detach().real))
                elif isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf != _IGNORED:
                    found.append(float(leaf))
        return found

    @property
    def half_precision(self) -> bool:
        """Whether anything was computed with few digits."""
        half = (torch.float16, torch.bfloat16)
        return any(leaf.value.dtype in half for leaf in self.telling()) or any(call.autocast for call in self.calls())


def _narrowed(leaf: Any, widths: Mapping[int, int]) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[tuple(slice(widths.get(size)) for size in leaf.shape)] if leaf.dim() else leaf
    if isinstance(leaf, torch.Size):
        return torch.Size(widths.get(size, size) for size in leaf)
    return widths.get(leaf, leaf) if type(leaf) is int else leaf


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _start(end: Tensor, weight: Tensor | None) -> Tensor:
    """What the backward pass begins with, if other rows have the same."""
    if weight is None or (weight.shape != end.shape and bool((weight == 1).all())):
        return torch.ones_like(end)
    if weight.shape != end.shape:
        raise ValueError("weights for another number of rows")
    return weight


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return func == _SET or name == "__set__" or (name.endswith("_") and not name.endswith("__"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def same_functions(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Whether two tapes have called the same."""
    return [call.func for call in one] == [call.func for call in other]
