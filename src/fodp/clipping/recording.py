"""What a forward pass is recorded by where every trainable layer has a rule: one hook that sees its modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def uses(self, gradients: Gradients, count: int, alive: bool = True) -> Iterator[tuple[int, Use]]:
        """(parameter id, use) for each use of a parameter, from the gradients at `targets`."""


@dataclass
class LayerCall:
    """One call of one layer with a rule."""

    layer: nn.Module
    parameters: dict[str, nn.Parameter]
    inputs: Tensor
    version: int
    caught: Any
    shape: torch.Size

    @staticmethod
    def of(layer: nn.Module, parameters: dict[str, nn.Parameter], inputs: Any, caught: Any, out: Tensor) -> "LayerCall":
        """As it is now: inputs may be changed in place later."""
        version = 0 if inputs.is_inference() else inputs._version
        return LayerCall(layer, parameters, inputs, version, caught, out.shape)

    @property
    def leaves(self) -> list[Tensor]:
        """What it was given."""
        return [self.inputs]

    @property
    def outputs(self) -> list[tuple[int, Place, Any, torch.Size]]:
        """Which output, where the examples lie in it, its gradient, its shape."""
        return [(0, Place(0), self.caught, self.shape)]

    def uses(self, back: Tensor, count: int) -> Iterator[tuple[nn.Parameter, Use]]:
        """Of the layer's parameters, by its rule."""
        kind = type(self.layer).__name__
        if not self.inputs.is_inference() and self.version != self.inputs._version:
            raise Unseparable(f"an input of {kind} was changed in place later on")
        back = back if back.shape == self.shape else back.reshape(self.shape)
        least = 1 if isinstance(self.layer, nn.Embedding) else 2
        if self.inputs.dim() < least or self.inputs.shape[0] != count or back.shape[0] != count:
            raise Unseparable(f"{kind} got an input whose first dimension is not the lot's")
        for name, use in RULES[type(self.layer)](self.layer, self.inputs.detach(), back).items():
            if name in self.parameters:
                yield self.parameters[name], use


class Layers:
    """Records the calls of layers with a rule. One hook on all modules costs less than one each.

    `catch(output)` says how the gradient of an output will be known; None: this call is not recorded.
    """

    def __init__(self, owners: Owners, catch: Callable[[Tensor], Any] = get_gradient_edge):
        self._owners, self._catch, self._calls = owners, catch, list[LayerCall]()
        self.half_precision = False

    def __enter__(self) -> "Layers":
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

    def uses(self, gradients: Gradients, count: int, alive: bool = True) -> Iterator[tuple[int, Use]]:
        """By the layers' rules."""
        for call, back in zip(self._calls, gradients, strict=True):
            if back is None:
                continue  # this call did not reach the loss
            for parameter, use in call.uses(back, count):
                yield id(parameter), use

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The hook: it sees what the layer itself made, before other hooks."""
        owned = self._owners.get(layer)
        if owned is None or not isinstance(out, Tensor):
            return
        with torch._C.DisableTorchFunction():  # a mode would be asked for every attribute of a tensor
            if not out.requires_grad:
                return
            if out.dtype not in (torch.float32, torch.float64):  # the model's own, or autocast
                self.half_precision = True
            inputs = args[0] if args else kwargs["input"]
            # The edge stays the gradient of this very output, whatever is done to it in place later.
            caught = self._catch(origin(out))
            if caught is not None:
                self._calls.append(LayerCall.of(layer, owned, inputs, caught, out))


def origin(output: Tensor) -> Tensor:
    """The tensor that a layer's output is a view of: changing the view in place cuts off its own edge."""
    base = output._base
    if base is None or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output
