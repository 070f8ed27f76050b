"""What an owner's code calls between the loader and the step: PyTorch shows a mode every function that is called."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as legacy
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from fodp.errors import ConfigurationError
from fodp.sources.tape import Tape
from fodp.support.torch_internals import DisableTorchFunction, current_backward

WAY_OUT = (
    "compute one loss per example (reduction='none') and call loader.backward(losses) instead of loss.backward(); in a "
    "training_step of Lightning return them"
)
# Whose mean divides by what the targets say; an older PyTorch does not have the last one.
_WITH_COUNTS = (F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.cross_entropy))


class Between(TorchFunctionMode):
    """Listens from the loader to the step; with a tape until the next lot.

    `joint` tells why a gradient in the backward pass under way couples the examples of the lot, if one of PyTorch's
    losses made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self._rows = 0  # of the lot that waits for its step; 0: none does
        self.joint: dict[int, str] = {}  # by backward pass, why it couples examples
        self._on = False
        self.abandoned = False  # its loader is gone, while a lot waited for its step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape, counts = self.tape, func in _WITH_COUNTS and self._rows
        if (tape is None and not counts) or torch.compiler.is_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        before = None if tape is None else tape.before(func, args, kwargs)
        result = func(*args, **kwargs)
        with DisableTorchFunction():
            if counts and isinstance(result, Tensor) and result.requires_grad:
                why = _coupled(func, args, kwargs, self._rows)
                if why is not None:
                    result.register_hook(self._hearing(why))
            if tape is not None:
                tape.after(func, args, kwargs, result, before)
        return result

    def open(self, rows: int, tape: Tape | None) -> None:
        """Begin with a lot, or a part of one, of so many rows; without a tape not before the model has an output."""
        self.close()
        self.tape, self._rows, self.joint = tape, rows, {}
        if tape is not None:
            self._enter()

    def pause(self) -> bool:
        """Work of the library's own, or the model's forward pass, begins; returns whether it was listened to."""
        was_on = self._on
        if was_on:
            self._leave()
        return was_on

    def go_on(self) -> None:
        """Listen again, while there is a lot to be stepped or a tape."""
        if self.tape is not None or self._rows:
            self._enter()

    def end_lot(self) -> None:
        """The lot was stepped: what is made of it from here on is only followed, if there is a tape."""
        self._rows, self.joint = 0, {}
        if self.tape is None:
            self.close()
        else:
            self.tape.end_lot()

    def close(self) -> None:
        """Listen no longer."""
        if self._on:
            self._leave()
        self.tape, self._rows = None, 0

    def abandon(self) -> None:
        """Nobody has the loader any more."""
        self.abandoned = self.abandoned or self._rows > 0
        self._on = self._on and self in _get_current_function_mode_stack()
        self.close()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Work of the library's own, and the model's forward pass, are not listened to."""
        was_on = self.pause()
        try:
            yield
        finally:
            if was_on:
                self.go_on()

    def refuse_joint(self, task: int) -> None:
        """Raise if this backward pass has come through a mean that couples the lot."""
        if task in self.joint:
            raise ConfigurationError(f"{self.joint[task]}: {WAY_OUT}")

    def _hearing(self, why: str) -> Callable[[Tensor], None]:
        def hear(_: Tensor) -> None:
            self.joint[current_backward()] = why

        return hear

    def _enter(self) -> None:
        if not self._on:
            enter_below(self)
        self._on = True

    def _leave(self) -> None:
        self._on = False
        if not leave(self) and self._rows:
            raise ConfigurationError(
                "between the loader and optimizer.step() a function mode was taken away that was not entered there, or "
                "they run in different threads, so that the loss could not be watched: take the batch and step in one "
                "thread, and enter a mode of your own around both"
            )


def enter_below(mine: TorchFunctionMode) -> None:
    """Below all other modes, which come and go in their own order; torch.set_default_device wants to be lower."""
    above = []
    if stack := _get_current_function_mode_stack():
        lowest = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        above = [_pop_mode() for mode in stack if mode is not lowest]
    _push_mode(mine)
    for mode in reversed(above):
        _push_mode(mode)


def is_on(mine: TorchFunctionMode) -> bool:
    """Whether functions are shown to this mode."""
    return any(mode is mine for mode in _get_current_function_mode_stack())


def leave(mine: TorchFunctionMode) -> bool:
    """Take a mode away, wherever it lies; False: it is not there."""
    if mine not in _get_current_function_mode_stack():
        return False
    above = []
    while (mode := _pop_mode()) is not mine:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)
    return True


def _coupled(func: Any, args: Any, kwargs: Any, rows: int) -> str | None:
    """Why a call of a loss with counts is no mean of its examples' own losses; None: it is, or it is no mean."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    reduction = said["reduction"]
    old = said.get("size_average"), said.get("reduce")
    if old != (None, None):
        reduction = legacy.legacy_get_string(*old, emit_warning=False)
    target, weight, name = said["target"], said["weight"], f"{func.__name__} with reduction='mean'"
    if reduction != "mean" or target.is_floating_point() or not target.numel():
        return None  # classes with probabilities are divided by the number of rows
    if weight is not None and rows > 1 and bool((weight != weight.flatten()[0]).any()):
        return (
            f"{name} and weight= divides by the weights of the whole lot, so that one example more changes what all "
            "others weigh"
        )
    ignored = target == said["ignore_index"]
    if rows > 1 and bool(ignored.any()):
        counts = ignored.reshape(rows, -1).sum(1) if target.numel() % rows == 0 else ignored
        if bool((counts != counts[0]).any()):
            return (
                f"{name} over targets of which some are ignored (ignore_index) divides by how many the whole lot has, "
                "so that a long example weighs more than the clip norm allows"
            )
    return None
