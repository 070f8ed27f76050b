"""The training loop: a plan, a model, data, and callbacks for everything optional."""

import copy
import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fodp import accounting
from fodp.callbacks import Callback, Callbacks, Metrics
from fodp.clipping.engine import LossFunction
from fodp.errors import BudgetError, PrivacyError
from fodp.identity.private_data import PrivateData
from fodp.inputs.bad_records import BadRecord, explain_step
from fodp.inputs.finite import refuse_non_finite
from fodp.inputs.order import refuse_other_order
from fodp.inputs.rehearsal import rehearse
from fodp.layout import GradientBuffer
from fodp.ledger import Ledger
from fodp.plan import Plan
from fodp.processes import Turn
from fodp.ranks import refuse_other_group
from fodp.session import Session
from fodp.sources.opening import Opening
from fodp.sources.pull import Reading, pulled
from fodp.state import checkpoint
from fodp.state.averaged import AveragedWeights
from fodp.state.course import Course
from fodp.state.fitting import PLANNED, fitting_optimizer, fitting_scheduler, moves_rate, set_rate, steps_within
from fodp.state.ledgers import refuse_other_ledger
from fodp.support import checks
from fodp.support.signals import orderly_stop
from fodp.support.words import in_our_words


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

    `target_epsilon` stops before the step that would exceed it; `last_step` ends the run after that many of the plan's
    steps, and ε is then theirs. `ledger` writes spending down before it happens, and refuses what its budget does not
    allow; a run keeps to one ledger, also when it is resumed. It may be a function that opens the ledger when the first
    fit asks for it. `run_id` is the name of a new run in the ledger (None: a fresh one); a resumed run keeps the one it
    began with. `public_score()` is the loss on data declared public, for methods that ask for it (sa-dpsgd).

    How records are read and put through the model is told by further keywords, which are the fields of
    `fodp.sources.pull.Reading`: `collate_fn`, `num_workers`, `pin_memory`, `augment`, `copies`, `owners`, `microbatch`,
    `engine`, `allow_non_finite` and `public_sample`.
    """

    @in_our_words("Trainer", also=Reading)
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
        target_epsilon: float | None = None,
        last_step: int | None = None,
        ledger: Ledger | Callable[[], Ledger] | None = None,
        run_id: str | None = None,
        public_score: Callable[[], float] | None = None,
        **reading: Any,
    ):
        refuse_other_order("Trainer", model=model, loss_fn=loss_fn, dataset=dataset, plan=plan)
        refuse_other_ledger(ledger, may_open=True)
        checks.function("public_score", public_score)
        listed, records = Callbacks(callbacks), Reading(**reading)
        given = {
            "owners": records.owners is not None,
            "no owners": records.owners is None,
            "no public score": public_score is None,
            "an optimizer of yours": optimizer is not None,
            "a scheduler": scheduler is not None,
        }
        opening = Opening(model, dataset, plan, given)
        PrivateData(dataset).refuse_reaching("public_score", public_score)
        self.source, lots = pulled(opening, loss_fn, records)
        self.model, self._dataset = model, dataset
        self.session = opening.session(self.source, lots, public_score)
        self.optimizer = fitting_optimizer(self.session, optimizer)
        self.scheduler = fitting_scheduler(scheduler, self.optimizer)
        # Of several processes the first one looks, writes and keeps the ledger; all of them train.
        self.callbacks = listed if self.session.processes.is_first else Callbacks(())
        self.metrics = Metrics()  # public scores, filled by callbacks
        end = plan.steps if last_step is None else checks.whole("last_step", last_step, maximum=plan.steps)
        end = end if target_epsilon is None else min(end, steps_within(plan, target_epsilon))
        self.course = Course(self.session, dataset, ledger, run_id=run_id, last_step=end)
        self.between_steps = True  # False while a step is under way: no state worth saving then
        self._refused: str | None = None  # what made a step of this run impossible
        self._allow_non_finite = records.allow_non_finite
        self._weights = AveragedWeights(self.session)
        self._update = Update(self.session, self.optimizer)
        self._fit = Fit(self)

    def __repr__(self) -> str:
        return f"<Trainer of {type(self.model).__name__}, step {self.step} of {self.last_step}, {self.plan!r}>"

    @property
    def plan(self) -> Plan:
        """The plan that is carried out."""
        return self.session.plan

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has: 1/q, rounded."""
        return max(1, round(1 / self.plan.sampling_rate))

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that the run is kept in, opened now if it was given as a function."""
        return self.course.ledger

    @property
    def run_id(self) -> str:
        """The name of the run in its ledger."""
        return self.course.run_id

    @property
    def step(self) -> int:
        """How many of the plan's steps are used."""
        return self.course.step

    @property
    def last_step(self) -> int:
        """The step after which the run ends, as far as is known now."""
        return self.course.last_step

    @property
    def lost_steps(self) -> int:
        """How many steps are charged and had no effect: they broke off, or were used after the checkpoint."""
        return self.course.lost_steps

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
        return self.course.running_epsilon()

    def stated_epsilon(self) -> float:
        """The ε to publish if the run ends here, whatever made it end."""
        return self.course.stated_epsilon()

    def statement(self) -> str:
        """The guarantee of this run in plain English, with the one ε of `stated_epsilon`."""
        return self.plan.statement(steps=self.course.planned_steps, epsilon=self.stated_epsilon())

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about this run's privacy if it ends here."""
        return self.course.privacy_card()

    def fit(self) -> Result:
        """Train to the end of the plan, to the target ε, or until interrupted; callable again to go on.

        Ctrl-C, SIGTERM and SIGHUP end the fit after the step that is under way, with everything in order; a second one
        breaks off at once. An exception of the data set, the model or the loss ends it too: the step that broke off is
        lost but stays charged (`lost_steps`), and another `fit()` goes on with the next one. A refusal
        (`PrivacyError`) in a step is the end of the run.

        In a process group all ranks must call it. They stop after the same step, and what ends one ends all.
        """
        processes = self.session.processes
        with processes.together():
            self._weights.put_back()
            self._train()
            self._weights.put_in()
            return Result(**json.loads(processes.text(lambda: json.dumps(asdict(self._fit.result())))))

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model is the average of its iterates, if the plan has one and it has begun: for scores."""
        return self._weights.inside()

    def stop_early(self) -> None:
        """End the fit after the step that is under way; for callbacks that have seen enough on public data."""
        self._fit.stop_early()

    def interrupt(self) -> None:
        """End the fit after the step that is under way, as Ctrl-C does; another `fit()` goes on from there."""
        self._fit.interrupt()

    def accept_non_finite(self) -> None:
        """From now on take data that is not finite, as with `allow_non_finite=True`: audits plant such records."""
        self._allow_non_finite = True

    def _train(self) -> None:
        if self._refused is not None:
            raise PrivacyError(f"this run has ended, make a new Trainer; what it used stays charged: {self._refused}")
        refuse_other_group(self.session.processes)
        self.session.refuse_other_process()
        self._fit = Fit(self)
        if not self._allow_non_finite:
            refuse_non_finite(self._dataset)
        self.callbacks.refuse_private_scores(self._dataset)
        if self.step == 0:
            rehearse(self.source, self._dataset)
        self.course.fix_the_end()
        if self.course.ledger is not None and self.course.account is None:
            self.source.refuse_wrong_loss()
        self.course.begin()
        with orderly_stop(self._fit.asked):
            try:
                try:
                    self.callbacks.call("on_start", self)
                    self._fit.take_steps()
                except KeyboardInterrupt:  # it breaks off at once
                    self.between_steps = False
                    raise
                finally:
                    self.source.close()
                    if self.session.is_here:  # not in a fork in the middle of a fit: the files are its parent's
                        self.callbacks.stop(self)
            except Exception:
                with suppress(Exception):  # what went wrong first is what counts
                    self.course.settle()
                raise
            self.course.settle()

    def take_step(self) -> None:
        """One step of a fit: release, update, average. `fit()` takes all of them, and looks before the first."""
        course, session = self.course, self.session
        if course.account is not None and not course.covers():
            raise BudgetError("the budget is spent")
        self.source.listeners.refuse()
        self.between_steps, begun = False, session.number
        try:
            release = session.take_step()
        except BaseException as error:
            found = explain_step(self.source, begun, error)
            self._lose_step(begun, error if found is None else found)
            if found is not None:
                raise found from found.__cause__
            raise
        self._update.take(release)
        if "average" in session.states:
            session.states["average"].take(session.parameters(), session.number, course.last_step)
        if self.scheduler is not None:
            self.scheduler.step()
        self.between_steps = True

    def _lose_step(self, begun: int, error: BaseException) -> None:
        """A step broke off, perhaps after its lot was drawn: it stays charged, and nothing of it is used."""
        course = self.course
        course.lose_steps_since(begun)
        if isinstance(error, PrivacyError) and not isinstance(error, BadRecord):
            self._refused = str(error)
        elif isinstance(error, Exception):
            self.between_steps = True  # model, optimizer and memory are as they were before it
            error.add_note(
                f"fodp: step {begun + 1} of {self.plan.steps} broke off. {self.step} steps are charged, of which "
                f"{course.lost_steps} were lost; fit() goes on with the next one"
            )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, atomically. It holds no private quantity and, in secure mode, no key.

        In a process group the first rank writes, and the others do nothing.
        """
        if not self.session.processes.is_first:
            return
        with self.averaged():
            content = checkpoint.snapshot(
                self.course,
                self.model,
                self.optimizer,
                self.scheduler,
                self._weights.iterate,
                metrics=dict(self.metrics),
                callbacks=self.callbacks.state_dict(),
            )
            checkpoint.save(Path(path), content, self.course.noted())

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same plan.

        Seeded: the same releases are repeated bit for bit from there on, and are not charged twice; with a ledger, what
        would be another release under the same noise is refused.
        Secure: a fresh key is drawn; steps that were used after the checkpoint was written are lost but
        stay charged, so the run ends that much earlier (`lost_steps`). This takes the run's ledger.
        A run that another process still holds goes on here and stops there.

        In a process group all ranks read the file, and there may be more or fewer of them than wrote it.
        """
        self.session.refuse_other_process()
        processes = self.session.processes
        with processes.together():
            saved = checkpoint.load(Path(path), self.session.source.layout.device)
            processes.compare(lambda _: {"the checkpoint": saved["digest"].encode()})
            self._weights.forget()
            checkpoint.restore(saved, self.course, self.model, self.optimizer, self.scheduler)
            self.callbacks.load_state_dict(saved["callbacks"])
            self.metrics.update(saved["metrics"])
            self.metrics.new.clear()
            # Only the first process has the ledger, which knows of steps that were used after the checkpoint.
            self.course.agree()


class Update:
    """What becomes of a release: it is divided by the public L, and the optimizer acts on it."""

    def __init__(self, session: Session, optimizer: torch.optim.Optimizer):
        self._session, self._optimizer, layout = session, optimizer, session.source.layout
        self._gradients = GradientBuffer(layout)
        self._trained = {id(parameter) for parameter in layout.parameters}
        self._moves_rate = moves_rate(session)

    def take(self, release: Tensor) -> None:
        """Let the optimizer act on the release, and take that back if the method does not accept it."""
        session, optimizer = self._session, self._optimizer
        method, state = session.plan.algorithm, session.states["method"]
        self._gradients.set(release, session.plan.lot_size)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._trained:
                    parameter.grad = None  # of the owner's own backward pass, perhaps: no noise in it
        if self._moves_rate:
            set_rate(session, optimizer)
        method.tune(optimizer, session, state)
        if not method.has_acceptance_test:
            optimizer.step()
            return
        before = session.parameters(), copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        if not method.accepts(session, state):
            session.source.layout.write(before[0])
            optimizer.load_state_dict(before[1])


class Fit:
    """One call of `Trainer.fit`: from the step where it begins to where it was asked to end, and by whom."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._interrupted = self._early = False  # early: by a callback that has seen enough
        self._signal: int | None = None  # what interrupted it

    def stop_early(self) -> None:
        """End after the step that is under way: a callback has seen enough."""
        self._early = True

    def interrupt(self) -> None:
        """End after the step that is under way: somebody asked for it."""
        self._interrupted = True

    def asked(self, number: int) -> bool:
        """Note the first signal; False for a second one, which breaks off at once."""
        if self._interrupted:
            return False
        self._interrupted, self._signal = True, number
        return True

    def take_steps(self) -> None:
        """All steps that there are to take, with the callbacks after each."""
        trainer, course = self._trainer, self._trainer.course
        if course.ended_at_once():
            trainer.callbacks.call("on_epoch", trainer)
        course.end_with_the_budget()
        while self._goes_on():
            trainer.take_step()
            trainer.callbacks.call("on_step", trainer)
            course.end_with_the_budget()
            if course.step % trainer.steps_per_epoch == 0 or course.step == course.last_step:
                trainer.callbacks.call("on_epoch", trainer)

    def _goes_on(self) -> bool:
        """Whether there is another step to take; all processes decide alike."""
        course, session = self._trainer.course, self._trainer.session
        signal = self._signal or -int(self._interrupted)  # -1: an interrupt without a signal
        said = Turn(course.step, signal, self._early, course.last_step, course.out_of_budget)
        turn = session.processes.turn(said)
        if turn.signal:
            self._interrupted, self._signal = True, turn.signal if turn.signal > 0 else None
        self._early = turn.stopped
        course.follow(turn)
        goes_on = course.step < turn.last_step and not (turn.signal or turn.stopped)
        if course.step % self._trainer.steps_per_epoch == 0 or not goes_on:
            session.processes.refuse_drift(session.parameters)
        return goes_on

    def result(self) -> Result:
        """How it has ended; refuses weights that are not finite."""
        course, session = self._trainer.course, self._trainer.session
        if course.step == course.plan.steps:
            reason = "finished"
        elif course.out_of_budget:
            reason = "budget spent"
        else:
            stopped = "stopped early" if self._early and not self._interrupted else "interrupted"
            reason = "target reached" if course.step >= course.last_step else stopped
        epsilon = course.stated_epsilon()
        if not bool(session.parameters().isfinite().all()):
            raise PrivacyError(
                "training has diverged: the weights are not finite. Lower the learning rate or look at the data's "
                f"scale; the epsilon spent, {accounting.rounded_up(epsilon)}, stays spent"
            )
        return Result(reason, course.step, epsilon, course.plan.delta, course.lost_steps, self._signal)
