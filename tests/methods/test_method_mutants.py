"""Well-known wrong versions of private optimizers: the suite's checks catch each, and spare the right one beside it.

Every wrong version is registered as a method for its test. "Caught" means: the run is refused, or the events that
were released are not the promised ones, or deleting an example changes more than it may.
"""

from dataclasses import dataclass

import pytest
import torch

import fodp
from fodp.accounting import Event, Phase
from fodp.audit.tape import event_faults
from fodp.methods import METHODS, Method
from fodp.methods.base import DataclassState
from fodp.methods.disk import DiSK
from fodp.methods.dp_adam_ac import DPAdamAC
from fodp.methods.dp_is import DPIS
from fodp.methods.dp_sam import DPSAM
from fodp.methods.dp_sat import DPSAT
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.methods.sa_dpsgd import SADPSGD
from fodp.options.table import known_names
from fodp.queries import Query
from methods_for_tests import delete_one, plan, record, trainer, trajectory
from mutants_for_tests import CleanMemory, MeanOfTheLot, registered, std


def faults(the_plan: fodp.Plan) -> list[str]:
    """Everything that the checks have against a method."""
    try:
        return event_faults(the_plan, record(the_plan)) + delete_one(the_plan)
    except fodp.PrivacyError as refusal:
        return [f"refused: {refusal}"]


class CleanAscent(DPSAM):
    """SAM as usual: ascends along the batch gradient without noise. The example moves everyone's gradient."""

    name = "clean-ascent"

    def step(self, step, state):
        up = step.draw(name="ascent")
        clean = step.gradients(up).clipped_sum(step.clip_norm)
        step.release(clean, std(step) * self.params.ascent_noise)  # charged, and then not used
        lot = step.draw()
        there = step.gradients(lot, at=((1.0, clean.value * (self.params.rho / clean.value.norm())),))
        return step.release(there.clipped_sum(step.clip_norm), std(step))


class CleanAscentNorm(DPSAM):
    """A noisy direction with the length of the clean one: as bad."""

    name = "clean-ascent-norm"

    def step(self, step, state):
        up = step.draw(name="ascent")
        clean = step.gradients(up).clipped_sum(step.clip_norm)
        noisy = step.release(clean, std(step) * self.params.ascent_noise)
        lot = step.draw()
        there = step.gradients(lot, at=((1.0, noisy * (self.params.rho / clean.value.norm())),))
        return step.release(there.clipped_sum(step.clip_norm), std(step))


class AscentUncharged(DPSAM):
    """Both queries released, only the descent promised."""

    name = "ascent-uncharged"

    def events(self, plan):
        return DPSGD.events(self, plan)


class OneLotTwice(DPSAM):
    """Both queries on one lot, counted as two events: one joint event costs more."""

    name = "one-lot-twice"

    def step(self, step, state):
        lot = step.draw()
        a = step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step) * self.params.ascent_noise)
        there = step.gradients(lot, at=((1.0, a * (self.params.rho / a.norm())),))
        return step.release(there.clipped_sum(step.clip_norm), std(step))


@dataclass
class RawNorm(DataclassState):
    clip_norm: float


class RawNormClip(DPSGD):
    """The next clip norm is a quantile of this lot's norms, without noise (DP-Adam-AC as published)."""

    name = "raw-norm-clip"

    def init(self, plan, size):
        return RawNorm(plan.clip_norm)

    def step(self, step, state):
        C, norms = state.clip_norm, []
        lot = step.draw()
        query = step.gradients(lot).sum(bound=C, weight=lambda n: norms.append(n) or torch.ones_like(n))
        state.clip_norm = torch.cat(norms).quantile(0.5).item()
        return step.release(query, step.plan.noise_multiplier * C)


class RawClipRate(DPAdamAC):
    """The learning rate follows the clean count of clipped examples."""

    name = "raw-clip-rate"

    def step(self, step, state):
        lot = step.draw()
        gradients = step.gradients(lot)
        clean = gradients.count(lambda norms: norms <= step.clip_norm).value
        self._steer(state, 0.5 - clean.item() / step.plan.lot_size)
        query = gradients.clipped_sum(step.clip_norm)
        return step.release(query, step.adapt_clip(gradients, query, std(step)))


class CleanNormaliser(DPIS):
    """Releases the noisy normaliser and goes on with the clean one."""

    name = "clean-normaliser"

    def step(self, step, state):
        released = step.release

        def swapped(query, std):
            noisy = released(query, std)
            return query.value if query.is_number else noisy

        step.release = swapped
        return super().step(step, state)


class RateOfTheExpectedLot(DPIS):
    """Accounts importance sampling at b/N instead of the rate at which candidates are drawn."""

    name = "rate-of-the-expected-lot"

    def events(self, plan):
        normaliser = Event(1.0, self.params.normaliser_noise)
        gradient = Event(plan.sampling_rate, plan.noise_multiplier)
        return (Phase((normaliser, gradient), 1), Phase((gradient,), plan.steps - 1))


class RejectedAreFree(SADPSGD):
    """Only accepted proposals count as steps, as in the authors' code."""

    name = "rejected-are-free"

    def accepts(self, session, state):
        accepted = super().accepts(session, state)
        if not accepted:
            session.go_to(session.number - 1)
        return accepted


class ProposesTwice(SADPSGD):
    """Tries again within the step and promises one event."""

    name = "proposes-twice"

    def step(self, step, state):
        super().step(step, state)
        again = step.draw(name="again")
        return step.release(step.gradients(again).clipped_sum(step.clip_norm), std(step))


class PromisesHalf(SADPSGD):
    """Promises events for the proposals that it expects to accept."""

    name = "promises-half"

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps // 2),)


class UnscaledBound(FODPSGD):
    """Mixes two private sums and declares the bound of one."""

    name = "unscaled-bound"

    def step(self, step, memory):
        lot = step.draw()
        s = step.gradients(lot).clipped_sum(step.clip_norm)
        return step.release(Query((s + s).value, self.params.beta * step.clip_norm, lot), std(step))


class CountForFree(DPSGD):
    """Releases the count with its own noise and leaves the sum's as it was."""

    name = "count-for-free"

    def step(self, step, state):
        lot = step.draw()
        gradients = step.gradients(lot)
        step.release(gradients.count(lambda norms: norms <= step.clip_norm), 50.0)
        return step.release(gradients.clipped_sum(step.clip_norm), std(step))


class UncentredCount(DPSGD):
    """Counts 0 or 1 per example and declares the bound of the centred count, ½ (as Opacus's AdaClip)."""

    name = "uncentred-count"
    count_noise = 50.0

    def step(self, step, state):
        lot = step.draw()
        gradients = step.gradients(lot)
        centred = gradients.count(lambda norms: norms <= step.clip_norm)
        count = Query(centred.value + len(lot.indices) / 2, centred.bound, lot)
        step.release(count, self.count_noise)
        rest = (step.plan.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5
        return step.release(gradients.clipped_sum(step.clip_norm), rest * step.clip_norm)


class CentredCount(UncentredCount):
    """The right one beside it."""

    name = "centred-count"

    def step(self, step, state):
        lot = step.draw()
        gradients = step.gradients(lot)
        step.release(gradients.count(lambda norms: norms <= step.clip_norm), self.count_noise)
        rest = (step.plan.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5
        return step.release(gradients.clipped_sum(step.clip_norm), rest * step.clip_norm)


class ClippedSeparately(DiSK):
    """Clips the two gradients each for itself; for c > 1 the combination is longer than C."""

    name = "clipped-separately"

    def step(self, step, state):
        C, theta = step.clip_norm, step.parameters()
        c = (1 - self.params.kappa) / (self.params.kappa * self.params.gamma)
        lot = step.draw()
        here = step.gradients(lot).clipped_sum(C)
        query = here
        if state.point is not None:
            ahead = step.gradients(lot, at=((1.0, self.params.gamma * (theta - state.point)),)).clipped_sum(C)
            query = Query(c * ahead.value + (1 - c) * here.value, C, lot)
        state.point = theta
        return step.release(query, std(step))


class QueryOfTheMean(DPSGD):
    """The same before the noise: the bound then depends on who was drawn."""

    name = "query-of-the-mean"

    def step(self, step, state):
        lot = step.draw()
        share = step.plan.lot_size / max(1, len(lot.indices))
        query = step.gradients(lot).clipped_sum(step.clip_norm) * share
        return step.release(query, std(step) * share)


class CleanPrevious(DPSAT):
    """Ascends along the previous sum before noise."""

    name = "clean-previous"

    def step(self, step, state):
        released = step.release
        clean = []
        step.release = lambda query, std: clean.append(query.value) or released(query, std)
        release = super().step(step, state)
        state.ascent = clean[0] * (self.params.rho / clean[0].norm())
        return release


class SkipsSmallLots(DPSGD):
    """Takes no step when few examples were drawn."""

    name = "skips-small-lots"

    def step(self, step, state):
        lot = step.draw()
        if len(lot.indices) < 12:
            return torch.zeros_like(step.parameters())
        return step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step))


class NoiseByLot(DPSGD):
    """The noise shrinks with the lot that was drawn."""

    name = "noise-by-lot"

    def step(self, step, state):
        lot = step.draw()
        less = len(lot.indices) / len(step.parameters())
        return step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step) * less)


@dataclass(frozen=True)
class Pair:
    """A wrong version, what the checks say of it, and a right one that they have nothing against."""

    wrong: type[Method]
    says: str
    right: str | type[Method]
    params: dict
    noise: float = 1.0

    def __str__(self) -> str:
        return self.wrong.name


PAIRS = [
    Pair(CleanAscent, "moved by", "dp-sam", dict(rho=1.0)),
    Pair(CleanAscentNorm, "moved by", "dp-sam", dict(rho=1.0)),
    Pair(AscentUncharged, "promised", "dp-sam", {}),
    Pair(OneLotTwice, "promised", "dp-sam", {}),
    Pair(RawNormClip, "bound", "dp-sgd", {}),
    Pair(RawClipRate, "state", "dp-adam-ac", dict(count_noise=50.0)),
    Pair(CleanNormaliser, "rate", "dp-is", {}),
    Pair(RateOfTheExpectedLot, "promised", "dp-is", dict(normaliser_noise=0.1)),
    Pair(RejectedAreFree, "events were emitted", "sa-dpsgd", dict(k=1e9, lr=5.0)),
    Pair(ProposesTwice, "promised", "sa-dpsgd", {}),
    Pair(PromisesHalf, "promises events for 3 steps of a plan of 6", "sa-dpsgd", {}),
    Pair(CleanMemory, "moved by", "fo-dp-sgd", dict(beta=0.5)),
    Pair(UnscaledBound, "moved by", "fo-dp-sgd", dict(beta=0.5)),
    Pair(CountForFree, "promised", CentredCount, {}),
    Pair(UncentredCount, "moved by 1, declared bound 0.5", CentredCount, {}),
    Pair(ClippedSeparately, "moved by", "disk", dict(kappa=0.2, gamma=0.5), noise=0.3),
    Pair(MeanOfTheLot, "parameters", "dp-sgd", {}),
    Pair(QueryOfTheMean, "bound", "dp-sgd", {}),
    Pair(CleanPrevious, "moved by", "dp-sat", dict(rho=1.0)),
    Pair(SkipsSmallLots, "promised", "dp-sgd", {}),
    Pair(NoiseByLot, "promised", "dp-sgd", {}),
]


def small(method: str, pair: Pair) -> fodp.Plan:
    known = {*METHODS[method].Params().__dict__, *known_names()}
    params = {name: value for name, value in pair.params.items() if name in known}
    return plan(method, params, sampling_rate=0.5, steps=6, noise_multiplier=pair.noise)


@pytest.mark.rule(3)
@pytest.mark.rule(6)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_wrong_version_is_caught_and_the_right_one_is_not(pair):
    with registered(pair.wrong):
        found = faults(small(pair.wrong.name, pair))
        assert any(pair.says in fault for fault in found), found[:5]
    if isinstance(pair.right, str):
        assert faults(small(pair.right, pair)) == []
    else:
        with registered(pair.right):
            assert faults(small(pair.right.name, pair)) == []


@pytest.mark.rule(11)
def test_outside_research_mode_an_uncharged_step_is_refused_at_once():
    """Secure streams give no step's noise twice, so a step that was not counted cannot be taken again."""
    with registered(RejectedAreFree):
        secure = plan(RejectedAreFree.name, dict(k=1e9, lr=5.0), seed=None, steps=30, noise_multiplier=2.0)
        with pytest.raises(fodp.PrivacyError, match="already drawn up to step"):
            trajectory(trainer(secure))
