"""The guarantee of a plan in plain English, wherever a number is shown."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fodp import accounting
from fodp.accounting import Phase, rounded_up

if TYPE_CHECKING:
    from fodp.plan import Plan

_ACCOUNTANTS = {
    "pld": "privacy loss distributions (tight, dp-accounting)",
    "rdp": "Rényi DP with the tight conversion (dp-accounting)",
    "rdp-classic": "Rényi DP with the classic conversion (the paper's formula)",
}


def statement(plan: "Plan", *, steps: int | None = None, epsilon: float | None = None) -> str:
    """What the plan promises, to whom, under which assumptions, and what it leaves out.

    `steps` is where the run was fixed beforehand to end, the plan's own end unless given; `epsilon` a smaller ε that
    a budget guarantees.
    """
    steps = plan.steps if steps is None else steps
    phases = accounting.truncate(plan.events(), steps)
    epsilon = plan.epsilon(steps=steps) if epsilon is None else epsilon
    pair = accounting.epsilon_for_group(phases, plan.delta, 2)
    replace = accounting.epsilon_replace_one(phases, plan.delta)
    randomness = (
        "Randomness: secure. Masks and noise come from operating-system entropy; no key is recorded."
        if plan.seed is None
        else "Randomness: SEEDED, a research mode. Whoever knows the seed can subtract the noise "
        "and learn who took part: against them there is no guarantee at all. The seed must not be used for a second "
        "run, on this or other data: whoever sees both subtracts the noise without knowing the seed."
    )
    unprotected = (
        "timing attacks; rounding inside the model's passes (the noise itself is exact, on a grid)"
        if plan.exact_noise
        else "floating-point and timing attacks"
    )
    lines = [
        f"This run is ({rounded_up(epsilon)}, {rounded_up(plan.delta, 6)})-differentially private.",
        "Unit: one training example. Adjacency: add or remove one example.",
        f"Mechanism: {plan.method}, {steps} steps; each example joins a lot independently (Poisson sampling) "
        f"with {_rates(phases)}, its gradient is clipped to norm {plan.clip_norm:g}, "
        f"noise multiplier {plan.noise_multiplier:.6g}.",
        f"Accountant: {_ACCOUNTANTS[plan.accountant]}.",
        randomness,
        "It holds against someone who sees every private release, and so the model after every step.",
        f"A person with 2 examples in the data: epsilon {rounded_up(pair)} at the same delta; with k examples, more.",
        f"Replacing one example instead of adding or removing it: epsilon {rounded_up(replace)} at the same delta.",
        "Not covered: the choice of hyper-parameters if it was made by looking at this data; scores on data that "
        "is itself private; other runs on the same data (their budgets add up); "
        "random numbers that the model, loss, data set or augmentation takes from generators of their own; "
        f"{unprotected}; the public numbers of the plan (sampling rate, lot size, steps, classes), which must not "
        "come from the data.",
    ]
    return "\n".join(lines)


def _rates(phases: Sequence[Phase]) -> str:
    """The chances that the events are accounted with: they, and not the plan's rate, are what is claimed."""
    lots: Counter[float] = Counter()
    for phase in phases:
        for event in phase.events:
            lots[event.sampling_rate] += phase.steps
    shown = [f"at most {rounded_up(rate, 6)} ({count} lots)" for rate, count in sorted(lots.items()) if count]
    if len(shown) == 1:
        return "probability " + shown[0].removeprefix("at most ")
    if len(shown) > 4:
        return f"probabilities from {rounded_up(min(lots), 6)} to {rounded_up(max(lots), 6)} ({lots.total()} lots)"
    return "probability " + ", ".join(shown[:-1]) + " and " + shown[-1]
