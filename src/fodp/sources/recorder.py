"""Per-example gradients of a loop that somebody else runs: hooks record what its passes compute anyway."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fodp.clipping import self_check
from fodp.clipping.batches import Batch, Keyed, batch_size, plain, take
from fodp.clipping.engine import Engine, merged_each
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.layers.uses import Use
from fodp.clipping.recording import Recording
from fodp.clipping.self_check import tolerance
from fodp.draws import Marks, OwnPass, Source
from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.gradients import HERE, Points
from fodp.inputs.bad_records import explain_rows
from fodp.sampling import Lot
from fodp.sources.beside import Beside
from fodp.sources.between import Between
from fodp.sources.coupling import Coupling, each_its_own
from fodp.sources.padding import Padded
from fodp.sources.tape import Tape
from fodp.support import forms

TRAINER = "use fodp.Trainer, which computes the gradients itself"
_COMPARED = 4
_MADE_UP = 8  # lots of made-up rows, where a first lot says nothing about the model
LOOP = "one lot is one forward pass of its batch, one loss.backward() and one optimizer.step()"


class _Caught:
    """The gradient of one tensor, once the owner's backward pass has brought it."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class Recorder(Engine):
    """An engine whose gradients come from the owner's backward pass instead of passes of its own.

    The owner's forward passes are recorded as the engine's own are; hooks on tensors catch their gradients. `mean`
    says that the owner's loss is the mean over the lot, so gradients are multiplied by the lot's size.
    Un-noised gradients never stay in `.grad`, where another optimizer might find them.
    """

    def __init__(self, model: nn.Module, mean: bool):
        super().__init__(model, self._probe)
        self._mean = mean
        self._checking = False
        self._compared = False
        self._looked_at: Lot | None = None  # the lot, or part of one, that was looked at last: in all its passes
        self._between, self._coupling = Between(), Coupling(mean)
        self._rebuild: Callable[[list[Tensor]], Any]  # the model's arguments from those that hold examples
        self._pass: OwnPass | None = None  # the owner's forward pass, while it lasts
        self._stood_in: Marks | None = None  # where generators stood when a made-up row stood in for an empty lot
        self._joint_losses: set[int] = set()  # which of the model's outputs are losses that join examples
        self._inside = set(model.modules())
        self._beside = Beside(self._inside)
        self._followed: dict[int, Any] = {}  # hooks on parameters of other modules, for one lot
        self._open: Recording | None = None  # what records now
        self._refused_by: Callable[[DataError], DataError] = lambda found: found  # how data that does not fit is told
        self._inside_model: AbstractContextManager[None] | None = None  # while its forward pass lasts
        self.start(None)

    def start(
        self, lot: Lot | None, source: Source | None = None, padded: Padded | None = None, batch: Any = None
    ) -> None:
        """Forget what was recorded and listen for this lot; None: listen for nothing.

        `source` is where its records draw from; `padded` says that records look otherwise alone than in the lot;
        `batch` is what the owner is given.
        """
        self.lot, self._source, self._padded = lot, source, padded
        self._reduces_by_mean = self._mean  # loader.backward says otherwise for its lot
        self._listen_between(lot, batch)
        self._marks = Marks()  # whatever moves PyTorch's generator from here to the step was not drawn by record
        self._outsiders: dict[int, str] = {}  # backward passes that reached modules which are not the model's
        self._model_called = self._made_up = False
        self._recordings: list[Recording] = []
        self._uses: list[Use | None] | None = None  # what they amount to
        for handle in self._followed.values():
            handle.remove()
        # A hook on all modules, while there is a lot to be stepped.
        self._followed = {}
        if lot is not None:
            self._followed = {
                0: register_module_forward_hook(self._on_any_module),
                1: register_module_forward_pre_hook(self._before_any_module),
            }
        self._beside.forget()
        self._close()
        if lot is not None and self._by_module:
            self._record_from_here()  # parts of the model may be called by themselves, too
        self._backwards: set[int] = set()
        self._raw: dict[int, Tensor] = {}  # the owner's gradients, kept until they were compared once
        if lot is not None:
            for parameter in self.layout.parameters:
                parameter.grad = None

    def _listen_between(self, lot: Lot | None, batch: Any) -> None:
        """To what is called outside of the model: from a lot to its step, with a tape until the next lot."""
        if lot is None:
            if self._tape is not None:
                self._tape.end_lot()
            self._between.end_lot()
            return
        if self._tape is not None:
            self._coupling.over(self._tape)
        rows, tape = len(lot.indices), None
        if self._coupling.wants(lot.step, self.looks.again, self._padded is not None):
            tape = self._coupling.tape(rows)
            for leaf in () if batch is None else forms.leaves(batch):
                if isinstance(leaf, Tensor):
                    tape.add(leaf)
        self._between.open(rows, tape)

    @property
    def _tape(self) -> Tape | None:
        return self._between.tape

    @property
    def is_looking(self) -> bool:
        """Whether the model is being looked at, with other rows than the lot's."""
        return self._checking

    def refuse_by(self, refused: Callable[[DataError], DataError]) -> None:
        """Have this make the error that is raised for data that does not fit."""
        self._refused_by = refused

    def unheard(self) -> AbstractContextManager[None]:
        """Around work of the library's own between the loader and the next lot."""
        return self._between.unheard()

    def stop_listening(self) -> None:
        """The run is over."""
        self._between.close()

    def abandon(self) -> None:
        """Nobody has the loader any more, so nobody will end what listens between the loader and the step."""
        self._between.abandon()

    def start_between_parts(self) -> None:
        """Forget a part of a lot; until the next one is handed out there is nothing to listen for."""
        self.start(None)

    def uses(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None]:
        """The recorded uses, merged. `batch` only says how many examples there are."""
        if self._uses is None:
            self._uses = self._recorded_uses(batch_size(batch))
        return self._uses

    def _recorded_uses(self, rows: int) -> list[Use | None]:
        by_parameter: dict[int, list[Use]] = {id(p): [] for p in self.layout.parameters}
        for recording in self._recordings:
            caught = [slot.gradient for slot in recording.targets()]
            gradients = [g if g is None or not self._reduces_by_mean else g * rows for g in caught]
            try:
                for parameter, use in recording.uses(gradients, rows, alive=False):
                    by_parameter[parameter].append(use)
            except Unseparable as reason:
                raise ConfigurationError(
                    "a layer saw another number of rows than the lot has, or rows that cannot be told apart "
                    f"({reason}): feed the loader's batch to the model, all of it and nothing else, examples first; or "
                    f"{TRAINER}"
                ) from None
        return merged_each(by_parameter.values())

    def most_rows(self, batch: Batch) -> int | None:
        """All: the owner's passes have recorded the whole lot."""
        return None

    def refuse_incomplete(self) -> None:
        """Raise unless one forward and one backward pass of exactly this lot were recorded and understood."""
        assert self.lot is not None
        rows = len(self.lot.indices)
        if self._between.abandoned:
            raise ConfigurationError("the loader was dropped while its lot was in hand: keep it until the last step")
        self._refuse_second_backward()
        self._beside.refuse_changes()
        reached = [kind for task, kind in self._outsiders.items() if task in self._backwards]
        if reached:
            raise ConfigurationError(
                f"the backward pass reached a trainable {reached[0]}, which is not part of the model: an optimizer of "
                "its own would train it on gradients without noise. Make it part of the model before make_private, or "
                "freeze it (requires_grad_(False))"
            )
        if rows and not self._backwards:
            raise ConfigurationError(f"optimizer.step() without a backward through the model: {LOOP}")
        caught = [slot.gradient for recording in self._recordings for slot in recording.targets()]
        # What a made-up row gives is no example's; nothing is asked about an empty lot.
        if not rows and not self._made_up and any(gradient is not None and gradient.numel() for gradient in caught):
            raise ConfigurationError(
                "the model saw another number of rows than the lot has examples: this lot is empty"
            )
        if rows:
            with self.exactly(), torch.no_grad():
                self.uses(self.lot.indices)  # refuses what cannot be told apart
        if (rows and not self._model_called) or (rows > 1 and not self._checked):
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
        if rows > 1 and not self._compared:
            self._compare_sums(self.lot)
        if rows and self._tape is not None:
            with self._quietly():
                self._coupling.refuse(self._tape, self.lot.step, () if self._padded is None else self._padded.shapes)

    def backward(self, losses: Any) -> None:
        """The backward pass of one loss per example, added up here."""
        if self.lot is None:
            raise ConfigurationError(f"loader.backward() without a lot in hand: {LOOP}")
        rows = len(self.lot.indices)
        if not isinstance(losses, Tensor) or losses.shape != (rows,) or not losses.is_floating_point():
            raise ConfigurationError(
                "loader.backward takes one loss per example, a tensor of as many numbers as the batch has rows, got "
                + (f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__)
                + ": use reduction='none', and take the mean over an example's own positions only"
            )
        if rows and not losses.requires_grad:
            raise ConfigurationError(
                "loader.backward: the losses do not depend on any trainable parameter of the model"
            )
        if not losses.requires_grad:
            return  # an empty lot has nothing to learn from
        if self._tape is not None and rows > 1:
            self._refuse_crossing(losses)
        if self._tape is not None:
            self._tape.by_example = True
        self._reduces_by_mean = False
        losses.backward(torch.ones_like(losses))
        if rows and not self._backwards:
            raise ConfigurationError("loader.backward: the losses do not depend on the model's outputs for this lot")

    def _refuse_crossing(self, losses: Tensor) -> None:
        """Raise if the loss of one example has a gradient at the model's outputs for another."""
        assert self._tape is not None
        outputs = self._tape.outputs()
        if not outputs:
            return
        factors = 1 + _weights(len(losses)).abs().to(losses)
        try:
            with self._quietly():
                plain, scaled = (
                    torch.autograd.grad(losses, outputs, start, retain_graph=True, allow_unused=True)
                    for start in (torch.ones_like(losses), factors)
                )
        except RuntimeError:
            return  # a compiled loss, whose graph can be gone through once
        finally:
            self._tape.forget_found()
        if not each_its_own(plain, scaled, factors):
            raise ConfigurationError(
                "loader.backward: the loss of one example depends on the model's outputs for others (pairs, a mean or "
                "a normalisation over the lot), so that one example more changes the gradients of all: compute each "
                "loss from its own example alone"
            )

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Passes of the library's own over what the owner has computed."""
        self._checking = True
        try:
            with self.unheard():
                yield
        finally:
            self._checking = False

    def listen(self) -> list[Any]:
        """Put the hooks in place; returns their handles.

        They are plain functions, which a deep copy of the model shares, and they ignore the copy.
        """
        handles: list[Any] = []

        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is self.model and not self._checking:
                self._inside_model = self.unheard()
                self._inside_model.__enter__()
                self._on_model_call(args, kwargs)
                return self._with_stand_in(args, kwargs)
            return None

        def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if module is self.model and not self._checking:
                try:
                    self._on_model_return(output)
                    return self._without_stand_in(output)
                finally:
                    if self._inside_model is not None:
                        self._inside_model.__exit__(None, None, None)
                    self._inside_model = None
                    if self._model_called:
                        self._between.model_returned()
            return None

        handles.append(self.model.register_forward_pre_hook(called, with_kwargs=True))
        handles.append(self.model.register_forward_hook(returned, always_call=True))
        for parameter in self.layout.parameters:
            handles.append(parameter.register_post_accumulate_grad_hook(self._take_away))
        return handles

    def _record_from_here(self) -> None:
        """Begin to record, until `_close`."""
        lot = self.lot

        def catch(output: Tensor) -> _Caught | None:
            if self._checking:
                return None
            caught = _Caught()
            output.register_hook(lambda gradient: self._catch(lot, caught, gradient.detach()))
            return caught

        self._open = self._recording(catch)
        self._open.__enter__()
        self._recordings.append(self._open)

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _on_model_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watched:
            refuse_errors(self.model)  # model.train() may have woken a frozen BatchNorm
        if self.lot is None or self._source is None or not torch.is_grad_enabled():
            return
        self._model_called = True
        rows = len(self.lot.indices)
        if rows and self._tape is not None:
            with self._quietly():
                self._coupling.refuse_inputs(self._tape, _outputs((args, kwargs)))
        if rows and (self._looked_at is self.lot or self.looks.due(self.looks.step, self.looks.again)):
            self._look(args, kwargs, self.lot)
        if rows and self._padded is not None:
            self._look_at_padding(args, kwargs, self._padded)
        if rows and not self.site.quiet and any(_has_rows(leaf, rows) for leaf in tree_leaves((args, kwargs))):
            self._pass = OwnPass(self.site, self._source, self.lot.records)
        if not self._by_module:
            self._close()  # it may have been open until this lot was looked at
            if rows and self._axes is not None:
                self._record_from_here()

    def _on_model_return(self, output: Any) -> None:
        if not self._by_module:
            self._close()
        current, self._pass = self._pass, None
        if current is not None:
            current.end(output is not None)  # None: the forward pass has raised
        if self._tape is not None and self.lot is not None and self._model_called:
            for leaf in _outputs(output):
                self._tape.add(leaf, of_model=True)
        if self.lot is not None and self._joint_losses:
            for place, leaf in enumerate(_outputs(output)):
                if place in self._joint_losses and leaf.requires_grad:
                    leaf.register_hook(self._refuse_joint_loss)

    def _with_stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of an empty lot with one made-up row, for many models fail on none; nothing comes of it.

        An empty lot has no gradients, whatever the model computes; its step is noise alone.
        """
        if self.lot is None or len(self.lot.indices) or not torch.is_grad_enabled():
            return None
        leaves, form = tree_flatten((args, kwargs))
        if not any(_has_rows(leaf, 0) for leaf in leaves):
            return None
        self._stood_in, self._made_up = Marks(), True  # it may draw
        return tree_unflatten(
            [leaf.new_zeros(1, *leaf.shape[1:]) if _has_rows(leaf, 0) else leaf for leaf in leaves], form
        )

    def _without_stand_in(self, output: Any) -> Any:
        """The output of an empty lot as it would be: without the made-up row."""
        if self._stood_in is None:
            return None
        self._stood_in.restore()
        self._stood_in = None
        if output is None:  # the forward pass has raised
            return None
        return tree_map(lambda leaf: leaf[:0] if _has_rows(leaf, 1) else leaf, output)

    def _refuse_joint_loss(self, gradient: Tensor) -> None:
        if self.lot is not None:
            raise ConfigurationError(
                "the loss that the model returns is not the "
                + ("mean" if self._mean else "sum")
                + " of its examples' own losses, as loss_reduction says: it is another reduction, or one over the "
                "tokens of the whole lot, in which a long example weighs more than the clip norm allows. Take one "
                "loss per example, fodp.losses.causal_lm(outputs.logits, labels).mean() for a language model"
            )

    def _is_of_no_interest(self, module: nn.Module) -> bool:
        if torch.compiler.is_compiling():
            return True
        return self.lot is None or self._checking or not torch.is_grad_enabled() or module in self._inside

    def _before_any_module(self, module: nn.Module, args: Any) -> None:
        if not self._is_of_no_interest(module):
            with torch._C.DisableTorchFunction():
                self._beside.before(module)

    def _on_any_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Of a module that is not the model's but trains: is it reached by this lot's backward pass?"""
        if self._is_of_no_interest(module):
            return
        self._beside.after(module, output)
        kind = type(module).__name__

        def reached(_: Tensor) -> None:
            self._outsiders[torch._C._current_graph_task_id()] = kind

        for parameter in module.parameters(recurse=False):
            known = id(parameter) in self._followed or any(parameter is own for own in self.layout.parameters)
            if parameter.requires_grad and not known:
                self._followed[id(parameter)] = parameter.register_post_accumulate_grad_hook(reached)

    def _catch(self, lot: Lot | None, caught: _Caught, gradient: Tensor) -> None:
        """The gradient of a tensor has arrived."""
        if self.lot is None or self._checking:
            return  # nothing can be stepped: an adversarial test, a saliency map
        if lot is not self.lot:
            raise ConfigurationError(f"this backward goes through the forward pass of another lot: {LOOP}")
        self._between.refuse_joint(torch._C._current_graph_task_id())
        self._backwards.add(torch._C._current_graph_task_id())
        self._refuse_second_backward()
        caught.gradient = gradient if caught.gradient is None else caught.gradient + gradient

    def _refuse_second_backward(self) -> None:
        if len(self._backwards) > 1:
            raise ConfigurationError(
                "a second backward in the same lot: add the losses up and call backward once; gradients cannot be "
                f"accumulated ({LOOP})"
            )

    def _take_away(self, parameter: Tensor) -> None:
        if self.lot is not None and not self._compared and parameter.grad is not None:
            self._raw[id(parameter)] = parameter.grad
        parameter.grad = None

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any], lot: Lot) -> None:
        """The engine's questions, on the model's real inputs, with a made-up loss of its outputs."""
        rows = len(lot.indices)
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf, rows)]
        if not places:
            return  # not this lot but an evaluation that forgot no_grad; or the step will be refused

        def rebuild(parts: list[Tensor]) -> Any:
            given = dict(zip(places, parts, strict=True))
            return tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)

        assert self._source is not None
        batch = Keyed([_finite(leaves[i].detach()) for i in places], lot.records, self._source)
        self._checking, self._rebuild = True, rebuild
        try:
            with torch.autocast(self.layout.device.type, enabled=False), torch.random.fork_rng(devices=[]):
                self_check.refuse_unsteady(self, batch)
                if self.site.alone:
                    self._take_loop("what it draws cannot be told apart by example")
                if rows > 1:
                    self._look_at_pairs(batch)
                elif not self._by_module and self._axes is None:
                    self._learn(batch)
                self._look_at_losses(batch)
        except Unseparable as reason:
            self._take_loop(str(reason))
        except Exception as error:
            found = explain_rows(
                lambda some: self.run_keyed(take(batch, torch.tensor(some))), lot.indices.tolist(), error
            )
            if found is None:
                raise
            found = self._refused_by(found)
            raise found from found.__cause__
        finally:
            self._checking = False
            del self._rebuild

    def _look_at_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any], padded: Padded) -> None:
        """Whether a record's padding has an effect, on any lot in which records look otherwise than alone."""
        self._checking = True
        try:
            with torch.autocast(self.layout.device.type, enabled=False), torch.random.fork_rng(devices=[]):
                padded.refuse_difference(self, args, kwargs)
        finally:
            self._checking = False

    def _look_at_pairs(self, batch: Keyed) -> None:
        if not self._checked:
            problem = self._problem(batch)
            for shift in range(_MADE_UP):  # empty rows, say, or all was dropped out: any others will do
                if problem is None:
                    problem = self._problem_with_made_up(batch, shift)
            if problem is None:
                raise ConfigurationError(
                    "the model cannot be checked on the first lot, for its outputs are not finite, have no gradient or "
                    "rest on ties: normalise the data, look at the initial weights"
                )
            if problem:
                self._take_loop(problem)
            self._checked = True
        problem = self_check.mixing(self, batch)
        if problem:
            self._take_loop(problem)
        if self._looked_at is not self.lot:
            self._looked_at = self.lot
            self.looks.told(self.looks.step)

    def _problem_with_made_up(self, batch: Keyed, shift: int) -> str | None:
        """The same of other numbers, in turns with other words: what a first lot holds must not end a run."""
        tables = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        words = min(tables) if tables and shift % 2 else None
        made_up = Keyed([_made_up(part, words) for part in batch.rows], batch.records + shift, batch.source)
        try:
            return self._problem(made_up)
        except PrivacyError:
            raise
        except Exception:  # a model that takes no such words, labels among its inputs for one
            if words is None:
                raise
            return None

    def _look_at_losses(self, batch: Keyed) -> None:
        """Is a loss that the model itself returns the declared reduction of its examples' own?"""
        some = take(batch, slice(0, _COMPARED))
        together = self._scalars(some)
        if not together:
            return
        alone = [self._scalars(take(some, slice(i, i + 1))) for i in range(batch_size(some))]
        for place, value in together.items():
            own = torch.stack([each[place] for each in alone if place in each])
            expected = own.mean() if self._mean else own.sum()
            if len(own) < len(alone) or not torch.allclose(value, expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                self._joint_losses.add(place)

    def _scalars(self, batch: Keyed) -> dict[int, Tensor]:
        """Numbers with a gradient that the model returns for these rows."""
        outputs = self.run_keyed(batch)
        found = {i: o for i, o in enumerate(_outputs(outputs)) if o.dim() == 0 and o.requires_grad}
        return {i: o.detach().double() for i, o in found.items()}

    def run_keyed(self, batch: Keyed) -> Any:
        """The model's output for these rows, with their own draws."""

        def work(rows: Batch) -> Any:
            args, kwargs = self._rebuild(plain(rows))
            with torch.enable_grad():
                return self.model(*args, **kwargs)

        single = batch_size(batch) == 1
        return self.site.run(
            lambda current: current.forward(lambda: work(batch)),
            batch.source,
            batch.records,
            lambda rows: work(take(batch, rows)),
            single,
        )

    def _probe(self, model: nn.Module, batch: Batch) -> Tensor:
        """One made-up loss per example: the outputs times fixed random numbers."""
        rows = len(batch[0])
        args, kwargs = self._rebuild(batch)
        parts = []
        for output in _outputs(model(*args, **kwargs)):
            if not output.requires_grad or output.dim() == 0:
                continue  # a scalar, such as a loss, says nothing about one example
            if output.shape[0] != rows:
                self._take_loop("it returns tensors whose first dimension is not the lot's")
            flat = output.reshape(rows, -1)
            parts.append(flat @ _weights(flat.shape[1]).to(flat))
        if not parts:
            self._take_loop("it returns no tensor with a row for each example")
        return torch.stack(parts).sum(0)

    def _take_loop(self, reason: str) -> None:
        # There is no loop to take here.
        raise ConfigurationError(
            "the model must keep the examples of a lot apart, in the first dimension of its layers and outputs, and "
            f"use weights through their own layers only: {reason}. Change that, or {TRAINER}"
        )

    def _compare_sums(self, lot: Lot) -> None:
        """What was recorded must add up to what backward computed, or part of the loss went past the layers."""
        layout, rows = self.layout, len(lot.indices)
        raw = layout.zeros()
        for parameter, view in zip(layout.parameters, layout.views(raw), strict=True):
            if id(parameter) in self._raw:
                view.copy_(self._raw[id(parameter)].to_dense()).mul_(rows if self._reduces_by_mean else 1)
        if not raw.isfinite().all():
            return  # an example that contributes nothing; the next lot will tell
        uses, ones = self.uses(lot.indices), layout.zeros().new_ones(rows)
        sizes = torch.stack([ones.sum() * 0 if u is None else u.squared_norms().sqrt().sum().to(ones) for u in uses])
        half = any(recording.half_precision for recording in self._recordings)
        allowed = tolerance(half or self.half_precision)
        for i, (use, expected) in enumerate(zip(uses, layout.views(raw), strict=True)):
            found = torch.zeros_like(expected)
            if use is not None:
                use.add_weighted(found, ones, False)
            if (found - expected).norm() > allowed * (sizes[i] + 1e-3 * sizes.sum()):
                raise ConfigurationError(
                    f"part of the loss reaches {layout.names[i]} past its layer (a penalty on weights, a weight used "
                    f"by hand) and would be lost: put penalties into the optimizer's weight_decay, or {TRAINER}"
                )
        self._compared = True
        self._raw = {}


def _finite(tensor: Tensor) -> Tensor:
    """Anything finite will do for a check of the model."""
    return torch.where(tensor.isfinite(), tensor, 0.5) if tensor.is_floating_point() else tensor


def _made_up(tensor: Tensor, words: int | None) -> Tensor:
    """Other numbers of the same kind, the same in every run; whole ones below `words`, or as they are."""
    if not tensor.is_floating_point():
        if words is None or tensor.dtype == torch.bool:
            return tensor
        return torch.arange(tensor.numel()).mul(7919).remainder(words).reshape(tensor.shape).to(tensor)
    return _weights(tensor.numel()).reshape(tensor.shape).to(tensor)


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)


def _outputs(output: Any) -> list[Tensor]:
    """The tensors that a model returns, also in objects of its own."""
    return list(_found(output))


def _found(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))


def _weights(count: int) -> Tensor:
    """Fixed numbers, without PyTorch's generator."""
    return torch.arange(1, count + 1, dtype=torch.float64).mul(12.9898).sin()
