"""SA-DPSGD: DP-SGD whose updates are proposals, accepted by simulated annealing on a public score."""

import math
from dataclasses import dataclass

from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.step import Known, PublicNumbers
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class SADPSGDParams:
    """`k` cools the annealing; after `patience` rejections in a row the next proposal is taken anyway."""

    k: float = 10.0
    patience: int = 5

    def __post_init__(self) -> None:
        checks.at_least_zero("k", self.k)
        checks.whole("patience", self.patience, minimum=0)


@dataclass
class AnnealingState(DataclassState):
    """The public loss at the last accepted proposal, and how many were accepted in all and rejected since."""

    energy: float | None = None
    accepted: int = 0
    rejected: int = 0


class SADPSGD(DPSGD):
    """Accept if the loss on public data fell, else with probability exp(-ΔE·k·t), t accepted so far.

    Every proposal is charged, accepted or not: one event (q, σ) per step. Charging accepted ones only, as the
    authors' code does, is not justified. The score must come from data declared public (a held-out split, never
    the test set); on private data it would be another query. A rejected proposal is undone in the model and the
    optimizer, momentum included; a filter keeps what it has seen, which was released.
    """

    name = "sa-dpsgd"
    summary = "Proposals accepted or undone by simulated annealing on a public score."
    reference = "Fu, Chen & Ling, SA-DPSGD, arXiv 2211.07218"
    noise_meaning = "σ: noise std over C, and the event's multiplier, of every proposal"
    cost = "one gradient and one public score"
    advice = "Only with a public held-out split; rejected proposals are paid for."
    owns_optimizer = True
    has_acceptance_test = True
    Params = SADPSGDParams

    def init(self, plan: PublicNumbers, size: int) -> AnnealingState:
        return AnnealingState()

    def accepts(self, session: Known, state: AnnealingState) -> bool:
        """Score the proposal; remember what was decided."""
        energy = session.public_score()
        if not self._takes(session, state, energy):
            state.rejected += 1
            return False
        state.energy, state.accepted, state.rejected = energy, state.accepted + 1, 0
        return True

    def _takes(self, session: Known, state: AnnealingState, energy: float) -> bool:
        if state.energy is None or state.rejected >= self.params.patience:
            return True
        rise = energy - state.energy
        if not rise > 0:
            return not math.isnan(rise)
        chance = math.exp(-rise * self.params.k * state.accepted)
        return float(session.uniform(1, "accept")[0]) < chance
