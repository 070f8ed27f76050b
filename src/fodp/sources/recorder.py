"""Per-example gradients of a loop that somebody else runs: hooks record what its passes compute anyway."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fodp.draws import Source
from fodp.errors import ConfigurationError
from fodp.sampling import Lot
from fodp.sources.beside import Beside
from fodp.sources.between import Between
from fodp.sources.caught import Caught, Slot
from fodp.sources.coupling import Coupling
from fodp.sources.examiner import Examiner
from fodp.sources.own_lot import LOOP, OwnLot
from fodp.sources.padding import Padded
from fodp.support import forms
from fodp.support.torch_internals import DisableTorchFunction, current_backward


class Recorder:
    """Listens to the owner's passes: on the model, on its parameters, on what is called from the loader to the step.

    `current` is the lot, or part of one, in the owner's hands. What the passes do belongs to that object.
    """

    def __init__(self, engine: Examiner):
        self.engine, self.between = engine, Between()
        self.current: OwnLot | None = None
        self._coupling = Coupling(engine.mean)
        self._inside = frozenset(engine.model.modules())
        self._sums_agree = False  # what was recorded has added up to the owner's gradients once
        self._was_heard = False  # before the model's forward pass, while that lasts

    def start(self, lot: Lot, source: Source, padded: Padded | None, batch: Any) -> None:
        """Listen for this lot, whose owner is given this batch."""
        self.end()
        engine, rows, tape = self.engine, len(lot.indices), None
        if self.between.tape is not None:
            self._coupling.over(self.between.tape)
        if self._coupling.wants(lot.step, engine.looks.again, padded is not None):
            tape = self._coupling.tape(rows)
            for leaf in forms.leaves(batch):
                if isinstance(leaf, Tensor):
                    tape.add(leaf)
        self.between.open(rows, tape)

        def hook(slot: Slot) -> Any:
            return partial(self._catch, current, slot)

        current = OwnLot(
            lot,
            source,
            padded,
            tape,
            engine=engine,
            coupling=self._coupling,
            caught=Caught(engine, rows, hook),
            beside=Beside(engine, self._inside),
        )
        self.current = current
        for parameter in engine.layout.parameters:
            parameter.grad = None

    def end(self) -> None:
        """Forget what was recorded; until the next lot, or part of one, there is nothing to listen for."""
        current, self.current = self.current, None
        if current is not None:
            current.end()
            self.between.end_lot()

    def abandon(self) -> None:
        """Nobody has the loader any more: end what listens in the whole process. A lot in hand can not be stepped."""
        self.between.abandon()
        if self.current is not None:
            self.current.abandon()

    def unheard(self) -> AbstractContextManager[None]:
        """Around work of the library's own between the loader and the next lot."""
        return self.between.unheard()

    def refuse_incomplete(self) -> None:
        """Raise unless one forward and one backward pass of exactly this lot were recorded and understood."""
        current = self.current
        assert current is not None
        if self.between.abandoned:
            raise ConfigurationError("the loader was dropped while its lot was in hand: keep it until the last step")
        current.refuse_incomplete()
        if current.rows > 1 and not self._sums_agree:
            self._sums_agree = current.caught.adds_up()
        current.refuse_coupled()

    def backward(self, losses: Any) -> None:
        """The backward pass of one loss per example, added up here."""
        current = self.current
        if current is None:
            raise ConfigurationError(f"loader.backward() without a lot in hand: {LOOP}")
        with DisableTorchFunction():
            if not _is_one_each(losses, current.rows):
                return  # an empty lot has nothing to learn from
            current.refuse_crossing(losses)
            current.caught.sum_losses()
            start = torch.ones_like(losses)
        losses.backward(start)
        if current.rows and not current.caught.backwards:
            raise ConfigurationError("loader.backward: the losses do not depend on the model's outputs for this lot")

    def listen(self) -> list[Any]:
        """Put the hooks in place; returns their handles.

        They are plain functions, which a deep copy of the model shares, and they ignore the copy.
        """
        engine, model = self.engine, self.engine.model

        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is not model or engine.is_looking:
                return None
            self._was_heard = self.between.pause()
            engine.refuse_woken()
            return None if self.current is None else self.current.before_model(args, kwargs)

        def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if module is not model or engine.is_looking:
                return None
            current, was_heard, self._was_heard = self.current, self._was_heard, False
            try:
                return None if current is None else current.after_model(output)
            finally:
                if was_heard or (current is not None and current.is_called):  # from here on a loss may be computed
                    self.between.go_on()

        def arrived(parameter: Tensor) -> None:
            if self.current is not None and not self._sums_agree and parameter.grad is not None:
                self.current.caught.raw[id(parameter)] = parameter.grad
            parameter.grad = None

        handles: list[Any] = [
            model.register_forward_pre_hook(called, with_kwargs=True),
            model.register_forward_hook(returned, always_call=True),
        ]
        return handles + [p.register_post_accumulate_grad_hook(arrived) for p in engine.layout.parameters]

    def _catch(self, lot: OwnLot, slot: Slot, gradient: Tensor) -> None:
        """The gradient of a recorded tensor has arrived."""
        current = self.current
        if current is None or self.engine.is_looking:
            return  # nothing can be stepped: an adversarial test, a saliency map
        if lot is not current:
            raise ConfigurationError(f"this backward goes through the forward pass of another lot: {LOOP}")
        task = current_backward()
        if self.between.joint:
            self.between.refuse_joint(task)
        if task not in current.caught.backwards:
            current.caught.backwards.add(task)
            current.refuse_second_backward()
        gradient = gradient.detach()
        slot[:] = [slot[0] + gradient if slot else gradient]


def _is_one_each(losses: Any, rows: int) -> bool:
    """Raise unless these are one loss for each row, of the model; False: of no rows."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,) or not losses.is_floating_point():
        raise ConfigurationError(
            "loader.backward takes one loss per example, a tensor of as many numbers as the batch has rows, got "
            + (f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__)
            + ": use reduction='none', and take the mean over an example's own positions only"
        )
    if rows and not losses.requires_grad:
        raise ConfigurationError("loader.backward: the losses do not depend on any trainable parameter of the model")
    return losses.requires_grad
