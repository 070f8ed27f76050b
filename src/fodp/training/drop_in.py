"""For people who own their loop: model, optimizer and loop stay as they are, the step becomes private.

Hooks record what the owner's forward and backward pass compute anyway. When `optimizer.step()` is called,
the per-example gradients in there are clipped, summed and released by the plan's method, and only the
release reaches `.grad`, where the real optimizer finds it.
"""

import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.buffers import KeptState
from fodp.clipping.engine import HERE, Points
from fodp.clipping.gradients import Gradients
from fodp.draws import Source
from fodp.flat import GradientBuffer
from fodp.ledger import Account, Ledger
from fodp.plan import Plan
from fodp.run import Run
from fodp.sampling import Collate, Fetcher, Lot
from fodp.training.bookkeeping import open_account
from fodp.training.fitting import fitting_optimizer
from fodp.training.padding import compare_alone
from fodp.training.recorder import LOOP, TRAINER, Recorder

_COLLATED_ALONE = 4  # first lots whose records are collated alone too
# Modules and optimizers that are private already.
_taken: weakref.WeakSet[Any] = weakref.WeakSet()


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss_reduction: str = "mean",
    collate_fn: Collate | None = None,
    ledger: Ledger | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, "PrivateLoader"]:
    """Make the training loop that you wrote yourself private; returns model, optimizer and a loader.

    Model and optimizer are the objects you gave, so schedulers, parameter groups and frozen layers act as
    ever. The loader hands out exactly `plan.steps` Poisson lots. Do one forward pass of the whole batch
    through `model(...)`, one backward and one `optimizer.step()` for each, also for empty lots: their mean
    loss is NaN, their step is noise only and finite (the backward may be left out). After a step `.grad` holds
    the release divided by L; between backward and step it holds nothing.

    Guarantee: the parameters after any step that was fixed beforehand are (ε, δ)-differentially private with
    ε = `loader.epsilon()`, after one that was chosen because of what was seen with ε = `plan.epsilon()`,
    provided that the model is fed the loader's batch and the loss is the declared reduction ("mean" over the
    lot's examples, or "sum") of losses that depend on one example each. Nobody can see that from here: a loss
    that couples examples (contrastive losses, class weights with a mean, a mean over tokens of unequal
    counts), a wrongly declared reduction or a rescaled loss (GradScaler) cannot be detected and void the
    guarantee. `fodp.Trainer` takes one loss per example and checks it. Batches, their sizes and losses
    stay private: publish none of them.

    `ledger` writes every step down before its lot is drawn, and refuses what its budget does not allow. The loop
    cannot be resumed in another process; a loop that ends early gives back what it reserved with `loader.close()`.

    For methods that want one gradient per step, and for layers with a rule (`fodp.clipping.rules`): what else
    there is is refused with a message that names the Trainer, and so is misuse, before anything is released.
    On the first lot of two or more examples the model is compared with itself on one example at a time.

    Example:
        >>> import torch
        >>> from fodp import Plan
        >>> from fodp.training.drop_in import make_private
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = Plan(sampling_rate=0.1, steps=5, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
        >>> model, optimizer, loader = make_private(model, optimizer, data, plan)
        >>> for inputs, labels in loader:
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        ...     loss.backward()
        ...     optimizer.step()
        >>> loader.epsilon() == plan.epsilon()
        True
    """
    _checks.one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    method = plan.algorithm
    if method.own_optimizer or method.proposes:
        raise PrivacyError(f"{method.name} with these params brings its own update and cannot take yours: {TRAINER}")
    if any(len(phase.events) != 1 for phase in plan.events()):
        raise PrivacyError(f"{method.name} draws more than one lot in a step: {TRAINER}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(f"expected a torch.optim optimizer, got {type(optimizer).__name__}: {TRAINER}")
    if any(part in _taken for part in (optimizer, *model.modules())):
        raise PrivacyError("this model or optimizer is private already: make fresh ones, or close() their loader")
    run = _LoopRun(model, optimizer, dataset, plan, Recorder(model, loss_reduction == "mean"), collate_fn)
    fitting_optimizer(run, optimizer)
    if ledger is not None:
        run.account = open_account(ledger, uuid.uuid4().hex, plan, plan.steps, dataset)
    return model, optimizer, PrivateLoader(run)


class PrivateLoader:
    """The plan's Poisson lots as batches: one pass over it is the whole run, empty lots included.

    Each lot must be stepped before the next one is drawn. A loop that ends early may be taken up again (cut
    epochs with `itertools.islice`); after the last step there is nothing more to draw.
    """

    def __init__(self, run: "_LoopRun"):
        self._run = run
        self._detach = run.attach()

    def __len__(self) -> int:
        return self._run.plan.steps

    def __iter__(self) -> Iterator[Any]:
        self._run.refuse_spent()
        return self._lots()

    def _lots(self) -> Iterator[Any]:
        while self._run.step < len(self):
            yield self._run.next_batch()

    @property
    def step(self) -> int:
        """How many of the plan's steps have been taken."""
        return self._run.step

    def epsilon(self, *, delta: float | None = None) -> float:
        """ε at δ of the steps taken so far. Reading changes nothing.

        It is the run's ε if the loop was to end there before it began; if it ends because of what was seen, that is
        `plan.epsilon()`.
        """
        return self._run.plan.epsilon(delta=delta, steps=self._run.step)

    def close(self) -> None:
        """End the run and give model and optimizer back without hooks. What they learn then is not private."""
        self._detach()


class _LoopRun(Run):
    """A run that draws when the loader is asked and steps when the owner's optimizer does."""

    engine: Recorder

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        plan: Plan,
        recorder: Recorder,
        collate_fn: Collate | None,
    ):
        super().__init__(model, recorder.loss_fn, dataset, plan)
        self.engine = recorder
        self._batches, self._own_collate = Fetcher(dataset, collate_fn), collate_fn is not None
        # The method's questions are answered from the records: of a lot they need to know its length only.
        self._fetcher = Fetcher((torch.arange(self._batches.size),))
        self._model, self._optimizer, self._buffers = model, optimizer, KeptState(model, ())
        self._closed = self._stepping = False
        self.account: Account | None = None

    def refuse_spent(self) -> None:
        """Raise when there is nothing more to draw."""
        if self.step >= self.plan.steps:
            raise PrivacyError(
                f"the plan's {self.plan.steps} steps are done: one pass over the loader is the whole run, and a "
                "longer one needs another plan"
            )
        if self._closed:
            raise PrivacyError("this loader is closed: call make_private again, with a plan of its own")

    def next_batch(self) -> Any:
        """Draw the next step's lot, once the last one was stepped."""
        self.refuse_spent()
        if self.engine.lot is not None:
            raise PrivacyError(
                f"the lot of step {self.step} was drawn but not stepped, and may not be dropped: call optimizer.step() "
                f"for it ({LOOP}; to end a loop early use itertools.islice)"
            )
        if self.account is not None and not self.account.covers(self.step):
            raise PrivacyError(
                f"the budget is spent after step {self.step} of {self.plan.steps}: other runs on the data took the rest"
            )
        self._begin()
        self._buffers = KeptState(self._model, (), self._parameters)
        lot = super().draw(self._promised()[0].sampling_rate)
        source = Source(self.streams, self.step, lot.name)
        batch = self._batches.fetch(lot.indices, source, lot.records)
        self.engine.look_again = self._looks_again()
        looks = self._own_collate and (self.step < _COLLATED_ALONE or self.engine.look_again)
        self.engine.start(lot, source, compare_alone(self._batches, lot, source, batch) if looks else None)
        return batch

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """The lot in the owner's hands."""
        lot = self.engine.lot
        if lot is None or self._lots:
            raise PrivacyError(f"{self.plan.method} draws more than one lot in a step: {TRAINER}")
        if lot.rate != (self.plan.sampling_rate if rate is None else rate):
            raise PrivacyError(f"{self.plan.method} draws at another rate than it promised: {TRAINER}")
        self._lots.append(lot)
        self._spent.append(None)
        return lot

    def gradients(
        self, lot: Lot, at: Points = HERE, ascent: float = 0.0, blocks: Sequence[float] | None = None
    ) -> Gradients:
        """The lot's per-example gradients, where the owner's backward pass computed them."""
        if len(at) != 1 or at[0][0] != 1 or at[0][1] is not None or ascent:
            raise PrivacyError(f"{self.plan.method} wants gradients at other points than the model's: {TRAINER}")
        return super().gradients(lot, blocks=blocks)

    def attach(self) -> Callable[[], None]:
        """Listen to model and optimizer; returns what ends it."""

        def before_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stepping and self.engine.lot is None:
                return  # an optimizer whose step() calls that of its parent class
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                raise PrivacyError(
                    f"optimizer.step() takes no closure here, whose gradients would not be private: {LOOP}"
                )
            self._private_step()
            self._stepping = True

        def after_step(*_: Any) -> None:
            self._stepping = False

        handles = [*self.engine.listen(), self._optimizer.register_step_pre_hook(before_step)]
        handles.append(self._optimizer.register_step_post_hook(after_step))
        parts = (self._optimizer, *self._model.modules())
        _taken.update(parts)

        def detach() -> None:
            if self.account is not None and not self._closed:
                self.account.settle(self.step)
            stepped, self._closed = self.engine.lot is None, True
            self.engine.start(None)
            for handle in handles:
                handle.remove()
            _taken.difference_update(parts)
            if not stepped:  # a lot that the model may have seen, and no step to look at what it has kept
                self._buffers.refuse_changes()

        return detach

    def _private_step(self) -> None:
        """Everything is checked before anything is released; then `.grad` is the release over L."""
        if self.engine.lot is None:
            raise PrivacyError(
                "optimizer.step() without a lot: take batches from the loader that make_private returned, one step "
                "each; other loaders do not sample as the accountant assumes, so nothing would be private"
            )
        self._refuse_changes()
        self._buffers.refuse_changes()
        self.engine.refuse_incomplete()
        released = self.take_step()
        self.engine.start(None)
        # A fresh buffer: neither the release nor gradients that somebody kept are overwritten.
        GradientBuffer(self.engine.layout).set(released, self.plan.lot_size)
        self.method.tune(self._optimizer, self, self.state)
        if self.account is not None and self.step == self.plan.steps:
            self.account.settle(self.step)

    def _refuse_changes(self) -> None:
        """Model and optimizer must still hold what they held when they were made private."""
        trainable = [id(p) for p in self._model.parameters() if p.requires_grad]
        if trainable != [id(p) for p in self.engine.layout.parameters]:
            raise PrivacyError(
                "the trainable parameters changed after make_private: add, freeze and unfreeze layers before it"
            )
        fitting_optimizer(self, self._optimizer)
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # frozen is frozen, whatever was left there
