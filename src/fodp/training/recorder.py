"""Per-example gradients of a loop that somebody else runs: hooks record what its passes compute anyway."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fodp._checks import PrivacyError
from fodp.clipping.batches import Batch, batch_size
from fodp.clipping.combine import merged
from fodp.clipping.engine import HERE, Engine, Points, _Call, _versions
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.rules import RULES
from fodp.clipping.self_check import tolerance
from fodp.clipping.uses import Use
from fodp.sampling import Lot

TRAINER = "use fodp.Trainer, which computes the gradients itself"
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
        self._rebuild: Callable[[list[Tensor]], Any]  # the model's arguments from those that hold examples
        self.start(None)

    def start(self, lot: Lot | None) -> None:
        """Forget what was recorded and listen for this lot; None: listen for nothing."""
        self.lot = lot
        self._model_called = False
        self._caught: list[tuple[_Call, Tensor]] = []
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
        if rows and not self._caught:
            raise PrivacyError(f"optimizer.step() without a backward through the model: {LOOP}")
        for call, gradient in self._caught:
            if gradient.shape[:1] != (rows,):
                raise PrivacyError(
                    f"{type(call.module).__name__} saw another number of rows than the lot has examples (output "
                    f"of shape {tuple(gradient.shape)}): feed the loader's batch to the model, all of it and "
                    f"nothing else, examples first; or {TRAINER}"
                )
        if (rows and not self._model_called) or (rows > 1 and not self._checked):
            raise PrivacyError(
                "the model itself was not called on this lot: call model(batch, ...), not only its parts, with "
                f"the examples in the first dimension of its inputs; or {TRAINER}"
            )
        if rows > 1 and not self._compared:
            self._compare(self.lot)

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

        handles.append(self.model.register_forward_pre_hook(called, with_kwargs=True))
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
        if self.lot is None or not torch.is_grad_enabled():
            return
        self._model_called = True
        if len(self.lot.indices) > 1 and not self._checked:
            self._check(args, kwargs, len(self.lot.indices))

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

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
        """The engine's self-check on the model's real inputs, with a made-up loss of its outputs."""
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)]
        if not places:
            return  # not this lot but an evaluation that forgot no_grad; or the step will be refused

        def rebuild(parts: list[Tensor]) -> Any:
            given = dict(zip(places, parts, strict=True))
            return tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)

        self._checking, self._rebuild = True, rebuild
        try:
            with torch.autocast(self.layout.device.type, enabled=False):
                self._check_once([_finite(leaves[i].detach()) for i in places])
        finally:
            self._checking = False
            del self._rebuild
        if not self._checked:
            raise PrivacyError(
                "the model cannot be checked on the first lot, for its outputs are not finite, have no gradient or "
                "rest on ties: normalise the data, look at the initial weights"
            )

    def _probe(self, model: nn.Module, batch: Batch) -> Tensor:
        """One made-up loss per example: the outputs times fixed random numbers."""
        rows = len(batch[0])
        args, kwargs = self._rebuild(batch)
        parts = []
        for output in tree_leaves(model(*args, **kwargs)):
            if not isinstance(output, Tensor) or not output.requires_grad or output.dim() == 0:
                continue  # a scalar, such as a loss, says nothing about one example
            if output.shape[0] != rows:
                self._take_loop(f"it returns shape {tuple(output.shape)} for {rows} examples")
            flat = output.reshape(rows, -1)
            parts.append(flat @ torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(0)).to(flat))
        if not parts:
            self._take_loop("it returns no tensor with a row for each example")
        return torch.stack(parts).sum(0)

    def _take_loop(self, reason: str) -> None:
        self._checked = False  # there is no loop to take here
        raise PrivacyError(
            "the model must keep the examples of a lot apart, in the first dimension of its layers and outputs, and "
            f"use weights through their own layers only: {reason}. Change that, or {TRAINER}"
        )

    def _compare(self, lot: Lot) -> None:
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
