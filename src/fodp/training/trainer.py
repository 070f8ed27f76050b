"""The training loop: a plan, a model, data, and callbacks for everything optional."""

import copy
import math
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fodp import accounting
from fodp._checks import PrivacyError
from fodp.augmentation import Augment
from fodp.clipping.engine import LossFunction
from fodp.flat import GradientBuffer
from fodp.ledger import Account, Ledger
from fodp.plan import Plan
from fodp.run import Run
from fodp.training import checkpoint
from fodp.training.bookkeeping import open_account
from fodp.training.callbacks import Callback
from fodp.training.fitting import fitting_optimizer, stated_epsilon, steps_within

# ε is computed at this many points of a run at most; between them the next, larger value is shown.
_CURVE_POINTS = 50


@dataclass(frozen=True)
class Result:
    """How a fit ended. `epsilon` is the one to publish: that of the whole plan for a run that was stopped early."""

    reason: str  # "finished", "interrupted", "target reached" or "budget spent"
    steps: int
    epsilon: float
    delta: float
    lost_steps: int


class Trainer:
    """Trains a model under a plan; the model that comes out carries the plan's guarantee.

    loss_fn(model, batch) returns one loss per example. `optimizer` None takes the method's own; any
    `torch.optim` optimizer over exactly the trainable parameters does for methods that do not insist
    on theirs. `scheduler`, or a function that makes it from the optimizer, steps once per step. Nothing of
    the private data (training loss, lot sizes, norms) is shown or stored anywhere.

    `augment(batch)` with `copies` K trains on K augmented copies per example whose gradients are averaged
    before clipping; it must treat every row by itself. `target_epsilon` stops before the step that would
    exceed it. `ledger` writes spending down before it happens, and refuses what its budget does not allow; a run
    keeps to one ledger, also when it is resumed. `public_score()` is the loss on data declared
    public, for methods that ask for it (sa-dpsgd).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dataset: Any,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        callbacks: Iterable[Callback] = (),
        augment: Augment | None = None,
        copies: int = 1,
        target_epsilon: float | None = None,
        microbatch: int | None = None,
        engine: str = "auto",
        ledger: Ledger | None = None,
        public_score: Callable[[], float] | None = None,
    ):
        self.model, self.plan, self._dataset = model, plan, dataset
        if plan.algorithm.proposes and public_score is None:
            raise PrivacyError(f"{plan.method} scores proposals on public data: give the Trainer public_score")
        self.run = Run(
            model,
            loss_fn,
            dataset,
            plan,
            microbatch=microbatch,
            engine=engine,
            augment=augment,
            copies=copies,
            public_score=public_score,
        )
        self.optimizer = fitting_optimizer(self.run, optimizer)
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            scheduler = scheduler(self.optimizer)
        self.scheduler = scheduler
        if scheduler is not None and scheduler.optimizer is not self.optimizer:
            raise PrivacyError(
                "the scheduler drives another optimizer: build it on the one given to the Trainer, or give a function "
                "of the optimizer that makes it"
            )
        self.callbacks = list(callbacks)
        self.target_epsilon = target_epsilon
        self.last_step = plan.steps if target_epsilon is None else steps_within(plan, target_epsilon)
        self._planned: int | None = None  # where the run was to end when it began
        self.steps_per_epoch = max(1, round(1 / plan.sampling_rate))
        self.metrics: dict[str, float] = {}  # public scores, filled by callbacks
        self.lost_steps = 0
        self.interrupted = False
        self.ledger, self.run_id = ledger, uuid.uuid4().hex
        self._account: Account | None = None  # opened by the first fit, or by resuming
        self._jumped_to_the_end = self._out_of_budget = False
        self.between_steps = True  # False while a step is under way: no state worth saving then
        self._gradients = GradientBuffer(self.run.engine.layout)
        self._trained = {id(parameter) for parameter in self.run.engine.layout.parameters}
        self._curve: dict[int, float] = {}

    @property
    def step(self) -> int:
        """How many of the plan's steps are used."""
        return self.run.step

    @property
    def epochs(self) -> int:
        """How many epochs the plan amounts to, the last one perhaps shorter."""
        return math.ceil(self.last_step / self.steps_per_epoch)

    def epsilon(self) -> float:
        """ε of the steps taken so far (rounded up to the next precomputed point within an epoch). Changes nothing.

        A running display: it would be the run's ε if the run had been fixed beforehand to end here. What a run that
        is stopped now guarantees is `stated_epsilon()`.
        """
        if self.step == 0:
            return 0.0
        if self.step not in self._curve and not any(point > self.step for point in self._curve):
            ends = [min(self.steps_per_epoch * (e + 1), self.last_step) for e in range(self.epochs)]
            every = math.ceil(len(ends) / _CURVE_POINTS)
            points = sorted({*ends[every - 1 :: every], self.last_step})
            values = accounting.epsilon_curve(self.plan.events(), self.plan.delta, self.plan.accountant, points)
            self._curve = dict(zip(points, values, strict=True))
        return min(value for point, value in self._curve.items() if point >= self.step)

    @property
    def planned_steps(self) -> int:
        """The steps that were fixed before the run began: its guarantee holds for all of them, wherever it stops."""
        return self.last_step if self._planned is None else self._planned

    def stated_epsilon(self) -> float:
        """The ε to publish if the run ends here, whatever made it end: see `fitting.stated_epsilon`."""
        account = self._account
        used = self.step if account is None else max(self.step, account.charged)  # a seeded run may be replaying
        return stated_epsilon(self.plan, used, self.planned_steps, None if account is None else account.budget)

    def statement(self) -> str:
        """The guarantee of this run in plain English, with the one ε of `stated_epsilon`."""
        return self.plan.statement(steps=self.planned_steps, epsilon=self.stated_epsilon())

    def fit(self) -> Result:
        """Train to the end of the plan, to the target ε, or until interrupted; callable again to go on.

        Ctrl-C ends the fit after the step that is under way, with everything in order; a second one
        breaks off at once.
        """
        self.interrupted = False
        self._fix_the_end()
        if self.ledger is not None and self._account is None:
            self._account = open_account(self.ledger, self.run_id, self.plan, self.last_step, self._dataset)
        self._out_of_budget = False
        try:
            self._call("on_start")
            with self._orderly_interrupt():
                if self._jumped_to_the_end:
                    self._jumped_to_the_end = False
                    self._call("on_epoch")
                self._end_with_the_budget()
                while self.step < self.last_step and not self.interrupted:
                    self._one_step()
                    self._call("on_step")
                    self._end_with_the_budget()
                    if self.step % self.steps_per_epoch == 0 or self.step == self.last_step:
                        self._call("on_epoch")
        finally:
            self._stop_callbacks()
        if self._account is not None:
            self._account.settle(self.step)
        if self.step == self.plan.steps:
            reason = "finished"
        elif self._out_of_budget:
            reason = "budget spent"
        else:
            reason = "target reached" if self.step >= self.last_step else "interrupted"
        epsilon = self.stated_epsilon()
        if not self.run.parameters().isfinite().all():
            raise PrivacyError(
                "training has diverged: the weights are not finite. Lower the learning rate or look at the data's "
                f"scale; the epsilon spent, {accounting.rounded_up(epsilon)}, stays spent"
            )
        return Result(reason, self.step, epsilon, self.plan.delta, self.lost_steps)

    def _fix_the_end(self) -> None:
        """Note where the run is to end; an end that is moved after it began may have been moved for what was seen."""
        if self._out_of_budget:
            self.last_step = self.planned_steps  # the ledger may have room again
        if self._planned is None:
            self._planned = self.last_step
        elif self._planned != self.last_step:
            self._planned = self.plan.steps

    def _end_with_the_budget(self) -> None:
        """Reserve the next step; if the ledger has none left, this was the last one."""
        if self._account is not None and self.step < self.last_step and not self._account.covers(self.step):
            self._out_of_budget, self.last_step = True, self.step

    def _one_step(self) -> None:
        if self._account is not None and not self._account.covers(self.step):
            raise PrivacyError("the budget is spent")
        self.between_steps = False
        release = self.run.take_step()
        self._gradients.set(release, self.plan.lot_size)
        method, state = self.run.method, self.run.state
        for parameter in self._frozen():
            parameter.grad = None  # of the owner's own backward pass, perhaps: no noise in it
        method.tune(self.optimizer, self.run, state)
        before = (self.run.parameters(), copy.deepcopy(self.optimizer.state_dict())) if method.proposes else None
        self.optimizer.step()
        if before is not None and not method.accepts(self.run, state):
            self.run.engine.layout.write(before[0])
            self.optimizer.load_state_dict(before[1])
        if self.scheduler is not None:
            self.scheduler.step()
        self.between_steps = True

    def _frozen(self) -> list[torch.Tensor]:
        """What the optimizer holds beside the trained parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in self._trained]

    @contextmanager
    def _orderly_interrupt(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return

        def remember(number: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Callbacks by kind and number, so that leaving one out on resuming does not mix up the others."""
        seen: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            kind = type(callback).__name__
            named.append((f"{kind}.{seen[kind]}", callback))
            seen[kind] += 1
        return named

    def _call(self, moment: str) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self)

    def _stop_callbacks(self) -> None:
        """Each gets its chance to put things in order, even if one before it fails."""
        failed: Exception | None = None
        for callback in self.callbacks:
            try:
                callback.on_stop(self)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, atomically. It holds no private quantity and, in secure mode, no key."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        content = {
            "run": self.run_id,
            "ledger": None if self._account is None else self._account.position,
            "plan": {**self.plan.to_dict(), "params": dict(self.plan.params)},
            "step": self.step,
            "planned": self._planned,
            "lost_steps": self.lost_steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler,
            "state": self.run.state_dict(),
            "metrics": dict(self.metrics),
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
        }
        account, step = self._account, self.step
        checkpoint.save(
            Path(path), content, None if account is None else lambda digest: account.note_checkpoint(step, digest)
        )

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same plan.

        Seeded: the same releases are repeated bit for bit from there on, and are not charged twice.
        Secure: a fresh key is drawn; steps that were used after the checkpoint was written are lost but
        stay charged, so the run ends that much earlier (`lost_steps`). This takes the run's ledger.
        A run that another process still holds goes on here and stops there.
        """
        saved = checkpoint.load(Path(path), self.run.engine.layout.device)
        checkpoint.refuse_other_plan(saved["plan"], self.plan)
        checkpoint.refuse_other_version(saved["made_with"], self.plan.seed is not None)
        self._refuse_other_ledger(saved)
        if (saved["scheduler"] is None) != (self.scheduler is None):
            raise PrivacyError("the checkpoint was written with another choice of scheduler: give the run's own")
        try:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.run.load_state_dict(saved["state"])
        except (RuntimeError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise PrivacyError(f"the checkpoint is of another model or optimizer ({first})") from None
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        for name, callback in self._named_callbacks():
            if name in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][name])
        self.metrics = dict(saved["metrics"])
        self.run_id = str(saved["run"])
        self.run.step, self.lost_steps = int(saved["step"]), int(saved["lost_steps"])
        self._planned = saved["planned"]
        self._account = None
        if self.ledger is not None:
            self._account = self._reopened_account()
            used = self._account.charged
            if self.plan.seed is None and used > self.run.step:
                self.lost_steps += used - self.run.step
                self.run.step = used
                self._jumped_to_the_end = used >= self.last_step

    def _reopened_account(self) -> Account:
        assert self.ledger is not None
        account = open_account(self.ledger, self.run_id, self.plan, self.last_step, self._dataset)
        if account.data_changed and self.plan.seed is not None:
            raise PrivacyError(
                "a seeded run cannot go on with other data, on which it would repeat its noise: start a new run"
            )
        return account

    def _refuse_other_ledger(self, saved: dict[str, Any]) -> None:
        """A checkpoint alone cannot know what was released after it was written."""
        if saved["ledger"] is not None and self.ledger is not None:
            self.ledger.refuse_stranger(str(saved["run"]), saved["digest"], saved["ledger"])
        elif saved["step"] < self.plan.steps and (self.plan.seed is None or saved["ledger"] is not None):
            raise PrivacyError(
                "this run goes on only with its ledger, which knows the steps used after this checkpoint: "
                "train and resume with ledger=fodp.Ledger(file)"
                + ("" if saved["ledger"] is not None else ", or use a seed for research")
            )
