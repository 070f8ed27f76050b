"""Per-example gradients of a loop that somebody else runs: hooks record what its passes compute anyway."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fodp._checks import PrivacyError
from fodp.clipping import self_check
from fodp.clipping.batches import Batch, Keyed, batch_size, plain, take
from fodp.clipping.combine import merged
from fodp.clipping.engine import HERE, Engine, Points, _Call, _versions
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.rules import RULES
from fodp.clipping.self_check import tolerance
from fodp.clipping.uses import Use
from fodp.draws import Marks, OwnPass, Source
from fodp.sampling import Lot
from fodp.training.padding import Padded

TRAINER = "use fodp.Trainer, which computes the gradients itself"
_FIRST_LOTS = 2
_COMPARED = 4
LOOP = "one lot is one forward pass of its batch, one loss.backward() and one optimizer.step()"


class Recorder(Engine):
    """An engine whose gradients come from the owner's backward pass instead of passes of its own.

    Forward hooks remember the inputs of each layer, hooks on the outputs catch their gradients. `mean`
    says that the owner's loss is the mean over the lot, so gradients are multiplied by the lot's size.
    Un-noised gradients never stay in `.grad`, where another optimizer might find them.
    """

    def __init__(self, model: nn.Module, mean: bool):
        super().__init__(model, self._probe)
        for name, module in model.named_modules():
            if type(module) not in RULES and any(p.requires_grad for p in module.parameters(recurse=False)):
                where = f"{name or 'the model'} ({type(module).__name__})"
                raise PrivacyError(f"{where} has no layer rule: freeze it, or {TRAINER}")
        self._mean = mean
        self._checking = False
        self._compared = False
        self._looked = 0  # how many lots the model was looked at with
        self._rebuild: Callable[[list[Tensor]], Any]  # the model's arguments from those that hold examples
        self._pass: OwnPass | None = None  # the owner's forward pass, while it lasts
        self._joint_losses: set[int] = set()  # which of the model's outputs are losses that join examples
        self._inside = set(model.modules())
        self._followed: dict[int, Any] = {}  # hooks on parameters of other modules, for one lot
        self.start(None)

    def start(self, lot: Lot | None, source: Source | None = None, padded: Padded | None = None) -> None:
        """Forget what was recorded and listen for this lot; None: listen for nothing.

        `source` is where its records draw from; `padded` says that records look otherwise alone than in the lot.
        """
        self.lot, self._source, self._padded = lot, source, padded
        self._marks = Marks()  # whatever moves PyTorch's generator from here to the step was not drawn by record
        self._outsiders: dict[int, str] = {}  # backward passes that reached modules which are not the model's
        self._model_called = False
        self._caught: list[tuple[_Call, Tensor]] = []
        for handle in self._followed.values():
            handle.remove()
        # A hook on all modules, while there is a lot to be stepped.
        self._followed = {} if lot is None else {0: register_module_forward_hook(self._on_any_module)}
        self._backwards: set[int] = set()
        self._raw: dict[int, Tensor] = {}  # the owner's gradients, kept until they were compared once
        if lot is not None:
            for parameter in self.layout.parameters:
                parameter.grad = None

    def uses(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None]:
        """The recorded uses, merged. `batch` only says how many examples there are."""
        rows = batch_size(batch)
        by_parameter: dict[int, list[Use]] = {id(p): [] for p in self.layout.parameters}
        for call, gradient in self._caught:
            back = gradient * rows if self._mean else gradient
            try:
                if call.versions != _versions(call.args, call.kwargs):
                    raise Unseparable(f"an input of {type(call.module).__name__} was changed in place later on")
                found = self._uses_of(call, [(0, back)], rows)
            except Unseparable as reason:
                raise PrivacyError(f"{reason}: feed the whole batch to the model, or {TRAINER}") from None
            for name, use in found.items():
                if name in call.parameters:
                    by_parameter[id(call.parameters[name])].append(use)
        return [merged(uses) if uses else None for uses in by_parameter.values()]

    def most_rows(self, batch: Batch) -> int | None:
        """All: the owner's passes have recorded the whole lot."""
        return None

    def refuse_incomplete(self) -> None:
        """Raise unless one forward and one backward pass of exactly this lot were recorded and understood."""
        assert self.lot is not None
        rows = len(self.lot.indices)
        self._refuse_second_backward()
        reached = [kind for task, kind in self._outsiders.items() if task in self._backwards]
        if reached:
            raise PrivacyError(
                f"the backward pass reached a trainable {reached[0]}, which is not part of the model: an optimizer of "
                "its own would train it on gradients without noise. Make it part of the model before make_private, or "
                "freeze it (requires_grad_(False))"
            )
        if rows and not self._caught:
            raise PrivacyError(f"optimizer.step() without a backward through the model: {LOOP}")
        for call, gradient in self._caught:
            if gradient.shape[:1] != (rows,):
                raise PrivacyError(
                    f"{type(call.module).__name__} saw another number of rows than the lot has examples: feed the "
                    f"loader's batch to the model, all of it and nothing else, examples first; or {TRAINER}"
                )
        if (rows and not self._model_called) or (rows > 1 and not self._checked):
            raise PrivacyError(
                "the model itself was not called on this lot: call model(batch, ...), not only its parts, with "
                f"the examples in the first dimension of its inputs; or {TRAINER}"
            )
        if self._marks.moved():
            raise PrivacyError(
                "random numbers were drawn from PyTorch's generator between the loader and optimizer.step(), outside "
                "of the model: for a whole lot, so that one record more changes what all others draw. Draw inside of "
                f"the model, in the data set or in collate_fn, which are keyed by record; or {TRAINER}"
            )
        if rows > 1 and not self._compared:
            self._compare_sums(self.lot)

    def listen(self) -> list[Any]:
        """Put the hooks in place; returns their handles.

        They are plain functions, which a deep copy of the model shares, and they ignore the copy.
        """
        handles: list[Any] = []
        for module in self.model.modules():
            owned = {n: p for n, p in module.named_parameters(recurse=False) if id(p) in self._trainable}
            if owned:
                handles.append(module.register_forward_hook(self._recording(module, owned), with_kwargs=True))

        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self.model and not self._checking:
                self._on_model_call(args, kwargs)

        def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is self.model and not self._checking:
                self._on_model_return(output)

        handles.append(self.model.register_forward_pre_hook(called, with_kwargs=True))
        handles.append(self.model.register_forward_hook(returned, always_call=True))
        for parameter in self.layout.parameters:
            handles.append(parameter.register_post_accumulate_grad_hook(self._take_away))
        return handles

    def _recording(self, owner: nn.Module, owned: dict[str, nn.Parameter]) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if module is not owner or self._checking or not output.requires_grad:
                return
            call, lot = _Call(module, owned, args, kwargs, _versions(args, kwargs)), self.lot
            # The graph keeps the record: a forward pass without a backward (an evaluation) leaves nothing.
            output.register_hook(lambda gradient: self._catch(lot, call, gradient.detach()))

        return record

    def _on_model_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watched:
            refuse_errors(self.model)  # model.train() may have woken a frozen BatchNorm
        if self.lot is None or self._source is None or not torch.is_grad_enabled():
            return
        self._model_called = True
        rows = len(self.lot.indices)
        if rows and (self._looked < _FIRST_LOTS or self.look_again):
            self._look(args, kwargs, self.lot)
        if rows and not self.site.quiet and any(_has_rows(leaf, rows) for leaf in tree_leaves((args, kwargs))):
            self._pass = OwnPass(self.site, self._source, self.lot.records)

    def _on_model_return(self, output: Any) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            current.end(output is not None)  # None: the forward pass has raised
        if self.lot is not None and self._joint_losses:
            for place, leaf in enumerate(_outputs(output)):
                if place in self._joint_losses and leaf.requires_grad:
                    leaf.register_hook(self._refuse_joint_loss)

    def _refuse_joint_loss(self, gradient: Tensor) -> None:
        if self.lot is not None:
            raise PrivacyError(
                "the loss that the model returns is not the "
                + ("mean" if self._mean else "sum")
                + " of its examples' own losses, as loss_reduction says: it is another reduction, or one over the "
                "tokens of the whole lot, in which a long example weighs more than the clip norm allows. Take one "
                "loss per example, fodp.losses.causal_lm(outputs.logits, labels).mean() for a language model"
            )

    def _on_any_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Of a module that is not the model's but trains: is it reached by this lot's backward pass?"""
        if self.lot is None or self._checking or not torch.is_grad_enabled() or module in self._inside:
            return
        kind = type(module).__name__

        def reached(_: Tensor) -> None:
            self._outsiders[torch._C._current_graph_task_id()] = kind

        for parameter in module.parameters(recurse=False):
            known = id(parameter) in self._trainable or id(parameter) in self._followed
            if parameter.requires_grad and not known:
                self._followed[id(parameter)] = parameter.register_post_accumulate_grad_hook(reached)

    def _catch(self, lot: Lot | None, call: _Call, gradient: Tensor) -> None:
        """The gradient of a layer's output has arrived."""
        if self.lot is None:
            return  # nothing can be stepped: an adversarial test, a saliency map
        if lot is not self.lot:
            raise PrivacyError(f"this backward goes through the forward pass of another lot: {LOOP}")
        self._backwards.add(torch._C._current_graph_task_id())
        self._refuse_second_backward()
        self._caught.append((call, gradient))

    def _refuse_second_backward(self) -> None:
        if len(self._backwards) > 1:
            raise PrivacyError(
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
        self._checking, self._rebuild, self.look_again = True, rebuild, False
        try:
            with torch.autocast(self.layout.device.type, enabled=False), torch.random.fork_rng(devices=[]):
                self_check.refuse_unsteady(self, batch)
                if self.site.alone:
                    self._take_loop("what it draws cannot be told apart by example")
                if rows > 1:
                    self._look_at_pairs(batch)
                self._look_at_losses(batch)
                if self._padded is not None:
                    self._padded.refuse_difference(self, leaves, places, form)
        except Unseparable as reason:
            self._take_loop(str(reason))
        finally:
            self._checking = False
            del self._rebuild

    def _look_at_pairs(self, batch: Keyed) -> None:
        if not self._checked:
            problem = self_check.problem(self, batch)
            if problem is None:
                raise PrivacyError(
                    "the model cannot be checked on the first lot, for its outputs are not finite, have no gradient or "
                    "rest on ties: normalise the data, look at the initial weights"
                )
            if problem:
                self._take_loop(problem)
            self._checked = True
        problem = self_check.mixing(self, batch)
        if problem:
            self._take_loop(problem)
        self._looked += 1

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
        raise PrivacyError(
            "the model must keep the examples of a lot apart, in the first dimension of its layers and outputs, and "
            f"use weights through their own layers only: {reason}. Change that, or {TRAINER}"
        )

    def _compare_sums(self, lot: Lot) -> None:
        """What was recorded must add up to what backward computed, or part of the loss went past the layers."""
        layout, rows = self.layout, len(lot.indices)
        raw = layout.zeros()
        for parameter, view in zip(layout.parameters, layout.views(raw), strict=True):
            if id(parameter) in self._raw:
                view.copy_(self._raw[id(parameter)].to_dense()).mul_(rows if self._mean else 1)
        if not raw.isfinite().all():
            return  # an example that contributes nothing; the next lot will tell
        uses, ones = self.uses(lot.indices), layout.zeros().new_ones(rows)
        sizes = torch.stack([ones.sum() * 0 if u is None else u.squared_norms().sqrt().sum().to(ones) for u in uses])
        half = any(gradient.dtype not in (torch.float32, torch.float64) for _, gradient in self._caught)
        allowed = tolerance(half or self.half_precision)
        for i, (use, expected) in enumerate(zip(uses, layout.views(raw), strict=True)):
            found = torch.zeros_like(expected)
            if use is not None:
                use.add_weighted(found, ones, False)
            if (found - expected).norm() > allowed * (sizes[i] + 1e-3 * sizes.sum()):
                raise PrivacyError(
                    f"part of the loss reaches {layout.names[i]} past its layer (a penalty on weights, a weight used "
                    f"by hand) and would be lost: put penalties into the optimizer's weight_decay, or {TRAINER}"
                )
        self._compared = True
        self._raw = {}


def _finite(tensor: Tensor) -> Tensor:
    """Anything finite will do for a check of the model."""
    return torch.where(tensor.isfinite(), tensor, 0.5) if tensor.is_floating_point() else tensor


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
