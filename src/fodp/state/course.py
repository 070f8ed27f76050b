"""Where a run stands in its plan, and what it may still spend: for the Trainer and for a loop of one's own alike."""

import json
import uuid
from collections.abc import Callable
from typing import Any

from fodp.accounting import RunningEpsilon
from fodp.errors import ConfigurationError, DataError, LedgerError
from fodp.ledger import Account, Ledger
from fodp.plan import Plan
from fodp.processes import Turn
from fodp.session import Session
from fodp.state.ledgers import open_account, refuse_other_ledger
from fodp.state.published import privacy_card, stated_epsilon
from fodp.state.witness import witness_of
from fodp.support import checks

LedgerGiven = Ledger | Callable[[], Ledger] | None


class Course:
    """The steps of a run: where it was fixed to end, which were lost, and its account in the ledger, if it has one.

    Of several processes the first one has the ledger; the others know the same numbers without it.
    """

    def __init__(
        self, session: Session, dataset: Any, ledger: LedgerGiven, *, run_id: str | None = None, last_step: int
    ):
        if run_id is not None and not (isinstance(run_id, str) and run_id.strip()):
            raise ConfigurationError(f"run_id must be a name for the run, got {checks.shown(run_id)}")
        self.session, self.run_id, self.last_step = session, run_id or uuid.uuid4().hex, last_step
        self.fixed_end: int | None = None  # where the run was to end when it began
        self.lost_steps = 0
        self.account: Account | None = None  # opened by the first fit, or by resuming
        self.jumped_to_the_end = self.out_of_budget = False
        self._running: RunningEpsilon | None = None  # made when ε is first asked for
        self._dataset, self._ledger = dataset, ledger if session.processes.is_first else None

    @property
    def plan(self) -> Plan:
        """The plan that is carried out."""
        return self.session.plan

    @property
    def step(self) -> int:
        """How many of the plan's steps are used."""
        return self.session.number

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that the run is kept in, opened now if it was given as a function."""
        if self._ledger is not None and not isinstance(self._ledger, Ledger):
            opened = self._ledger()
            if opened is None:  # a run that nobody counts
                raise ConfigurationError("the function given as ledger= opened no ledger: let it return one")
            refuse_other_ledger(opened)
            self._ledger = opened
        return self._ledger

    def keep_in(self, ledger: Ledger | None) -> None:
        """From here on the run is kept in this ledger."""
        self._ledger = ledger if self.session.processes.is_first else None

    def begin(self) -> None:
        """Write a new run into its ledger. One of this name that took steps released what this one does not know."""
        ledger = self.ledger
        if ledger is not None and self.account is None:
            used = ledger.steps(self.run_id)
            if used:
                raise LedgerError(
                    f"{ledger.path} knows a run {self.run_id!r} that used {used} steps: resume it from its checkpoint, "
                    "or give this run another run_id"
                )
            self.account = open_account(ledger, self.run_id, self.plan, self.last_step, self._dataset)
        self.watch()

    def watch(self) -> None:
        """Show the releases of a seeded run to its ledger from here on; all processes must call it."""
        self.session.shown_to(witness_of(self.session, self.account))

    def fix_the_end(self) -> None:
        """Note where the run is to end; an end that is moved after it began may have been moved for what was seen."""
        if self.out_of_budget:
            self.last_step = self.planned_steps  # the ledger may have room again
        self.out_of_budget = False
        if self.fixed_end is None:
            self.fixed_end = self.last_step
        elif self.fixed_end != self.last_step:
            self.fixed_end = self.plan.steps

    def covers(self) -> bool:
        """Reserve the next step; False if the budget has no room for it."""
        return self.account is None or self.account.covers(self.step)

    def end_with_the_budget(self) -> None:
        """If the ledger has no room for the next step, the last one was the last."""
        if self.step < self.last_step and not self.covers():
            self.out_of_budget, self.last_step = True, self.step

    def follow(self, turn: Turn) -> None:
        """End where the first process, which has the ledger, says."""
        self.last_step, self.out_of_budget = turn.last_step, turn.out_of_budget

    def agree(self) -> None:
        """Stand where the first process stands."""
        here = [self.step, self.lost_steps, self.jumped_to_the_end]
        step, self.lost_steps, self.jumped_to_the_end = json.loads(
            self.session.processes.text(lambda: json.dumps(here))
        )
        self.session.go_to(step)

    def lose_steps_since(self, step: int) -> None:
        """What was used from this step on broke off: it stays charged, and nothing of it was applied."""
        self.lost_steps += self.step - step
        self.jumped_to_the_end = self.step >= self.last_step

    def ended_at_once(self) -> bool:
        """Whether lost steps were the last ones, so that there is nothing left to take; True once."""
        ended, self.jumped_to_the_end = self.jumped_to_the_end, False
        return ended

    def settle(self) -> None:
        """Give back what was reserved and not used."""
        if self.account is not None:
            self.account.settle(self.step)

    @property
    def planned_steps(self) -> int:
        """The steps that were fixed before the run began: its guarantee holds for all of them, wherever it stops."""
        return self.last_step if self.fixed_end is None else self.fixed_end

    @property
    def charged(self) -> int:
        """How many steps count as used; a seeded run may be repeating some of them."""
        return self.step if self.account is None else max(self.step, self.account.charged)

    def running_epsilon(self) -> float:
        """ε of the steps taken so far, as a display: an upper bound that is at most 2% above it."""
        plan = self.plan
        if self._running is None:
            self._running = RunningEpsilon(plan.events(), plan.delta, plan.accountant)
        return self._running.after(self.step, self.planned_steps)

    def stated_epsilon(self) -> float:
        """The ε to publish if the run ends here, whatever made it end: see `fodp.state.published.stated_epsilon`."""
        budget = None if self.account is None else self.account.budget
        return stated_epsilon(self.plan, self.charged, self.planned_steps, budget)

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about this run's privacy if it ends here."""
        budget = None if self.account is None else self.account.budget
        return privacy_card(self.plan, self.charged, self.planned_steps, budget)

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {
            "run": self.run_id,
            "ledger": None if self.account is None else self.account.position,
            "plan": {**self.plan.to_dict(), "params": dict(self.plan.params)},
            "step": self.step,
            "planned": self.fixed_end,
            "lost_steps": self.lost_steps,
        }

    def noted(self) -> Callable[[str], None] | None:
        """What tells the ledger the digest of a checkpoint of this step."""
        account, step = self.account, self.step
        return None if account is None else lambda digest: account.note_checkpoint(step, digest)

    def refuse_other_ledger(self, saved: dict[str, Any]) -> None:
        """A checkpoint cannot know what was released after it was written. The first process asks the ledger."""
        if not self.session.processes.is_first:
            return
        if saved["ledger"] is not None and self.ledger is not None:
            self.ledger.refuse_stranger(str(saved["run"]), saved["digest"], saved["ledger"])
        elif saved["step"] < self.plan.steps and (self.plan.seed is None or saved["ledger"] is not None):
            raise LedgerError(
                "this run goes on only with its ledger, which knows the steps used after this checkpoint: "
                "train and resume with ledger=fodp.Ledger(file)"
                + ("" if saved["ledger"] is not None else ", or use a seed for research")
            )

    def take_up(self, saved: dict[str, Any]) -> None:
        """Stand where a checkpoint was written, and take up the run's account in the ledger."""
        self.run_id, self.lost_steps = str(saved["run"]), int(saved["lost_steps"])
        self.session.go_to(int(saved["step"]))
        self.fixed_end = saved["planned"]
        self.account = None
        if self.ledger is None:
            return
        self.account = open_account(self.ledger, self.run_id, self.plan, self.last_step, self._dataset)
        if self.account.data_changed and self.plan.seed is not None:
            raise DataError(
                "a seeded run cannot go on with other data, on which it would repeat its noise: start a new run"
            )
        self._skip_lost_steps(self.account)

    def _skip_lost_steps(self, account: Account) -> None:
        """A secure run cannot repeat the steps that were used after its checkpoint: they are lost but stay charged. A
        seeded run repeats them where the ledger knows what each released, and loses them otherwise.

        Where records take turns, it goes on with a whole round of new groups, and the rest of the old one is lost too.
        """
        first = self.step
        used = max(account.charged, first)
        used = max(used, min(self.session.lots.next_round(used), self.last_step))
        if used <= first or (self.plan.seed is not None and account.repeats(first)):
            return
        if self.plan.seed is not None:
            checks.warn(
                f"steps {first} to {used - 1} of this seeded run were charged after the checkpoint was written, and "
                "the ledger does not know what all of them released (the system crashed, the run went on elsewhere, or "
                "an earlier version of fodp made it): they are lost, and the run goes on after them"
            )
        self.lost_steps += used - first
        self.session.go_to(used)
        if used >= self.last_step and self.lost_steps >= used:
            raise LedgerError(
                f"all {used} steps of this run were used, and its only checkpoint is from before the first of them: "
                "the training is lost, and the model is as it was at the beginning. Start a new run; what was used "
                "stays charged"
            )
        self.jumped_to_the_end = used >= self.last_step
