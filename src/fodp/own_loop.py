"""For people who own their loop: model, optimizer and loop stay as they are, the step becomes private.

Hooks record what the owner's forward and backward pass compute anyway. When `optimizer.step()` is called,
the per-example gradients in there are clipped, summed and released by the plan's method, and only the
release reaches `.grad`, where the real optimizer finds it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fodp.errors import BudgetError, ConfigurationError, DataError
from fodp.gradients import HERE
from fodp.inputs.bad_records import refuse_unlike
from fodp.inputs.finite import refuse_non_finite
from fodp.inputs.order import refuse_other_order
from fodp.layout import GradientBuffer
from fodp.ledger import Ledger
from fodp.lots.reading import LotReading
from fodp.plan import Plan, warn_of_large_rates
from fodp.ranks import refuse_other_group
from fodp.session import Session
from fodp.sources.beside import Around
from fodp.sources.examiner import TRAINER, Examiner
from fodp.sources.hooks import Listeners
from fodp.sources.opening import Opening
from fodp.sources.own_lot import LOOP
from fodp.sources.push import HeldLots, Push, pushed
from fodp.sources.recorder import Recorder
from fodp.sources.trial import refuse_other_sums
from fodp.state import checkpoint
from fodp.state.averaged import AveragedWeights
from fodp.state.course import Course
from fodp.state.fitting import fitting_optimizer, refuse_plateau
from fodp.state.ledgers import refuse_other_ledger
from fodp.support import checks
from fodp.support.files import refuse_unwritable
from fodp.support.words import in_our_words

# Modules and optimizers that are private already.
_taken: weakref.WeakSet[Any] = weakref.WeakSet()


@in_our_words("make_private", also=LotReading)
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss_reduction: str = "mean",
    ledger: Ledger | None = None,
    scheduler: LRScheduler | None = None,
    resume: str | Path | None = None,
    **reading: Any,
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

    How records are read is told by further keywords, which are the fields of `fodp.lots.reading.LotReading`:
    `collate_fn`, `num_workers`, `pin_memory`, `microbatch` and `allow_non_finite`.
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
    checks.one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    refuse_other_ledger(ledger)
    records = LotReading(**reading)
    _refuse_unfit(model, optimizer, scheduler)
    given = {
        "own loop": True,
        "an optimizer of yours": True,
        "no public score": True,
        "a resumed loop": resume is not None,
        "a lot in parts": records.microbatch is not None,
    }
    opening = Opening(model, dataset, plan, given)
    recorder = Recorder(Examiner(model, loss_reduction == "mean", lambda found: loop.refused(found)))
    push, held = pushed(opening, recorder, records, lambda found: loop.refused(found), lambda: loop.abandon_lot())
    session = opening.session(push, held)
    fitting_optimizer(session, optimizer)
    if records.microbatch is not None:
        refuse_other_sums(session)
    if not records.allow_non_finite:
        refuse_non_finite(dataset)
    if records.collate_fn is None:
        refuse_unlike(dataset)
    Listeners(model).refuse()
    loop = OwnLoop(session, push, held, Course(session, dataset, ledger, last_step=plan.steps), optimizer, scheduler)
    if resume is not None:
        loop.resume(Path(resume))
    else:
        loop.course.begin()
    return model, optimizer, PrivateLoader(loop)


def _refuse_unfit(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Raise for a model, an optimizer or a scheduler that cannot be made private; warn of odd rates."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"expected a torch.optim optimizer, got {type(optimizer).__name__}: {TRAINER}")
    if any(part in _taken for part in (optimizer, *model.modules())):
        raise ConfigurationError("this model or optimizer is private already: make fresh ones, or close() their loader")
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise ConfigurationError(
            f"scheduler must be one of torch.optim.lr_scheduler, built on your optimizer, got {checks.shown(scheduler)}"
        )
    warn_of_large_rates(optimizer)
    refuse_plateau(scheduler, "keep it out of make_private and step it with a score on public data")


class PrivateLoader:
    """The plan's Poisson lots as batches: one pass over it is the whole run, empty lots included.

    Each lot must be stepped before the next one is drawn. A loop that ends early may be taken up again (cut
    epochs with `itertools.islice`); after the last step there is nothing more to draw.
    """

    def __init__(self, loop: "OwnLoop"):
        self._loop = loop
        self._detach = loop.attach()
        self._warned = False  # that there are no lots any more
        weakref.finalize(self, loop.push.abandon)

    def __len__(self) -> int:
        return self._loop.plan.steps

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._is_over() else self._lots(len(self))

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has: 1/q, rounded, a public number."""
        return max(1, round(1 / self._loop.plan.sampling_rate))

    def epochs(self) -> Iterator[Iterator[Any]]:
        """The same lots, an epoch at a time: `for epoch in loader.epochs(): for batch in epoch: ...`.

        An epoch has `steps_per_epoch` lots, the last one what is left of the plan. An example may be in several of its
        lots, or in none. The epoch of a loop that is resumed, or of one that was left by `break`, goes on where it was.

        Raises:
            ConfigurationError: an epoch was left before its first step, and the next one would be the same.
        """
        return iter(()) if self._is_over() else self._epochs()

    def _epochs(self) -> Iterator[Iterator[Any]]:
        begun = -1
        while begun != self.step < len(self):
            begun = self.step
            yield self._lots(min(len(self), (begun // self.steps_per_epoch + 1) * self.steps_per_epoch))
        if self.step < len(self):
            raise ConfigurationError(
                "an epoch was left before its first step: go through its lots (for batch in epoch)"
            )

    def _is_over(self) -> bool:
        """Whether there are no lots any more, which is told once."""
        if not self._loop.is_spent:
            self._loop.refuse_closed()
            return False
        if not self._warned:
            checks.warn(
                f"the plan's {len(self)} steps are done, and one pass over the loader is the whole run: this pass "
                "has no lots. Go by loader.epochs(), or leave the loop over epochs out; a longer run needs a plan of "
                "more steps"
            )
        self._warned = True
        return True

    def _lots(self, end: int) -> Iterator[Any]:
        try:
            while self.step < end:
                yield self._loop.next_batch()
        finally:
            self._loop.push.stop_listening()  # also of a loop that has broken off

    def next_batch(self) -> Any:
        """The next lot, drawn now: for loops that do not iterate."""
        return self._loop.next_batch()

    @property
    def step(self) -> int:
        """How many of the plan's steps have been taken."""
        return self._loop.session.number

    @property
    def lost_steps(self) -> int:
        """How many steps were used after the file that the loop went on from: charged, and without effect."""
        return self._loop.course.lost_steps

    @property
    def session(self) -> Session:
        """What carries the plan out: for audits and extensions."""
        return self._loop.session

    def save(self, path: str | Path) -> None:
        """Write down, between two steps, what another process needs to go on: model, optimizer, position, ledger.

        `make_private` with the same arguments and `resume=path` goes on from there. Seeded: bit for bit, and nothing is
        charged twice. Secure: with fresh randomness, and with the ledger only, which knows the steps that were used
        after the file was written; they are lost, and the loop is that much shorter. The file holds no private
        quantity and, in secure mode, no key.
        """
        self._loop.save(Path(path))

    def state_dict(self) -> dict[str, Any]:
        """What the loop needs to go on, where another package saves model and optimizer; to be taken between steps.

        Releases and public numbers only, with a digest of the weights of the same moment; a ledger notes it.
        """
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any], ledger: Ledger | None = None) -> None:
        """Put a fresh loop where `state_dict` was taken; its model has the weights of that moment already.

        Seeded: the same releases follow, bit for bit. Secure: steps that were used after the checkpoint are lost but
        stay charged, so the run ends that much earlier; this takes the run's ledger.
        """
        self._loop.load_state_dict(state, ledger)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, between two steps, the model is the average of its iterates, if the plan has one and it has begun.

        Your model is the iterate, from which you train on: score and save it in here.
        """
        self._loop.take_iterate()
        with self._loop.weights.inside():
            yield

    def backward(self, losses: torch.Tensor) -> None:
        """The backward pass of a lot, or of a part of one: `losses` has one loss for each row of the batch.

        Use it instead of `loss.backward()`. The examples' gradients are those of their own losses, whatever
        `loss_reduction` says, so there is no reduction to get wrong. Of an empty lot the losses are empty, and nothing
        happens. Losses of another shape, or that do not depend on the model, are refused; so are losses that depend on
        other examples of the lot, where a lot is looked at.
        """
        self._loop.push.recorder.backward(losses)

    def epsilon(self, *, delta: float | None = None) -> float:
        """ε at δ of the steps taken so far. Reading changes nothing.

        It is the run's ε if the loop was to end there before it began; if it ends because of what was seen, that is
        `plan.epsilon()`.
        """
        return self._loop.plan.epsilon(delta=delta, steps=self.step)

    def stated_epsilon(self) -> float:
        """The ε to publish if the run ends here, whatever made it end."""
        return self._loop.course.stated_epsilon()

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about this run's privacy if it ends here."""
        return self._loop.course.privacy_card()

    @property
    def around(self) -> Around:
        """What holds the model, for packages that have it watched from lot to lot."""
        return self._loop.around

    def close(self) -> None:
        """End the run and give model and optimizer back without hooks. What they learn then is not private."""
        self._detach()


class OwnLoop:
    """A session that is pushed: it draws when the loader is asked, and steps when the owner's optimizer does."""

    def __init__(
        self,
        session: Session,
        push: Push,
        lots: HeldLots,
        course: Course,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
    ):
        self.session, self.push, self.course, self._lots = session, push, course, lots
        self._optimizer, self._scheduler = optimizer, scheduler
        self.weights = AveragedWeights(session)
        self._listeners = Listeners(self._model)
        self.around = Around()
        self._closed = self._stepping = self._stepped = False  # stepped: since the average has taken an iterate in
        self._end: Callable[[], None] = lambda: None  # what gives model and optimizer back

    @property
    def plan(self) -> Plan:
        """The plan that is carried out."""
        return self.session.plan

    @property
    def _model(self) -> nn.Module:
        return self.push.engine.model

    @property
    def is_spent(self) -> bool:
        """Whether the plan's steps were all taken, in a loader that is still open."""
        return self.session.number >= self.plan.steps and not self._closed

    def refuse_closed(self) -> None:
        """Raise if the loader was closed."""
        if self._closed:
            raise ConfigurationError("this loader is closed: call make_private again, with a plan of its own")

    def next_batch(self) -> Any:
        """Draw the next step's lot, once the last one was stepped."""
        with self.push.recorder.unheard():
            self._refuse_another_lot()
            self.take_iterate()
            self.around.pause()
            self.around.go_on()
            session, number = self.session, self.session.number
            self.push.keep()
            lot = self._lots.take(number, self.plan.events_at(number)[0].sampling_rate)
            return self.push.hand_out(
                lot,
                session.rule,
                session.clip_norm,
                self.plan.exact_noise,
                lambda part: session.gradients(number, part, HERE),
            )

    def _refuse_another_lot(self) -> None:
        if self.is_spent:
            raise ConfigurationError(
                f"the plan's {self.plan.steps} steps are done: one pass over the loader is the whole run, and a "
                "longer one needs another plan"
            )
        if self._closed:
            self.refuse_closed()
        refuse_other_group(self.session.processes)
        self.session.refuse_other_process()
        self._listeners.refuse()
        step = self.session.number
        if self._lots.held is not None:
            raise ConfigurationError(
                f"the lot of step {step} was drawn but not stepped, and may not be dropped: call optimizer.step() "
                f"for it ({LOOP}; to end a loop early use itertools.islice)"
            )
        processes = self.session.processes  # of several the first one has the account
        if processes.count > 1:
            covered = bool(processes.number(lambda: float(self.course.covers())))
        else:
            covered = self.course.account is None or self.course.covers()
        if not covered:
            raise BudgetError(
                f"the budget is spent after step {step} of {self.plan.steps}: other runs on the data took the rest"
            )
        if self.weights.iterate is not None:
            raise ConfigurationError("the model is the average of its iterates here: train on outside of averaged()")

    def take_iterate(self) -> None:
        """Take what the owner's last step made of the weights into the average; not with a lot in hand."""
        if self.session.average is None:
            return
        if self._lots.held is not None:
            raise ConfigurationError(
                "look at the average between two steps: after optimizer.step(), before the next lot"
            )
        if self._stepped:
            self.session.average.take(self.session.parameters(), self.course.step, self.plan.steps)
        self._stepped = False

    def refused(self, found: DataError) -> DataError:
        """What to raise for data that does not fit: before the first release the loop is closed, and costs nothing."""
        if self.course.step:
            return found
        self._end()
        closed = DataError(f"{found}. Nothing was released or charged, and this loader is closed")
        closed.__cause__, closed.__suppress_context__ = found.__cause__, True
        return closed

    def abandon_lot(self) -> None:
        """The lot broke off: its step is over, and its mask is never used again."""
        self._let_go()
        self.session.go_to(self.session.number + 1)

    def _let_go(self) -> None:
        self._lots.let_go()
        self.push.let_go()

    def attach(self) -> Callable[[], None]:
        """Listen to model and optimizer; returns what ends it."""

        def before_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stepping and self._lots.held is None:
                return  # an optimizer whose step() calls that of its parent class
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                raise ConfigurationError(
                    f"optimizer.step() takes no closure here, whose gradients would not be private: {LOOP}"
                )
            with self.push.recorder.unheard():
                self._private_step()
            self._stepping = True

        def after_step(*_: Any) -> None:
            self._stepping = False

        handles = [*self.push.recorder.listen(), self._optimizer.register_step_pre_hook(before_step)]
        handles.append(self._optimizer.register_step_post_hook(after_step))
        parts = (self._optimizer, *self._model.modules())
        _taken.update(parts)

        def detach() -> None:
            if not self._closed:
                self.course.settle()
            stepped, kept, self._closed = self._lots.held is None, self.push.unchanged(), True
            self._let_go()
            self.push.close()
            self.around.close()
            for handle in handles:
                handle.remove()
            _taken.difference_update(parts)
            if not stepped:  # a lot that the model may have seen, and no step to look at what it has kept
                kept.refuse_changes()

        self._end = detach
        return detach

    def _private_step(self) -> None:
        """Everything is checked before anything is released; then `.grad` is the release over L."""
        if self._lots.held is None:
            raise ConfigurationError(
                "optimizer.step() without a lot: take batches from the loader that make_private returned, one step "
                "each; other loaders do not sample as the accountant assumes, so nothing would be private"
            )
        self._refuse_changes()
        self.push.unchanged().refuse_changes()
        self.around.refuse_changes()
        self.push.finish()
        try:
            released = self.session.take_step()
        finally:
            self._let_go()  # also of a step that broke off, which is over
        self._stepped = True
        # A fresh buffer: neither the release nor gradients that somebody kept are overwritten.
        GradientBuffer(self.push.layout).set(released, self.plan.lot_size)
        self.session.method.tune(self._optimizer, self.session, self.session.states["method"])
        if self.session.number == self.plan.steps:
            self.push.close()
            self.course.settle()

    def _refuse_changes(self) -> None:
        """Model and optimizer must still hold what they held when they were made private."""
        trainable = [id(p) for p in self._model.parameters() if p.requires_grad]
        if trainable != [id(p) for p in self.push.layout.parameters]:
            raise ConfigurationError(
                "the trainable parameters changed after make_private: add, freeze and unfreeze layers before it"
            )
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}
        if held != set(trainable):
            fitting_optimizer(self.session, self._optimizer)  # says what is wrong with it
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # frozen is frozen, whatever was left there

    def save(self, path: Path) -> None:
        """Write a checkpoint, atomically, and note it in the ledger."""
        if self._lots.held is not None or self._closed:  # what is saved then would draw the lot a second time
            raise ConfigurationError(
                "save between two steps: after optimizer.step(), before the loader is asked for the next lot, and "
                "before close()"
            )
        self.take_iterate()
        if self.session.processes.is_first:
            refuse_unwritable(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.weights.inside():
                content = checkpoint.snapshot(
                    self.course, self._model, self._optimizer, self._scheduler, self.weights.iterate
                )
                checkpoint.save(path, content, self.course.noted())

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same plan."""
        saved = checkpoint.load(path, self.push.layout.device)
        checkpoint.restore(saved, self.course, self._model, self._optimizer, self._scheduler)
        self.weights.forget()
        self.course.watch()

    def state_dict(self) -> dict[str, Any]:
        """What the loop needs to go on, beside model and optimizer."""
        state = checkpoint.loop_state(self.course)
        noted = self.course.noted()
        if noted is not None:
            noted(state["digest"])
        return state

    def load_state_dict(self, state: dict[str, Any], ledger: Ledger | None) -> None:
        """Go on from such a state."""
        self.course.keep_in(ledger)
        checkpoint.take_up_loop(self.course, state)
        self.course.watch()
