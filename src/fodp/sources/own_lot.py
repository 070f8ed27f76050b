"""One lot in its owner's hands: an object that is made when the lot is handed out, and dies with the lot."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fodp.draws import Marks, OwnPass, Source
from fodp.errors import ConfigurationError
from fodp.sampling import Lot
from fodp.sources.beside import Beside
from fodp.sources.caught import Caught
from fodp.sources.coupling import Coupling
from fodp.sources.examiner import TRAINER, Examiner, has_rows, outputs_of
from fodp.sources.padding import Padded
from fodp.sources.tape import Tape

LOOP = "one lot is one forward pass of its batch, one loss.backward() and one optimizer.step()"


class OwnLot:
    """What the owner's passes do with a lot, or with a part of one.

    `source` is where its records draw from; `padded` says that records look otherwise alone than in the lot; `tape`
    keeps the calls between the loader and the step, if this lot is looked at.
    """

    def __init__(
        self,
        lot: Lot,
        source: Source,
        padded: Padded | None,
        tape: Tape | None,
        *,
        engine: Examiner,
        coupling: Coupling,
        caught: Caught,
        beside: Beside,
    ):
        self.lot, self.rows, self.caught, self.beside, self.tape = lot, len(lot.indices), caught, beside, tape
        self._source, self._padded, self._engine, self._coupling = source, padded, engine, coupling
        self._marks = Marks()  # whatever moves PyTorch's generator from here to the step was not drawn by record
        self.is_called = False  # the model was, on this lot
        self._is_over = False
        self._pass: OwnPass | None = None  # the owner's forward pass, while it lasts
        self._stood_in: Marks | None = None  # where generators stood when a made-up row stood in for an empty lot
        self._made_up = False
        if engine.records_modules:
            caught.record()  # parts of the model may be called by themselves, too

    def end(self) -> None:
        """The lot is over, or has broken off."""
        self._is_over = True
        self.caught.close()
        self.beside.end()

    def abandon(self) -> None:
        """The loader is gone, perhaps collected in the middle of other code: end hooks, and leave modes as they are."""
        if self._engine.records_modules:
            self.caught.close()
        self.beside.end()

    def before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model is about to be called; returns its arguments if they are to be others."""
        if not torch.is_grad_enabled():
            return None
        self.is_called = True
        engine = self._engine
        if self.rows:
            if self.tape is not None:
                with engine.looking():
                    self._coupling.refuse_inputs(self.tape, outputs_of((args, kwargs)))
            engine.examine(args, kwargs, self.lot, self._source, self._padded)
            if not engine.site.quiet and any(has_rows(leaf, self.rows) for leaf in tree_leaves((args, kwargs))):
                self._pass = OwnPass(engine.site, self._source, self.lot.records)
        if not engine.records_modules:
            self.caught.close()  # it may have been open until this lot was looked at
            if self.rows:
                self.caught.record()
        return None if self.rows else self._with_stand_in(args, kwargs)

    def after_model(self, output: Any) -> Any:
        """The model has returned; returns its output if it is to be another. None: the pass has raised."""
        if not self._engine.records_modules:
            self.caught.close()
        current, self._pass = self._pass, None
        if current is not None:
            current.end(output is not None)
        if self.tape is not None and self.is_called:
            for leaf in outputs_of(output):
                self.tape.add(leaf, of_model=True)
        if self._engine.joint_losses:
            for place, leaf in enumerate(outputs_of(output)):
                if place in self._engine.joint_losses and leaf.requires_grad:
                    leaf.register_hook(self._refuse_joint_loss)
        return None if self._stood_in is None else self._without_stand_in(output)

    def _with_stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of an empty lot with one made-up row, for many models fail on none; nothing comes of it.

        An empty lot has no gradients, whatever the model computes; its step is noise alone.
        """
        leaves, form = tree_flatten((args, kwargs))
        if not any(has_rows(leaf, 0) for leaf in leaves):
            return None
        self._stood_in, self._made_up = Marks(), True  # it may draw
        return tree_unflatten(
            [leaf.new_zeros(1, *leaf.shape[1:]) if has_rows(leaf, 0) else leaf for leaf in leaves], form
        )

    def _without_stand_in(self, output: Any) -> Any:
        """The output of an empty lot as it would be: without the made-up row."""
        assert self._stood_in is not None
        self._stood_in.restore()
        self._stood_in = None
        return None if output is None else tree_map(lambda leaf: leaf[:0] if has_rows(leaf, 1) else leaf, output)

    def _refuse_joint_loss(self, gradient: Tensor) -> None:
        if not self._is_over:
            raise ConfigurationError(
                "the loss that the model returns is not the "
                + ("mean" if self._engine.mean else "sum")
                + " of its examples' own losses, as loss_reduction says: it is another reduction, or one over the "
                "tokens of the whole lot, in which a long example weighs more than the clip norm allows. Take one "
                "loss per example, fodp.losses.causal_lm(outputs.logits, labels).mean() for a language model"
            )

    def refuse_second_backward(self) -> None:
        """Raise if two backward passes have reached the model."""
        if len(self.caught.backwards) > 1:
            raise ConfigurationError(
                "a second backward in the same lot: add the losses up and call backward once; gradients cannot be "
                f"accumulated ({LOOP})"
            )

    def refuse_incomplete(self) -> None:
        """Raise unless one forward and one backward pass of exactly this lot were recorded and understood."""
        self.refuse_second_backward()
        self.beside.refuse_changes()
        self.beside.refuse_trained(self.caught.backwards)
        if not self.rows:
            # What a made-up row gives is no example's; nothing is asked about an empty lot.
            if not self._made_up and self.caught.has_any():
                raise ConfigurationError(
                    "the model saw another number of rows than the lot has examples: this lot is empty"
                )
        elif not self.caught.backwards:
            raise ConfigurationError(f"optimizer.step() without a backward through the model: {LOOP}")
        else:
            with self.caught.exactly(), torch.no_grad():
                self.caught.uses()
            if not self.is_called or (self.rows > 1 and not self._engine.is_checked):
                raise ConfigurationError(
                    "the model itself was not called on this lot: call model(batch, ...), not only its parts, with "
                    f"the examples in the first dimension of its inputs; or {TRAINER}"
                )
        if self._marks.moved():
            raise ConfigurationError(
                "random numbers were drawn from PyTorch's generator between the loader and optimizer.step(), outside "
                "of the model: for a whole lot, so that one record more changes what all others draw. Draw inside of "
                f"the model, in the data set or in collate_fn, which are keyed by record; or {TRAINER}"
            )

    def refuse_coupled(self) -> None:
        """Raise if the loss of this lot is not the declared reduction of its examples' own, where it is looked at."""
        if self.rows and self.tape is not None:
            with self._engine.looking():
                shapes = () if self._padded is None else self._padded.shapes
                self._coupling.refuse(self.tape, self.lot.step, shapes)

    def refuse_crossing(self, losses: Tensor) -> None:
        """Raise if the loss of one example has a gradient at the model's outputs for another, where it is looked at."""
        if self.tape is None:
            return
        if self.rows > 1:
            with self._engine.looking():
                self._coupling.refuse_crossing(self.tape, losses)
        self.tape.take_by_example()
