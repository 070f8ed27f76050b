"""The suite for other people's methods has nothing against right ones, and finds what is wrong with wrong ones."""

from dataclasses import dataclass

import pytest
import torch

import fodp
from fodp import testing
from fodp.accounting import Event, Phase
from fodp.methods import METHODS
from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.queries import Query
from mutants_for_tests import CleanMemory, MeanOfTheLot, std

EVENTS = "what is released is what was promised"
BOUNDS = "deleting an example moves queries within their bounds and nothing else"


class SignSGD(fodp.Method):
    """Only the sign of the release is used: post-processing."""

    name = "dp-sign-sgd"
    summary = reference = noise_meaning = "for this test"

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps),)

    def step(self, step, state):
        lot = step.draw()
        gradients = step.gradients(lot)
        query = gradients.clipped_sum(step.clip_norm)
        return step.release(query, step.adapt_clip(gradients, query, std(step))).sign()


class NoiseForgotten(SignSGD):
    """Makes the release and goes on with the sum."""

    name = "noise-forgotten"

    def step(self, step, state):
        lot = step.draw()
        query = step.gradients(lot).clipped_sum(step.clip_norm)
        step.release(query, std(step))
        return query.value


class NothingReleased(SignSGD):
    """Does not even make the release."""

    name = "nothing-released"

    def step(self, step, state):
        return step.gradients(step.draw()).clipped_sum(step.clip_norm).value


class BoundUnderstated(SignSGD):
    """Counts every example twice and says once."""

    name = "bound-understated"

    def step(self, step, state):
        lot = step.draw()
        twice = 2 * step.gradients(lot).clipped_sum(step.clip_norm)
        return step.release(Query(twice.value, step.clip_norm, lot), std(step))


@dataclass
class Kept(DataclassState):
    """A state that a checkpoint does not get."""

    velocity: torch.Tensor | None = None

    def state_dict(self):
        return {"velocity": None}


class StateNotSaved(DPSGD):
    """Heavy ball by hand, whose velocity is lost when the run is resumed."""

    name = "state-not-saved"

    def init(self, plan, size):
        return Kept()

    def step(self, step, state):
        release = super().step(step, state)
        state.velocity = release if state.velocity is None else 0.9 * state.velocity + release
        return state.velocity.clone()


class SkipsEmptyLots(SignSGD):
    """Takes no step where nobody was drawn."""

    name = "skips-empty-lots"

    def step(self, step, state):
        lot = step.draw()
        if not len(lot.indices):
            return torch.zeros_like(step.parameters())
        return step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step))


class ForgetsToAdapt(SignSGD):
    """Leaves the clip norm as it is where a quantile is set."""

    name = "forgets-to-adapt"

    def step(self, step, state):
        lot = step.draw()
        return step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step)).sign()


class NamesADrawTwice(SignSGD):
    """Draws two lots under one name, of which a secure stream gives one."""

    name = "names-a-draw-twice"

    def step(self, step, state):
        step.uniform(3, "coin")
        step.uniform(3, "coin")
        return super().step(step, state)


class OwnGenerator(SignSGD):
    """Adds numbers of PyTorch's generator, which no checkpoint holds."""

    name = "own-generator"

    def step(self, step, state):
        return super().step(step, state) + torch.randn(())


class PromisesTooLittle(SignSGD):
    """States twice the noise that it adds."""

    name = "promises-too-little"

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, 2 * plan.noise_multiplier),), plan.steps),)


@dataclass(frozen=True, kw_only=True)
class Careless:
    """Nobody looks at `strength`."""

    strength: float = 1.0


class UncheckedParameter(SignSGD):
    """Takes any strength."""

    name = "unchecked-parameter"
    Params = Careless


class FixedRate(SignSGD):
    """Moves the weights by itself, whatever the learning rate is scheduled to."""

    name = "fixed-rate"

    def tune(self, optimizer, session, state):
        for group in optimizer.param_groups:
            group["lr"] = 0.1


WRONG = [
    (NoiseForgotten, BOUNDS, "parameters after step 0 differs"),
    (NothingReleased, EVENTS, "promised"),
    (BoundUnderstated, BOUNDS, "declared bound 1"),
    (CleanMemory, BOUNDS, "moved by"),
    (MeanOfTheLot, BOUNDS, "parameters"),
    (StateNotSaved, "a run resumed in the middle goes on bit for bit", "is all state in state_dict?"),
    (OwnGenerator, "a run resumed in the middle goes on bit for bit", "the parameters of a resumed run"),
    (SkipsEmptyLots, "empty lots are noise only, finite and counted", "promised"),
    (ForgetsToAdapt, "also with adaptive clipping, a filter and AdamW", "does not adapt the clip norm"),
    (NamesADrawTwice, "a secure run draws everything once and never repeats", "already drawn"),
    (PromisesTooLittle, EVENTS, "promised"),
    (UncheckedParameter, "parameters that are unknown or no numbers are refused by name", "strength=nan is taken"),
    (FixedRate, "a learning rate of zero by schedule stops the model", "set the learning rate to zero"),
]


@pytest.mark.rule(3)
@pytest.mark.parametrize(("wrong", "check", "says"), WRONG, ids=lambda each: getattr(each, "name", None))
def test_a_wrong_method_is_found(wrong, check, says):
    found = testing.faults(check, wrong)
    assert any(says in fault for fault in found), found[:5]


def test_a_method_of_ones_own_passes_and_the_report_says_what():
    report = testing.check_method(SignSGD, lr=0.01)
    assert (report.method, report.params) == ("dp-sign-sgd", {"lr": 0.01})
    assert list(report.seconds) == list(testing.CHECKS)
    assert str(report).startswith("dp-sign-sgd lr=0.01: passed 15 checks in ")
    assert "dp-sign-sgd" not in METHODS  # as it was


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(AssertionError, match="noise-forgotten does not keep") as found:
        testing.check_method(NoiseForgotten)
    assert "accuracy is" in str(found.value)  # it learns under any noise
    assert BOUNDS in str(found.value)


def test_parameters_reach_the_method():
    assert testing.faults(EVENTS, FODPSGD, beta=0.5) == []
    assert testing.faults(EVENTS, FODPSGD, beta=2.0)[0].startswith("the run was refused: beta")


def test_a_name_that_is_taken_is_refused():
    class Another(SignSGD):
        """Not the one in the table."""

        name = "dp-sgd"

    with pytest.raises(fodp.PrivacyError, match="in the table already"):
        testing.check_method(Another)
