"""What may be published of a run's privacy: one ε, and a card."""

from typing import Any

from fodp.accounting.budget import RenyiBudget
from fodp.plan import Plan


def stated_epsilon(plan: Plan, steps: int, planned: int, budget: RenyiBudget | None) -> float:
    """The one ε to publish of a run that used `steps` steps of the `planned` ones that were fixed before it began.

    Guarantee: the run is (ε, δ)-differentially private with the plan's δ, also if it was stopped because of what was
    seen. A run that stops early shows no more than one that goes on to the end, but where it stops tells something, so
    the first steps' own ε does not hold for it. A budget covers every stop (`fodp.accounting.budget.RenyiBudget`).
    """
    if steps >= planned:
        return plan.epsilon(steps=steps)
    whole = plan.epsilon(steps=planned)
    return min(whole, budget.epsilon) if budget is not None and budget.delta <= plan.delta else whole


def privacy_card(plan: Plan, steps: int, planned: int, budget: RenyiBudget | None = None) -> dict[str, Any]:
    """What a reader of the model needs to know about its privacy, with one ε; the seed is not among it.

    The run used `steps` steps; `planned` were fixed before it began, and hold for a run that was stopped early.
    """
    epsilon = stated_epsilon(plan, steps, planned, budget)
    return {
        "epsilon": epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "method": plan.method,
        "params": dict(plan.params),
        "sampling_rate": plan.sampling_rate,
        "steps": steps,
        "clip_norm": plan.clip_norm,
        "noise_multiplier": plan.noise_multiplier,
        "unit": plan.unit_in_words(),
        **({"records_per_person": plan.records_per_person} if plan.unit == "person" else {}),
        "randomness": "secure"
        if plan.seed is None
        else "seeded research run: no guarantee against holders of the seed",
        "statement": plan.statement(steps=max(steps, planned), epsilon=epsilon),
    }
