"""DP-IS: importance sampling in rejection form, with a public cap on the rate and a noisy normaliser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fodp.accounting import Event, Phase
from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.step import PublicNumbers, Step
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.sampling import Lot


@dataclass(frozen=True, kw_only=True)
class DPISParams:
    """How often and how noisily the normaliser is refreshed, and the cap on the candidate rate.

    normaliser_noise: σ_K; the refreshed normaliser has noise σ_K·C.
    refresh: steps between refreshes, 250 or more (each reads all the data).
    rate_cap: the most candidates are drawn at, as a multiple of the plan's sampling rate.
    """

    normaliser_noise: float = 50.0
    refresh: int = 250
    rate_cap: float = 1.5

    def __post_init__(self) -> None:
        checks.positive("normaliser_noise", self.normaliser_noise)
        checks.whole("refresh", self.refresh, minimum=250)
        checks.positive("rate_cap", self.rate_cap)


@dataclass
class DPISState(DataclassState):
    """The released normaliser K̃, and the plan's sampling rate."""

    normaliser: float | None
    rate: float


class DPIS(DPSGD):
    """Keep an example with probability proportional to its clipped norm; each kept one weighs the same.

    Every `refresh` steps K̃ = Σ min(‖g_i‖, C) + N(0, (σ_K·C)²) over all the data: event (1, σ_K). In each step
    candidates are drawn at rate q_t = bC/K̃ ≤ q_max, kept with probability ‖clip(g_i)‖/C, and contribute
    (K̃/b)·g_i/‖g_i‖, so the sum is unbiased for Σ clip(g_i) over all the data whatever K̃ is: event (q_max, σ).

    The event's rate is the cap, not b/N: the differing example may be drawn with probability up to q_t. The
    rejection is done inside the query; the bound K̃/b holds for every outcome of it.

    A reconstruction: the paper's body and code could not be read; idea and citation are theirs, this
    pseudo-code, its constants and its accounting are ours.
    """

    name = "dp-is"
    summary = "Importance sampling by gradient norm, in rejection form with honest events."
    reference = "Wei, Bao, Xiao & Yang, DPIS, CCS 2022"
    noise_meaning = "σ of the gradient query; the normaliser's σ_K is fixed"
    queries = "1, and 1 on all the data every `refresh` steps"
    cost = "one gradient, and a pass over all norms every `refresh` steps"
    advice = "To study importance sampling; it equals DP-SGD at a larger rate with more sampling noise."
    reconstruction = "pseudo-code and constants: the paper's body could not be read"
    weighs_by_norm = True
    Params = DPISParams

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        """A refresh with the first step of every block, gradients at the cap otherwise."""
        gradient = Event(self._cap(plan), plan.noise_multiplier)
        normaliser = Event(1.0, self.params.normaliser_noise)
        phases: list[Phase] = []
        for start in range(0, plan.steps, self.params.refresh):
            phases.append(Phase((normaliser, gradient), 1))
            rest = min(self.params.refresh, plan.steps - start) - 1
            if rest:
                phases.append(Phase((gradient,), rest))
        return tuple(phases)

    def init(self, plan: PublicNumbers, size: int) -> DPISState:
        return DPISState(normaliser=None, rate=plan.sampling_rate)

    def step(self, step: Step, state: DPISState) -> Tensor:
        """Refresh K̃ if it is time; candidates, rejection, release."""
        plan, b, cap = step.plan, step.plan.lot_size, self._cap(step.plan)
        C = float(step.clip_norm)  # the rate of the lot follows it, and lots are drawn on the host
        if step.number % self.params.refresh == 0:
            everyone = step.draw(rate=1.0, name="normaliser")
            norms = step.gradients(everyone).norm_sum(C)
            state.normaliser = float(step.release(norms, std=self.params.normaliser_noise * C))
        # The floor keeps q_t at or below its public cap; an adapted C may have grown since the last refresh. A run
        # that lost its first refresh to a crash has no K̃ and lives on the floor until the next.
        normaliser = max(state.normaliser or 0.0, b * C / cap)
        weight = normaliser / b
        lot = step.draw(rate=min(cap, b * C / normaliser))
        gradients = step.gradients(lot)
        kept = gradients.sum(weight=self._rejection(step, lot, C, weight), bound=weight)
        std = step.adapt_clip(gradients, kept, std=plan.noise_multiplier * weight)
        release = step.release(kept, std)
        # The optimizer divides by L = b; this sum estimates all N = L/q examples, so it is divided by N in all.
        return release.mul_(plan.sampling_rate)

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """That of its least sampling rate, when every gradient is as long as C: at most `rate_cap` times too much."""
        return (1.0,)

    def noise_gains(self, state: DPISState) -> Sequence[float]:
        """The release is scaled by q, which is public; the run knows the rest."""
        return (state.rate**2,)

    def _cap(self, plan: PublicNumbers) -> float:
        return min(1.0, plan.sampling_rate * self.params.rate_cap)

    def _rejection(self, step: Step, lot: "Lot", C: float, weight: float) -> Callable[[Tensor], Tensor]:
        """Weights (K̃/b)/‖g_i‖ of the kept, 0 of the others; each example has its own uniform number."""
        thresholds = lot.own(step.uniform(lot.count, "keep")) * C
        used = 0

        def weights(norms: Tensor) -> Tensor:
            nonlocal used
            keep = thresholds[used : used + len(norms)].to(norms) < norms  # with probability min(1, ‖g_i‖/C)
            used += len(norms)
            return norms.reciprocal_().mul_(weight).mul_(keep)  # a norm of zero is not kept; 0·∞ counts as zero

        return weights
