"""What a forward pass is recorded by where every trainable layer has a rule: one hook that sees its modules."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook

from fodp.clipping.fallback import Place, Unseparable
from fodp.clipping.layers.rules import RULES
from fodp.clipping.layers.uses import Use
from fodp.support.torch_internals import DisableTorchFunction, origin, version

Owners = Mapping[nn.Module, dict[str, nn.Parameter]]
Gradients = Sequence[Tensor | None]


class Recording(AbstractContextManager[Any], Protocol):
    """Around one forward pass; afterwards it knows where gradients are wanted and what follows from them."""

    half_precision: bool

    def targets(self) -> list[Any]:
        """Where gradients are asked for: what was caught of each tensor."""

    def examples_first(self, gradients: Gradients, count: int) -> list[Tensor | None]:
        """The gradients at `targets`, examples in the first dimension."""

    def numbers(self) -> int:
        """How many numbers are held for the pass."""

    def uses(self, gradients: Gradients, count: int, alive: bool = True) -> Iterable[tuple[int, Use]]:
        """(parameter id, use) for each use of a parameter, from the gradients at `targets`."""


@dataclass
class LayerCall:
    """One call of one layer with a rule. Its inputs may be changed in place later, which their version tells."""

    layer: nn.Module
    parameters: dict[str, nn.Parameter]
    inputs: Tensor
    version: int
    caught: Any
    shape: torch.Size

    @property
    def leaves(self) -> list[Tensor]:
        """What it was given."""
        return [self.inputs]

    @property
    def outputs(self) -> list[tuple[int, Place, Any, torch.Size]]:
        """Which output, where the examples lie in it, its gradient, its shape."""
        return [(0, Place(0), self.caught, self.shape)]

    def uses(self, back: Tensor, count: int) -> list[tuple[nn.Parameter, Use]]:
        """Of the layer's parameters, by its rule."""
        layer, inputs = self.layer, self.inputs
        kind = type(layer)
        if self.version != version(inputs):
            raise Unseparable(f"an input of {kind.__name__} was changed in place later on")
        back = back if back.shape == self.shape else back.reshape(self.shape)
        least = 1 if isinstance(layer, nn.Embedding) else 2
        if inputs.dim() < least or inputs.shape[0] != count or back.shape[0] != count:
            raise Unseparable(f"{kind.__name__} got an input whose first dimension is not the lot's")
        own, found = self.parameters, RULES[kind](layer, inputs.detach(), back)
        return [(own[name], use) for name, use in found.items() if name in own]


class LayerRecording:
    """Records the calls of layers with a rule. One hook on all modules costs less than one each.

    `catch(output)` says how the gradient of an output will be known; None: this call is not recorded.
    """

    def __init__(self, owners: Owners, catch: Callable[[Tensor], Any] = get_gradient_edge):
        self._owners, self._catch, self._calls = owners, catch, list[LayerCall]()
        self.half_precision = False

    def __enter__(self) -> "LayerRecording":
        self._handle = register_module_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def targets(self) -> list[Any]:
        """The outputs of the layers."""
        return [call.caught for call in self._calls]

    def examples_first(self, gradients: Gradients, count: int) -> list[Tensor | None]:
        """As they are."""
        return list(gradients)

    def numbers(self) -> int:
        """Inputs and outputs."""
        return sum(call.inputs.numel() + call.shape.numel() for call in self._calls)

    def uses(self, gradients: Gradients, count: int, alive: bool = True) -> list[tuple[int, Use]]:
        """By the layers' rules."""
        found = []
        for call, back in zip(self._calls, gradients, strict=True):
            if back is not None:  # else this call did not reach the loss
                for parameter, use in call.uses(back, count):
                    found.append((id(parameter), use))
        return found

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The hook: it sees what the layer itself made, before other hooks."""
        owned = self._owners.get(layer)
        if owned is None or not isinstance(out, Tensor):
            return
        with DisableTorchFunction():  # a mode would be asked for every attribute of a tensor
            if not out.requires_grad:
                return
            if out.dtype not in (torch.float32, torch.float64):  # the model's own, or autocast
                self.half_precision = True
            inputs = args[0] if args else kwargs["input"]
            # The edge stays the gradient of this very output, whatever is done to it in place later.
            caught = self._catch(origin(out))
            if caught is not None:
                self._calls.append(LayerCall(layer, owned, inputs, version(inputs), caught, out.shape))
