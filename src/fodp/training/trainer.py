"""The training loop: a plan, a model, data, and callbacks for everything optional."""

import copy
import json
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fodp import _checks, accounting
from fodp._checks import BudgetError, ConfigurationError, LedgerError, PrivacyError
from fodp._words import in_our_words
from fodp.clipping.augmentation import Augment
from fodp.clipping.engine import LossFunction
from fodp.ledger import Account, Ledger
from fodp.plan import Plan
from fodp.private_data import PrivateData
from fodp.ranks import Turn, refuse_other_group
from fodp.run import Run
from fodp.sampling import Collate
from fodp.training import checkpoint, sharded
from fodp.training.attending import ask_for_slices, attended
from fodp.training.averaged import AveragedWeights
from fodp.training.bad_records import BadRecord, explain_step
from fodp.training.bookkeeping import open_account
from fodp.training.callbacks import Callback
from fodp.training.export import privacy_card
from fodp.training.finite import refuse_non_finite
from fodp.training.fitting import PLANNED, fitting_optimizer, refuse_plateau, set_rate, stated_epsilon, steps_within
from fodp.training.order import refuse_other_order
from fodp.training.rehearsal import refuse_hooks, rehearse
from fodp.training.scores import Metrics
from fodp.training.signals import orderly_stop
from fodp.training.witness import witness_of


@dataclass(frozen=True)
class Result:
    """How a fit ended. `epsilon` is the one to publish: that of the whole plan for a run that was stopped early."""

    reason: str  # "finished", "interrupted", "stopped early", "target reached" or "budget spent"
    steps: int
    epsilon: float
    delta: float
    lost_steps: int
    signal: int | None = None  # what interrupted it


class Trainer:
    """Trains a model under a plan; the model that comes out carries the plan's guarantee.

    Where the plan has an `average`, the model is that average of the iterates when `fit()` returns, in scores and in
    what is exported; in a fit, `with trainer.averaged():` puts it in. Another fit goes on from the iterate.

    loss_fn(model, batch) returns one loss per example. `optimizer` None takes the method's own; any
    `torch.optim` optimizer over exactly the trainable parameters does for methods that do not insist
    on theirs. `scheduler`, or a function that makes it from the optimizer, steps once per step. Nothing of
    the private data (training loss, lot sizes, norms) is shown or stored anywhere.

    `augment(batch)` with `copies` K trains on K augmented copies per example whose gradients are averaged
    before clipping; it must treat every row by itself. `owners`, for a plan with unit="person", names for each record
    whose it is (whole numbers or texts; a list, an array or a tensor). `target_epsilon` stops before the step that
    would exceed it; `last_step` ends the run after that many of the plan's steps, and ε is then theirs. `ledger` writes
    spending down before it happens, and refuses what its budget does not allow; a run keeps to one ledger, also when
    it is resumed. It may be a function that opens the ledger when the first fit asks for it. `run_id` is the name of a
    new run in the ledger (None: a fresh one); a resumed run keeps the one it began with. `public_score()` is the loss
    on data declared public, for methods that ask for it (sa-dpsgd). Data of tensors that is not finite is refused
    before the first step; `allow_non_finite` takes it: an example without a finite gradient counts as zero.

    `collate_fn(records)` makes a batch of a list of records: tensors with the examples first, lists with an item for
    each example (ragged data, texts), and dicts, lists and tuples of them (also a tokenizer's `BatchEncoding`). It is
    never given an empty list. Where it pads to the longest record of a lot, the padding must have no effect.
    `num_workers` processes read lots ahead while others are trained on (`pin_memory` for an accelerator): the run is
    the same, bit for bit. Data made of tensors, and methods with several lots in a step, are read without them.

    `public_sample`, for the shape kronecker, is a batch of public records, as loss_fn takes them, by which layers'
    inputs and back-signals are measured; None makes one up from the shapes and types of the data's tensors.
    """

    @in_our_words("Trainer")
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
        owners: Any = None,
        target_epsilon: float | None = None,
        last_step: int | None = None,
        microbatch: int | None = None,
        engine: str = "auto",
        ledger: Ledger | Callable[[], Ledger] | None = None,
        run_id: str | None = None,
        public_score: Callable[[], float] | None = None,
        allow_non_finite: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        public_sample: Any = None,
    ):
        refuse_other_order("Trainer", model=model, loss_fn=loss_fn, dataset=dataset, plan=plan)
        self.model, self.plan, self._dataset = model, plan, dataset
        if plan.algorithm.has_acceptance_test and public_score is None:
            raise ConfigurationError(f"{plan.method} scores proposals on public data: give the Trainer public_score")
        self.run = Run(
            model,
            loss_fn,
            dataset,
            plan,
            microbatch=microbatch,
            engine=engine,
            augment=augment,
            copies=copies,
            owners=owners,
            public_score=public_score,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            public_sample=public_sample,
        )
        self.optimizer = fitting_optimizer(self.run, optimizer)
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            scheduler = scheduler(self.optimizer)
        self.scheduler = scheduler
        if scheduler is not None and plan.options.rate.acts:
            raise ConfigurationError(
                f"params set {plan.options.rate.moved_by}, and a scheduler is given: both would move the "
                "rate, leave one out"
            )
        if scheduler is not None and scheduler.optimizer is not self.optimizer:
            raise ConfigurationError(
                "the scheduler drives another optimizer: build it on the one given to the Trainer, or give a function "
                "of the optimizer that makes it"
            )
        refuse_plateau(scheduler, "step it in a callback with a public score")
        # Of several ranks the first one looks, writes and keeps the ledger; all of them train.
        self.callbacks = list(callbacks) if self.run.ranks.is_first else []
        self.allow_non_finite = allow_non_finite  # audits set it, for they plant such records on purpose
        self.target_epsilon = target_epsilon
        end = plan.steps if last_step is None else _checks.whole("last_step", last_step, maximum=plan.steps)
        self.last_step = end if target_epsilon is None else min(end, steps_within(plan, target_epsilon))
        self._planned: int | None = None  # where the run was to end when it began
        self.steps_per_epoch = max(1, round(1 / plan.sampling_rate))
        self._compared: list[Callback] = []  # whose public data was compared with the private
        self.metrics = Metrics()  # public scores, filled by callbacks
        self.lost_steps = 0
        self.interrupted = self._stopped_early = False
        self._signal: int | None = None  # which interrupted it
        if run_id is not None and not (isinstance(run_id, str) and run_id.strip()):
            raise ConfigurationError(f"run_id must be a name for the run, got {_checks.shown(run_id)}")
        self._ledger, self.run_id = ledger if self.run.ranks.is_first else None, run_id or uuid.uuid4().hex
        self._account: Account | None = None  # opened by the first fit, or by resuming
        self._jumped_to_the_end = self._out_of_budget = False
        self.between_steps = True  # False while a step is under way: no state worth saving then
        self._begun = 0  # the step that is under way
        self._deserted = False  # a sharded run has broken off: nothing can be done together any more
        self._attended = False  # the other ranks wait for what this one's callbacks need of them
        self._refused: str | None = None  # what made a step of this run impossible
        self._weights = AveragedWeights(self.run)
        self._gradients = self.run.gradient_buffer()
        self._trained = {id(parameter) for parameter in self.run.trained}
        self._running: accounting.RunningEpsilon | None = None  # made when ε is first asked for

    def __repr__(self) -> str:
        return f"<Trainer of {type(self.model).__name__}, step {self.step} of {self.last_step}, {self.plan!r}>"

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that the run is kept in, opened now if it was given as a function."""
        if self._ledger is not None and not isinstance(self._ledger, Ledger):
            self._ledger = self._ledger()
        return self._ledger

    @property
    def step(self) -> int:
        """How many of the plan's steps are used."""
        return self.run.step

    @property
    def learning_rate(self) -> float:
        """The rate of the run, which lr="auto" chose from public numbers if so; with a schedule, that of its factor 1.

        Of the first parameter group, where an optimizer of your own has several.
        """
        group = self.optimizer.param_groups[0]
        return float(group.get(PLANNED, group.get("initial_lr", group["lr"])))

    @property
    def epochs(self) -> int:
        """How many epochs the plan amounts to, the last one perhaps shorter."""
        return math.ceil(self.last_step / self.steps_per_epoch)

    def epsilon(self) -> float:
        """ε of the steps taken so far, an upper bound that is at most 2% above it and never above the run's. Changes
        nothing.

        A running display: it would be the run's ε if the run had been fixed beforehand to end here. What a run that
        is stopped now guarantees is `stated_epsilon()`.
        """
        if self._running is None:
            self._running = accounting.RunningEpsilon(self.plan.events(), self.plan.delta, self.plan.accountant)
        return self._running.after(self.step, self.planned_steps)

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

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about this run's privacy if it ends here."""
        account = self._account
        used = self.step if account is None else max(self.step, account.charged)
        return privacy_card(self.plan, used, self.planned_steps, None if account is None else account.budget)

    def fit(self) -> Result:
        """Train to the end of the plan, to the target ε, or until interrupted; callable again to go on.

        Ctrl-C, SIGTERM and SIGHUP end the fit after the step that is under way, with everything in order; a second one
        breaks off at once. An exception of the data set, the model or the loss ends it too: the step that broke off is
        lost but stays charged (`lost_steps`), and another `fit()` goes on with the next one. A refusal
        (`PrivacyError`) in a step is the end of the run.

        In a process group all ranks must call it. They stop after the same step, and what ends one ends all. A model
        that FSDP2 has divided (`fully_shard`) is trained in slices, and is divided again afterwards (docs/scaling.md).
        """
        ranks = self.run.ranks
        with ranks.together():
            self._weights.put_back()
            self._train()
            self._weights.put_in()
            is_finite = self.run.is_finite()
            return Result(**json.loads(ranks.text(lambda: json.dumps(asdict(self._result(is_finite))))))

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model is the average of its iterates, if the plan has one and it has begun: for scores."""
        return self._weights.inside()

    def _train(self) -> None:
        if self._refused is not None:
            raise PrivacyError(f"this run has ended, make a new Trainer; what it used stays charged: {self._refused}")
        refuse_other_group(self.run.ranks)
        self.run.refuse_other_process()
        self.interrupted, self._signal, self._stopped_early = False, None, False
        if not self.allow_non_finite:
            refuse_non_finite(self._dataset)
        self._refuse_private_scores()
        with self.run.whole():
            if self.step == 0:
                rehearse(self.run, self._dataset)
            self._fix_the_end()
            if self.ledger is not None and self._account is None:
                self._account = self._new_account(self.ledger)
        self.run.witness = witness_of(self.run, self._account)
        self._out_of_budget = self._deserted = False
        with orderly_stop(self._asked_to_stop):
            try:
                try:
                    self._call("on_start")
                    self._take_steps()
                except BaseException as error:
                    # It breaks off at once, or others who hold slices are gone: nothing more is saved.
                    self._deserted = self.run.shards is not None
                    self.between_steps &= not (self._deserted or isinstance(error, KeyboardInterrupt))
                    if self._deserted:
                        self.run.ranks.give_up()  # the others must not take what callbacks do now for an answer
                    raise
                finally:
                    self.run.close_workers()
                    self._stop_callbacks()
            except Exception:
                with suppress(Exception):  # what went wrong first is what counts
                    self._settle()
                raise
            self._settle()

    def _refuse_private_scores(self) -> None:
        """Raise if a callback has the data that is trained on, or a copy of it, in its hands."""
        private = PrivateData(self._dataset)
        for callback in self.callbacks:
            if any(callback is known for known in self._compared):
                continue
            for public in callback.public_data():
                private.refuse(type(callback).__name__, public)
            private.refuse_reaching(type(callback).__name__, callback)
            self._compared.append(callback)

    def _result(self, is_finite: bool) -> Result:
        if self.step == self.plan.steps:
            reason = "finished"
        elif self._out_of_budget:
            reason = "budget spent"
        else:
            stopped = "stopped early" if self._stopped_early and not self.interrupted else "interrupted"
            reason = "target reached" if self.step >= self.last_step else stopped
        epsilon = self.stated_epsilon()
        if not is_finite:
            raise PrivacyError(
                "training has diverged: the weights are not finite. Lower the learning rate or look at the data's "
                f"scale; the epsilon spent, {accounting.rounded_up(epsilon)}, stays spent"
            )
        return Result(reason, self.step, epsilon, self.plan.delta, self.lost_steps, self._signal)

    def _take_steps(self) -> None:
        if self._jumped_to_the_end:
            self._jumped_to_the_end = False
            self._call("on_epoch")
        self._end_with_the_budget()
        while self._goes_on():
            self._one_step()
            self._call("on_step")
            self._end_with_the_budget()
            if self.step % self.steps_per_epoch == 0 or self.step == self.last_step:
                self._call("on_epoch")

    def _goes_on(self) -> bool:
        """Whether there is another step to take; all ranks decide alike."""
        asked = self._signal or -int(self.interrupted)
        wanted = Turn(self.step, asked, self._stopped_early, self.last_step, self._out_of_budget)
        turn = self.run.ranks.turn(wanted)
        if turn.signal:
            self.interrupted, self._signal = True, turn.signal if turn.signal > 0 else None
        self._stopped_early, self.last_step, self._out_of_budget = turn.stopped, turn.last_step, turn.out_of_budget
        goes_on = self.step < turn.last_step and not (turn.signal or turn.stopped)
        if self.step % self.steps_per_epoch == 0 or not goes_on:
            self.run.ranks.refuse_drift(self.run.parameters if self.run.shards is None else self._common_numbers)
        return goes_on

    def _common_numbers(self) -> torch.Tensor:
        """What ranks must have in common where each holds other weights: the optimizer's numbers and the clip norm."""
        groups = [value for group in self.optimizer.param_groups for name, value in group.items() if name != "params"]
        numbers = [float(value) for value in groups if isinstance(value, int | float | torch.Tensor)]
        return torch.tensor([float(self.run.clip_norm), *numbers], dtype=torch.float64)

    def stop_early(self) -> None:
        """End the fit after the step that is under way; for callbacks that have seen enough on public data."""
        self._stopped_early = True

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
            raise BudgetError("the budget is spent")
        refuse_hooks(self.model)
        self.between_steps, self._begun = False, self.step
        try:
            release = self.run.take_step()
        except BaseException as error:
            found = explain_step(self.run, error)
            self._lose_step(error if found is None else found)
            if found is not None:
                raise found from found.__cause__
            raise
        self._gradients.set(release, self.plan.lot_size)
        method, state = self.run.method, self.run.state
        for parameter in self._frozen():
            parameter.grad = None  # of the owner's own backward pass, perhaps: no noise in it
        set_rate(self.run, self.optimizer)
        method.tune(self.optimizer, self.run, state)
        before = (
            (self.run.parameters(), copy.deepcopy(self.optimizer.state_dict())) if method.has_acceptance_test else None
        )
        self.optimizer.step()
        if before is not None and not method.accepts(self.run, state):
            self.run.set_parameters(before[0])
            self.optimizer.load_state_dict(before[1])
        if self.run.average is not None:
            self.run.average.take(self.run.parameters(), self.step, self.last_step)
        if self.scheduler is not None:
            self.scheduler.step()
        self.between_steps = True

    def _lose_step(self, error: BaseException) -> None:
        """A step broke off, perhaps after its lot was drawn: it stays charged, and nothing of it is used."""
        self.lost_steps += self.run.step - self._begun
        self._jumped_to_the_end = self.step >= self.last_step
        if isinstance(error, PrivacyError) and not isinstance(error, BadRecord):
            self._refused = str(error)
        elif isinstance(error, Exception):
            self.between_steps = True  # model, optimizer and memory are as they were before it
            error.add_note(
                f"fodp: step {self._begun + 1} of {self.plan.steps} broke off. {self.step} steps are charged, of which "
                f"{self.lost_steps} were lost; fit() goes on with the next one"
            )

    def _settle(self) -> None:
        if self._account is not None:
            self._account.settle(self.step)

    def _frozen(self) -> list[torch.Tensor]:
        """What the optimizer holds beside the trained parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in self._trained]

    def _asked_to_stop(self, number: int) -> bool:
        """Note the first signal, to end after the step that is under way; False for a second one."""
        if self.interrupted:
            return False
        self.interrupted, self._signal = True, number
        return True

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Callbacks by kind and number, so that leaving one out on resuming does not mix up the others."""
        seen: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            kind = type(callback).__name__
            named.append((f"{kind}.{seen[kind]}", callback))
            seen[kind] += 1
        return named

    def _ordered_callbacks(self) -> list[Callback]:
        return sorted(self.callbacks, key=lambda callback: callback.order)

    def _call(self, moment: str) -> None:
        with attended(self, moment):
            for callback in self._ordered_callbacks():
                getattr(callback, moment)(self)
        if moment == "on_epoch":
            self.metrics.new.clear()

    def _stop_callbacks(self) -> None:
        """Each gets its chance to put things in order, even if one before it fails."""
        failed: Exception | None = None
        if not self.run.is_here:
            return  # a fork in the middle of a fit: the files are its parent's
        with attended(self, "on_stop"):
            for callback in self._ordered_callbacks():
                try:
                    callback.on_stop(self)
                except Exception as error:
                    failed = failed or error
        if failed is not None and not self._deserted:  # else what went wrong first is what counts
            raise failed

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, atomically. It holds no private quantity and, in secure mode, no key.

        In a process group the first rank writes, and the others do nothing. Of a sharded model all ranks must call it,
        and write their slices (`fodp.training.sharded`); callbacks, which the first rank has alone, may call it there.
        """
        account, step = self._account, self.step
        noted = None if account is None else lambda digest: account.note_checkpoint(step, digest)
        if self.run.shards is not None:
            if self._deserted:
                raise checkpoint.NotWritten(f"{path} was not written: this sharded run has broken off on its ranks")
            ask_for_slices(self, Path(path))
            sharded.save(Path(path), self, noted)
        elif self.run.ranks.is_first:
            with self.averaged():
                checkpoint.save(Path(path), checkpoint.snapshot(self), noted)

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same plan.

        Seeded: the same releases are repeated bit for bit from there on, and are not charged twice; with a ledger, what
        would be another release under the same noise is refused.
        Secure: a fresh key is drawn; steps that were used after the checkpoint was written are lost but
        stay charged, so the run ends that much earlier (`lost_steps`). This takes the run's ledger.
        A run that another process still holds goes on here and stops there.

        In a process group all ranks read the file, and there may be more or fewer of them than wrote it.
        """
        self.run.refuse_other_process()
        ranks = self.run.ranks
        with ranks.together():
            saved = checkpoint.load(Path(path), self.run.engine.layout.device)
            ranks.compare(lambda _: {"the checkpoint": saved["digest"].encode()})
            checkpoint.restore(self, sharded.fitted(saved, Path(path), self))
            # Only the first rank has the ledger, which knows of steps that were used after the checkpoint.
            self.run.step, self.lost_steps, self._jumped_to_the_end = json.loads(
                ranks.text(lambda: json.dumps([self.run.step, self.lost_steps, self._jumped_to_the_end]))
            )

    def _new_account(self, ledger: Ledger) -> Account:
        """Begin the run in the ledger. One of this name that took steps has released what this run does not know."""
        self.run.refuse_wrong_loss()
        used = ledger.steps(self.run_id)
        if used:
            raise LedgerError(
                f"{ledger.path} knows a run {self.run_id!r} that used {used} steps: resume it from its checkpoint, or "
                "give this run another run_id"
            )
        return open_account(ledger, self.run_id, self.plan, self.last_step, self._dataset)
