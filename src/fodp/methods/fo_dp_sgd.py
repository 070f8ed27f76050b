"""FO-DP-SGD, Algorithm 1 of "Deep Learning under Fractional-Order Differential Privacy"."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fodp.accounting import Event, Phase
from fodp.errors import ConfigurationError
from fodp.memory import FractionalMemory, noise_floor
from fodp.memory.exponentials import ExponentialSumMemory
from fodp.memory.window import WindowMemory
from fodp.methods.base import Method
from fodp.options import schedule
from fodp.options.filter import feedback_gains, feedback_response
from fodp.options.option import refuse_unused
from fodp.options.schedule import Schedule
from fodp.step import PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class FODPSGDParams:
    """Public parameters of FO-DP-SGD; β, α and K as in the paper, the others it leaves open.

    `fodp.FractionalMemory` gives the reasons for λ, τ, γ and eps. κ and ζ default (None) to the norm
    which the EMA trend has on pure noise: a trend no longer than that carries no confidence.
    β may be a schedule of (first step, β) pairs.

    `compact='exponentials'` makes the memory smaller and changes neither sensitivity nor events: it needs `tau=0` and
    keeps a few vectors whatever the window, with weights that are off by at most `compact_error` in all.
    """

    beta: Schedule = 0.9
    alpha: float = 0.8
    window: int = 8
    lam: float = 0.05
    tau: float = 0.1
    gamma: float = 0.1
    kappa: float | None = None
    zeta: float | None = None
    eps: float = 1e-12
    compact: str | None = None
    compact_error: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", schedule.checked("beta", self.beta, checks.fraction))
        if self.compact is not None:
            checks.one_of("compact", self.compact, ("exponentials",))
        if self.compact == "exponentials" and self.tau != 0:
            raise ConfigurationError(f"compact='exponentials' needs a fixed kernel: set tau=0, got {self.tau!r}")
        checks.open_fraction("compact_error", self.compact_error)
        self.memory(floor=1.0)  # checks the ranges of all the rest
        refuse_unused(self, self.compact == "exponentials", "compact='exponentials'", "compact_error")
        refuse_unused(self, self.tau > 0, "a tau above 0", "gamma", "kappa", "zeta", "eps")

    def memory(self, floor: float) -> WindowMemory:
        """A fresh memory with these settings."""
        exact = FractionalMemory(
            self.alpha,
            self.window,
            lam=self.lam,
            tau=self.tau,
            gamma=self.gamma,
            kappa=floor if self.kappa is None else self.kappa,
            zeta=floor if self.zeta is None else self.zeta,
            eps=self.eps,
        )
        if self.compact == "exponentials":
            return ExponentialSumMemory(self.alpha, self.window, lam=self.lam, tolerance=self.compact_error)
        return exact


class FODPSGD(Method):
    """The release mixes the clipped sum with a fractional memory u of earlier private releases:

    s̃_t = β·s_t + (1-β)·u_{t-1} + N(0, σ²C²·I).

    Given the earlier releases, one example can move this by at most βC, so a step is one
    Poisson-subsampled Gaussian event (q, σ/β). It is exactly DP-SGD at σ/β followed by a feedback
    filter (see docs/mechanism.md): compare the two at equal ε, not at equal σ.
    """

    name = "fo-dp-sgd"
    summary = "The paper's method: fractional, tempered memory of earlier releases in the query."
    reference = "Partohaghighi & Marcia, Deep Learning under Fractional-Order Differential Privacy"
    noise_meaning = "the paper's σ: noise std over C; the event's multiplier is σ/β"
    advice = "To study the paper's method; at equal ε it is DP-SGD with a low-pass filter."
    correlates_noise = True
    Params: ClassVar[type[Any]] = FODPSGDParams

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return super().in_short(steps, of) | {"beta": schedule.in_short(self.params.beta, steps, of)}

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        """(q, σ/β) every step, in pieces where β has a schedule."""
        return tuple(
            Phase((Event(plan.sampling_rate, plan.noise_multiplier / beta),), steps)
            for beta, steps in schedule.pieces(self.params.beta, plan.steps)
        )

    def init(self, plan: PublicNumbers, size: int) -> WindowMemory:
        """An empty memory, on the scale of the noise it will see."""
        return self.params.memory(noise_floor(plan.noise_multiplier * plan.clip_norm, size, self.params.gamma))

    def step(self, step: Step, memory: WindowMemory) -> Tensor:
        """One turn of Algorithm 1's loop; the optimizer then takes s̃_t / L."""
        C, sigma = step.clip_norm, step.plan.noise_multiplier
        beta = schedule.value_at(self.params.beta, step.number)

        # βs + (1-β)u + noise is one sum: (1-β)u knows earlier releases alone, so adding it to the release of βs, whose
        # bound is βC, is post-processing, and neither the sum nor the event depends on which addition comes first.
        lot = step.draw()  # line 3: m_i ~ Bernoulli(q)
        gradients = step.gradients(lot)
        r = beta * gradients.clipped_sum(C)  # lines 4, 16: β·s_t, sensitivity βC
        std = step.adapt_clip(
            gradients, r, std=sigma * C
        )  # σC; with a quantile, which the paper has not, a little more
        fresh = step.release(r, std)  # line 18: β·s_t + N(0, σ²C²)
        release = memory.mix_in_(fresh, 1 - beta)  # lines 5 to 16, 20 to 25: s̃_t = … + (1-β)·u_{t-1}, remembered
        return release  # line 19: divided by the public L, given to the optimizer

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """What the feedback lets through, as shares of all that it adds up to (at the first β, with a full window)."""
        memory = self.init(plan, 1)
        answer = feedback_response(schedule.value_at(self.params.beta, 0), memory.weights_when_full())
        return [value / sum(answer) for value in answer]

    def step_noise(self, plan: PublicNumbers, step: int) -> float:
        """In all it is that of DP-SGD at σ/β (docs/mechanism.md)."""
        return plan.clip_norm * plan.noise_multiplier / schedule.value_at(self.params.beta, step)

    def noise_gains(self, memory: WindowMemory) -> Sequence[float]:
        """What the feedback of earlier releases makes of the noise, at the memory's present weights."""
        return feedback_gains(schedule.value_at(self.params.beta, max(0, memory.written - 1)), memory.weights)
