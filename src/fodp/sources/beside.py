"""Modules beside the model that an owner's code uses on a lot, and what they keep of it.

A criterion with class centres, a metric of a LightningModule, a counter in a wrapper: what a lot leaves there has no
noise, and goes with a checkpoint or into the next lot's loss.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fodp.errors import ConfigurationError, PrivacyError
from fodp.support.torch_internals import DisableTorchFunction, current_backward, own_buffers, version

if TYPE_CHECKING:
    from fodp.sources.examiner import Examiner

ADVICE = (
    "what a lot leaves there has no noise and no bound, whatever becomes of it later (a checkpoint, the next lot's "
    "loss): leave it out of training, update it from public data or from the model's weights, or make it a part of the "
    "model that is trained (in Lightning public_state= names what is made of the weights alone)"
)
_COPIED = 2**12  # entries of frozen parameters that are compared by value


@dataclass
class _Held:
    """A value that a module holds under a name."""

    name: str
    value: Any
    copy: Any
    holder: dict[str, Any] | None = None  # where it has its name; another value there is a change, too
    key: str = ""
    empty: Any = None  # a metric that was reset tells nothing

    def put_back(self) -> None:
        """As it was, also under its name."""
        if isinstance(self.value, Tensor) and isinstance(self.copy, Tensor) and not _same(self.value, self.copy):
            with torch.no_grad():
                self.value.copy_(self.copy)
        elif not isinstance(self.value, Tensor) and self.holder is not None:
            self.value = _copied(self.copy)
        if self.holder is not None:
            self.holder[self.key] = self.value


class KeptModule:
    """What a module and its parts hold beside their parameters, to be compared after a private pass.

    Buffers, frozen parameters, states of metrics (torchmetrics) and extra state are compared by their names, other
    tensors only for being written into: a plain attribute is in no checkpoint. Parts in `leaving_out` are not looked
    at, nor names that begin with one of `public`.
    """

    def __init__(
        self, module: nn.Module, leaving_out: frozenset[nn.Module] = frozenset(), public: tuple[str, ...] = ()
    ):
        self.module, self._leaving_out, self._public = module, leaving_out, public
        self._held = {held.name: held for held in self._found()}

    def refuse_changes(self, who: str) -> None:
        """Put back what can be put back, and raise if anything has changed."""
        now = {held.name: held for held in self._found()}
        changed = [name for name, held in self._held.items() if self._has_changed(held, now.get(name))]
        changed += [name for name, held in now.items() if held.holder is not None and name not in self._held]
        if changed:
            self.restore()
            raise PrivacyError(f"{who} keeps {changed[0]} of the lots that it sees, and {ADVICE}")

    def restore(self) -> None:
        """Put back what was held before."""
        for held in self._held.values():
            held.put_back()
        for held in list(self._found()):
            if held.name not in self._held and held.holder is not None:
                del held.holder[held.key]

    def _found(self) -> Iterator[_Held]:
        for path, part in self.module.named_modules():
            if part in self._leaving_out:
                continue
            prefix = f"{path}." if path else ""
            buffers = own_buffers(part)
            for name, buffer in list(buffers.items()):
                if buffer is not None and not self._is_public(prefix + name):
                    yield _Held(f"the buffer {prefix}{name}", buffer, _copied(buffer), buffers, name)
            for name, frozen in list(part._parameters.items()):
                if frozen is not None and not frozen.requires_grad and not self._is_public(prefix + name):
                    yield _Held(f"the parameter {prefix}{name}", frozen, _mark(frozen), part._parameters, name)
            states = vars(part).get("_defaults")
            for name, value in list(vars(part).items()):
                if self._is_public(prefix + name):
                    continue
                if isinstance(states, dict) and name in states:
                    yield _Held(f"the state {prefix}{name}", value, _copied(value), vars(part), name, states[name])
                elif isinstance(value, Tensor) and not value.requires_grad:
                    yield _Held(f"the tensor {prefix}{name}", value, _copied(value))
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                extra = part.get_extra_state()
                yield _Held(f"the extra state of {path or 'the module'}", extra, _copied(extra), {})

    def _is_public(self, name: str) -> bool:
        return bool(self._public) and name.startswith(self._public)

    def _has_changed(self, before: _Held, now: _Held | None) -> bool:
        if now is not None and before.empty is not None and _same(now.copy, before.empty):
            return False
        if before.holder is not None:
            return now is None or not _same(now.copy, before.copy)
        return not _same(before.value, before.copy)


class Around:
    """What holds the model, a whole LightningModule for one: what it keeps, compared from lot to lot."""

    def __init__(self) -> None:
        self._kept: Callable[[], KeptModule] | None = None
        self._now: KeptModule | None = None  # as it was when the lot was handed out

    def watch(self, kept: Callable[[], KeptModule]) -> None:
        """Watch from the next lot on: `kept()` notes what is held when a lot is handed out."""
        self._kept = kept

    def refuse_changes(self) -> None:
        """Raise if it has kept something of the lots since the last one was handed out."""
        if self._now is not None:
            self._now.refuse_changes(type(self._now.module).__name__)

    def pause(self) -> None:
        """What changes from here to the next lot is not of a lot."""
        self.refuse_changes()
        self._now = None

    def go_on(self) -> None:
        """What changes from here on may be of a lot again."""
        self._now = None if self._kept is None else self._kept()

    def close(self) -> None:
        """The run is over: there are no more lots."""
        self._kept = None


class Beside:
    """The modules, beside the model, that have made something with a gradient of the lot in hand.

    While there is a lot to be stepped, hooks on all modules see them; `inside` are the model's own. `engine` says when
    the library itself is looking.
    """

    def __init__(self, engine: "Examiner", inside: frozenset[nn.Module]):
        self._engine, self._inside = engine, inside
        self._kept: dict[nn.Module, KeptModule] = {}
        self._covered: set[nn.Module] = set()
        self._used: set[nn.Module] = set()
        self._reached: dict[int, str] = {}  # by backward pass: a module that trains, and is not the model's
        self._followed = {id(parameter) for parameter in engine.layout.parameters}
        self._handles: list[Any] = [
            register_module_forward_hook(self._returned),
            register_module_forward_pre_hook(self._called),
        ]

    def refuse_changes(self) -> None:
        """Raise if one of them has kept something."""
        for module in self._used:
            self._kept[module].refuse_changes(f"{type(module).__name__}, beside the model,")

    def refuse_trained(self, backwards: set[int]) -> None:
        """Raise if one of these backward passes has reached a parameter that is not the model's."""
        for task, kind in self._reached.items():
            if task in backwards:
                raise ConfigurationError(
                    f"the backward pass reached a trainable {kind}, which is not part of the model: an optimizer of "
                    "its own would train it on gradients without noise. Make it part of the model before make_private, "
                    "or freeze it (requires_grad_(False))"
                )

    def end(self) -> None:
        """The lot is over; what one that broke off has left is put back."""
        for handle in self._handles:
            handle.remove()
        for module in self._used:
            self._kept[module].restore()

    def _hears(self) -> bool:
        return torch.is_grad_enabled() and not self._engine.is_looking

    def _called(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module in self._inside or not self._hears():
            return
        with DisableTorchFunction():
            if module not in self._covered:
                self._covered.update(module.modules())
                self._kept[module] = KeptModule(module, self._inside)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        """A metric's values have no gradient, a criterion's do. Do its parameters get one, too?"""
        if torch.compiler.is_compiling() or module in self._inside or not self._hears():
            return
        if module in self._kept and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
            self._used.add(module)
        kind = type(module).__name__

        def reached(_: Tensor) -> None:
            self._reached[current_backward()] = kind

        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._followed:
                self._followed.add(id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(reached))


def _mark(frozen: Tensor) -> Any:
    """By what a parameter is known that does not train: a copy of a small one, else its place and count of writes."""
    if frozen.is_cpu and frozen.numel() <= _COPIED:
        return frozen.detach().clone()
    return id(frozen), version(frozen), frozen.data_ptr()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return one.layout == other.layout and bool(((one == other) | ((one != one) & (other != other))).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
