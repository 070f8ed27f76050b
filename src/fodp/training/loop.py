"""For people who own their loop: model, optimizer and loop stay as they are, the step becomes private.

Hooks record what the owner's forward and backward pass compute anyway. When `optimizer.step()` is called,
the per-example gradients in there are clipped, summed and released by the plan's method, and only the
release reaches `.grad`, where the real optimizer finds it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fodp import _checks
from fodp._checks import BudgetError, ConfigurationError, DataError
from fodp._files import refuse_unwritable
from fodp._words import in_our_words
from fodp.clipping.buffers import KeptState
from fodp.clipping.engine import HERE, Points
from fodp.clipping.gradients import Gradients
from fodp.clipping.layout import GradientBuffer
from fodp.draws import Source
from fodp.ledger import Account, Ledger
from fodp.plan import Plan, warn_of_large_rates
from fodp.prefetching import workers_for
from fodp.ranks import refuse_other_group
from fodp.run import Run
from fodp.sampling import Collate, Fetcher, Lot
from fodp.training.averaged import AveragedWeights
from fodp.training.bad_records import explain_reading, refuse_unlike
from fodp.training.beside import KeptModule
from fodp.training.bookkeeping import open_account
from fodp.training.finite import refuse_non_finite
from fodp.training.fitting import fitting_optimizer, refuse_plateau
from fodp.training.loss_watch import LossWatch
from fodp.training.order import refuse_other_ledger, refuse_other_order
from fodp.training.padding import compare_alone
from fodp.training.parts import LotParts, blocks_of
from fodp.training.recorder import LOOP, TRAINER, Recorder
from fodp.training.rehearsal import refuse_hooks
from fodp.training.resuming import LoopKeeper
from fodp.training.witness import witness_of

# Modules and optimizers that are private already.
_taken: weakref.WeakSet[Any] = weakref.WeakSet()


@in_our_words("make_private")
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss_reduction: str = "mean",
    collate_fn: Collate | None = None,
    ledger: Ledger | None = None,
    allow_non_finite: bool = False,
    microbatch: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    scheduler: LRScheduler | None = None,
    resume: str | Path | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, "PrivateLoader"]:
    """Make the training loop that you wrote yourself private; returns model, optimizer and a loader.

    Model and optimizer are the objects you gave, so schedulers, parameter groups and frozen layers act as
    ever. The loader hands out exactly `plan.steps` Poisson lots. Do one forward pass of the whole batch
    through `model(...)`, one `loader.backward(losses)` and one `optimizer.step()` for each, also for empty lots: their
    mean loss is NaN, their step is noise only and finite (the backward may be left out). After a step `.grad` holds
    the release divided by L; between backward and step it holds nothing.

    Give `loader.backward` one loss per example: there is no reduction to get wrong. `loss.backward()` works too, if
    the loss is the declared reduction ("mean" over the lot's examples, or "sum") of losses that depend on one example
    each.

    Guarantee: the parameters after any step that was fixed beforehand are (ε, δ)-differentially private with
    ε = `loader.epsilon()`, after one that was chosen because of what was seen with ε = `plan.epsilon()`,
    provided that the model is fed the loader's batch and each example's loss depends on that example alone. That is
    looked at in the first lots and in about 1 of 256 steps; means with weights or ignored targets, another reduction
    than the declared one, rows that are mixed before the model, and what a lot leaves for the next are refused. Unseen
    is what only other lots would show, and what a loss takes from NumPy or from plain Python numbers (`.item()`).
    Batches, their sizes and losses stay private: publish none of them.

    `ledger` writes every step down before its lot is drawn, and refuses what its budget does not allow. A loop that
    ends early gives back what it reserved with `loader.close()`. `loader.save(path)` between two steps writes down all
    that another process needs to go on with `make_private(..., resume=path)`; see `PrivateLoader.save`.

    With `microbatch`, for lots larger than memory, the loader hands out lots in parts of at most that many records: one
    backward for each part (`for lot in loader: for batch in lot:`), then one `optimizer.step()`; see `LotParts`.
    `num_workers` processes read lots ahead, with `pin_memory` for an accelerator; the run is the same.
    `collate_fn(records)` makes a batch of a list of records, and is never given an empty list. A `scheduler` is saved
    and restored with the loop; you step it.
    Data of tensors that is not finite is refused; `allow_non_finite` takes it, and an example without a finite gradient
    counts as zero.

    For methods that want one gradient per step, and for layers with a rule (`fodp.register_rule` adds some): what else
    there is is refused with a message that names the Trainer, and so is misuse, before anything is released.
    On the first lot of two or more examples the model is compared with itself on one example at a time.

    Example:
        >>> import torch
        >>> from fodp import Plan
        >>> from fodp import make_private
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = Plan(sampling_rate=0.1, steps=5, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
        >>> model, optimizer, loader = make_private(model, optimizer, data, plan)
        >>> for inputs, labels in loader:
        ...     optimizer.zero_grad()
        ...     losses = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        ...     loader.backward(losses)
        ...     optimizer.step()
        >>> loader.epsilon() == plan.epsilon()
        True
    """
    refuse_other_order("make_private", model=model, optimizer=optimizer, dataset=dataset, plan=plan)
    refuse_other_ledger(ledger)
    _checks.one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    if plan.unit == "person":
        raise ConfigurationError(
            "a loop of your own releases sums over records, and the plan's unit is a person, whose records are summed "
            f"before they are clipped: {TRAINER}"
        )
    method = plan.algorithm
    if method.owns_optimizer or method.has_acceptance_test:
        raise ConfigurationError(
            f"{method.name} with these params brings its own update and cannot take yours: {TRAINER}"
        )
    if any(len(phase.events) != 1 for phase in plan.events()):
        raise ConfigurationError(f"{method.name} draws more than one lot in a step: {TRAINER}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"expected a torch.optim optimizer, got {type(optimizer).__name__}: {TRAINER}")
    warn_of_large_rates(optimizer)
    if any(part in _taken for part in (optimizer, *model.modules())):
        raise ConfigurationError("this model or optimizer is private already: make fresh ones, or close() their loader")
    refuse_plateau(scheduler, "keep it out of make_private and step it with a score on public data")
    recorder = Recorder(model, loss_reduction == "mean")
    run = _LoopRun(
        model,
        optimizer,
        dataset,
        plan,
        recorder,
        collate_fn,
        microbatch,
        workers_for(num_workers, pin_memory),
        pin_memory,
    )
    fitting_optimizer(run, optimizer)
    if not allow_non_finite:
        refuse_non_finite(dataset)
    if collate_fn is None:
        refuse_unlike(dataset)
    refuse_hooks(model)
    if run.ranks.count > 1 and (resume is not None or microbatch is not None):
        raise ConfigurationError(
            "a loop of your own is resumed, and takes lots in parts, in one process: use the Trainer, which knows ranks"
        )
    keeper = LoopKeeper(run, model, optimizer, scheduler, dataset, ledger if run.ranks.is_first else None)
    if resume is not None:
        keeper.resume(Path(resume))
    elif ledger is not None and run.ranks.is_first:
        run.account = open_account(ledger, keeper.run_id, plan, plan.steps, dataset)
    run.witness = witness_of(run, run.account)
    return model, optimizer, PrivateLoader(run, keeper)


class PrivateLoader:
    """The plan's Poisson lots as batches: one pass over it is the whole run, empty lots included.

    Each lot must be stepped before the next one is drawn. A loop that ends early may be taken up again (cut
    epochs with `itertools.islice`); after the last step there is nothing more to draw.
    """

    def __init__(self, run: "_LoopRun", keeper: LoopKeeper):
        self._run, self._keeper = run, keeper
        self._detach = run.attach()
        self._warned = False  # that there are no lots any more
        weakref.finalize(self, run.engine.abandon)

    def __len__(self) -> int:
        return self._run.plan.steps

    def __iter__(self) -> Iterator[Any]:
        if self._run.is_spent():
            if not self._warned:
                _checks.warn(
                    f"the plan's {len(self)} steps are done, and one pass over the loader is the whole run: this pass "
                    "has no lots. Leave the loop over epochs out; a longer run needs a plan of more steps"
                )
            self._warned = True
            return iter(())
        self._run.refuse_closed()
        return self._lots()

    def _lots(self) -> Iterator[Any]:
        try:
            while self._run.step < len(self):
                yield self._run.next_batch()
        finally:
            self._run.labels.stop()  # also of a loop that has broken off

    @property
    def step(self) -> int:
        """How many of the plan's steps have been taken."""
        return self._run.step

    @property
    def lost_steps(self) -> int:
        """How many steps were used after the file that the loop went on from: charged, and without effect."""
        return self._keeper.lost_steps

    def save(self, path: str | Path) -> None:
        """Write down, between two steps, what another process needs to go on: model, optimizer, position, ledger.

        `make_private` with the same arguments and `resume=path` goes on from there. Seeded: bit for bit, and nothing is
        charged twice. Secure: with fresh randomness, and with the ledger only, which knows the steps that were used
        after the file was written; they are lost, and the loop is that much shorter. The file holds no private
        quantity and, in secure mode, no key.
        """
        self._run.refuse_lot_in_hand()
        self._run.take_iterate()
        if self._run.ranks.is_first:
            refuse_unwritable(Path(path))
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._keeper.save(Path(path))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, between two steps, the model is the average of its iterates, if the plan has one and it has begun.

        Your model is the iterate, from which you train on: score and save it in here.
        """
        self._run.take_iterate()
        with self._run.weights.inside():
            yield

    def backward(self, losses: torch.Tensor) -> None:
        """The backward pass of a lot, or of a part of one: `losses` has one loss for each row of the batch.

        Use it instead of `loss.backward()`. The examples' gradients are those of their own losses, whatever
        `loss_reduction` says, so there is no reduction to get wrong. Of an empty lot the losses are empty, and nothing
        happens. Losses of another shape, or that do not depend on the model, are refused; so are losses that depend on
        other examples of the lot, where a lot is looked at.
        """
        self._run.engine.backward(losses)

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
    _has_loss = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        plan: Plan,
        recorder: Recorder,
        collate_fn: Collate | None,
        microbatch: int | None,
        workers: int,
        pin_memory: bool,
    ):
        super().__init__(model, recorder.loss_fn, dataset, plan, microbatch=microbatch)
        self.engine = recorder
        self._batches = Fetcher(dataset, collate_fn)
        self._collates = self._batches.batched_by is not None
        self._ahead = self._read_ahead(self._batches, workers, pin_memory)
        self._blocks = None if microbatch is None else blocks_of(self)
        # The method's questions are answered from the records: of a lot they need to know its length only.
        self._fetcher = Fetcher((torch.zeros(1, dtype=torch.int64).expand(self._batches.size),))
        self._model, self._optimizer, self._buffers = model, optimizer, KeptState(model, ())
        self._closed = self._stepping = False
        self._drawn: Lot | None = None  # the lot in the owner's hands
        self._parts: LotParts | None = None  # and its parts, if it has any
        self.account: Account | None = None
        self.weights = AveragedWeights(self)
        self.keep_beside: Callable[[], KeptModule] | None = None  # of a whole LightningModule, say
        self._beside: KeptModule | None = None  # as it was when the lot was handed out
        self._stepped = False  # since the average has taken an iterate in
        self.labels = LossWatch(dataset, self._batches, self._refused, lambda: recorder._checking)
        recorder.refused = self._refused
        self._end: Callable[[], None] = lambda: None  # what gives model and optimizer back

    def refuse_kept(self) -> None:
        """Raise if what holds the model has kept something of the lots since the last one was handed out."""
        if self._beside is not None:
            self._beside.refuse_changes(f"{type(self._beside.module).__name__}")

    def forget_kept(self) -> None:
        """What changes from here to the next lot is not of a lot."""
        self.refuse_kept()
        self._beside = None

    def keep_again(self) -> None:
        """What changes from here on may be of a lot again."""
        self._beside = None if self.keep_beside is None or self._closed else self.keep_beside()

    def take_iterate(self) -> None:
        """Take what the owner's last step made of the weights into the average; not with a lot in hand."""
        if self.average is None:
            return
        if self._drawn is not None:
            raise ConfigurationError(
                "look at the average between two steps: after optimizer.step(), before the next lot"
            )
        if self._stepped:
            self.average.take(self.parameters(), self.step, self.plan.steps)
        self._stepped = False

    def is_spent(self) -> bool:
        """Whether the plan's steps were all taken, in a loader that is still open."""
        return self.step >= self.plan.steps and not self._closed

    def refuse_spent(self) -> None:
        """Raise when there is nothing more to draw."""
        if self.is_spent():
            raise ConfigurationError(
                f"the plan's {self.plan.steps} steps are done: one pass over the loader is the whole run, and a "
                "longer one needs another plan"
            )
        self.refuse_closed()

    def refuse_closed(self) -> None:
        """Raise if the loader was closed."""
        if self._closed:
            raise ConfigurationError("this loader is closed: call make_private again, with a plan of its own")

    def next_batch(self) -> Any:
        """Draw the next step's lot, once the last one was stepped."""
        with self.engine.unheard():
            return self._next_batch()

    def _next_batch(self) -> Any:
        self.refuse_spent()
        refuse_other_group(self.ranks)
        self.refuse_other_process()
        refuse_hooks(self._model)
        if self._drawn is not None:
            raise ConfigurationError(
                f"the lot of step {self.step} was drawn but not stepped, and may not be dropped: call optimizer.step() "
                f"for it ({LOOP}; to end a loop early use itertools.islice)"
            )
        account = self.account  # of several ranks the first one has it
        if not self.ranks.number(lambda: float(account is None or account.covers(self.step))):
            raise BudgetError(
                f"the budget is spent after step {self.step} of {self.plan.steps}: other runs on the data took the rest"
            )
        if self.weights.iterate is not None:
            raise ConfigurationError("the model is the average of its iterates here: train on outside of averaged()")
        self.take_iterate()
        self.forget_kept()
        self._begin()
        self.keep_again()
        self._buffers = KeptState(self._model, (), self._parameters)
        lot = self._drawn = super().draw(self._promised()[0].sampling_rate)
        if self._microbatch is None:
            return self.hand_out_part(lot, lot, torch.arange(len(lot.indices)))
        self._parts = LotParts(self, lot, self._microbatch, self._blocks)
        return self._parts

    def hand_out_part(self, lot: Lot, part: Lot, places: torch.Tensor) -> Any:
        """The batch of a part of the lot, or of all of it; from here on the model is listened to."""
        try:
            source = Source(self.streams, self.step, lot.name)
            batch = self._read(self._batches, lot, source, places)
            self.engine.step, self.engine.look_again = self.step, self._looks_again()
            looks = self._collates and self._collate_looks.due(self.step, self._looks_again())
            looks = looks or (self._collates and len(part.indices) > 1 and self._widths.grow(batch))
            if looks and len(part.indices) > 1:  # one record alone tells nothing
                self._collate_looks.told(self.step)
            self.engine.start(part, source, compare_alone(self._batches, part, source, batch) if looks else None, batch)
        except BaseException as error:
            self.abandon_lot()
            found = explain_reading(self._batches, part.indices.tolist(), error)
            if found is not None:
                raise found from found.__cause__
            raise
        self.labels.start(batch, part.indices)
        return batch

    def _refused(self, found: DataError) -> DataError:
        """What to raise for data that does not fit: before the first release the loop is closed, and costs nothing."""
        if self.step:
            return found
        self._end()
        closed = DataError(f"{found}. Nothing was released or charged, and this loader is closed")
        closed.__cause__, closed.__suppress_context__ = found.__cause__, True
        return closed

    def abandon_lot(self) -> None:
        """The lot broke off: its step is over, and its mask is never used again."""
        self._forget_lot()
        self.step += 1

    def part_gradients(self, part: Lot, lot: Lot, blocks: Sequence[float] | None) -> Gradients:
        """The gradients of a part of the lot, from what its passes have recorded."""
        return self._asked((part.indices,), lot, blocks=blocks)

    def holds(self, parts: LotParts) -> bool:
        """Whether these are the parts of the lot in the owner's hands."""
        return self._parts is parts

    def refuse_lot_in_hand(self) -> None:
        """Raise if a lot was drawn and not stepped: what is saved then would draw it a second time."""
        if self._drawn is not None or self._closed:
            raise ConfigurationError(
                "save between two steps: after optimizer.step(), before the loader is asked for the next lot, and "
                "before close()"
            )

    def _forget_lot(self) -> None:
        self._drawn = self._parts = None
        self.labels.stop()
        self.engine.start(None)

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """The lot in the owner's hands."""
        lot = self._drawn
        if lot is None or self._lots:
            raise ConfigurationError(f"{self.plan.method} draws more than one lot in a step: {TRAINER}")
        if lot.rate != (self._sampler.rate if rate is None else rate):
            raise ConfigurationError(f"{self.plan.method} draws at another rate than it promised: {TRAINER}")
        self._lots.append(lot)
        self._spent.append(None)
        return lot

    def gradients(self, lot: Lot, at: Points = HERE, blocks: Sequence[float] | None = None) -> Gradients:
        """The lot's per-example gradients, where the owner's backward pass computed them."""
        if len(at) != 1 or at[0][0] != 1 or at[0][1] is not None:
            raise ConfigurationError(f"{self.plan.method} wants gradients at other points than the model's: {TRAINER}")
        if self._parts is not None:
            self._place(lot)  # of this step
            return self._parts.gradients(blocks)
        return super().gradients(lot, blocks=blocks)

    def attach(self) -> Callable[[], None]:
        """Listen to model and optimizer; returns what ends it."""

        def before_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stepping and self._drawn is None:
                return  # an optimizer whose step() calls that of its parent class
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                raise ConfigurationError(
                    f"optimizer.step() takes no closure here, whose gradients would not be private: {LOOP}"
                )
            with self.engine.unheard():
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
            stepped, self._closed = self._drawn is None, True
            self._forget_lot()
            self.engine.stop_listening()
            self.close_workers()
            for handle in handles:
                handle.remove()
            _taken.difference_update(parts)
            if not stepped:  # a lot that the model may have seen, and no step to look at what it has kept
                self._buffers.refuse_changes()

        self._end = detach
        return detach

    def _private_step(self) -> None:
        """Everything is checked before anything is released; then `.grad` is the release over L."""
        if self._drawn is None:
            raise ConfigurationError(
                "optimizer.step() without a lot: take batches from the loader that make_private returned, one step "
                "each; other loaders do not sample as the accountant assumes, so nothing would be private"
            )
        self.labels.stop()  # the owner's loss is over; what follows is no business of it
        self._refuse_changes()
        self._buffers.refuse_changes()
        self.refuse_kept()
        if self._parts is None:
            self.engine.refuse_incomplete()
        else:
            self._parts.finish()
        try:
            released = self.take_step()
        finally:
            self._forget_lot()  # also of a step that broke off, which is over
        self._stepped = True
        # A fresh buffer: neither the release nor gradients that somebody kept are overwritten.
        GradientBuffer(self.engine.layout).set(released, self.plan.lot_size)
        self.method.tune(self._optimizer, self, self.state)
        if self.step == self.plan.steps:
            self.engine.stop_listening()
            self.close_workers()
            if self.account is not None:
                self.account.settle(self.step)

    def _refuse_changes(self) -> None:
        """Model and optimizer must still hold what they held when they were made private."""
        trainable = [id(p) for p in self._model.parameters() if p.requires_grad]
        if trainable != [id(p) for p in self.engine.layout.parameters]:
            raise ConfigurationError(
                "the trainable parameters changed after make_private: add, freeze and unfreeze layers before it"
            )
        fitting_optimizer(self, self._optimizer)
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # frozen is frozen, whatever was left there
