"""What fits a plan: the optimizer it may drive, and the steps that a target ε allows."""

import torch

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.accounting import rounded_up
from fodp.budget import RenyiBudget
from fodp.plan import Plan
from fodp.run import Run


def fitting_optimizer(run: Run, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The method's own optimizer, or the given one if it holds exactly the trainable parameters."""
    method = run.plan.algorithm
    if optimizer is None:
        return method.optimizer(run.engine.layout.parameters)
    if method.own_optimizer:
        raise PrivacyError(f"{method.name} is an optimizer of its own: leave optimizer=None and set its params")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PrivacyError("LBFGS evaluates the loss by itself, outside the private release: use SGD or Adam")
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    wanted = {id(p) for p in run.engine.layout.parameters}
    if held - wanted:
        raise PrivacyError("the optimizer holds parameters that are not this model's: build it on model.parameters()")
    if wanted - held:
        missing = [
            n for n, p in zip(run.engine.layout.names, run.engine.layout.parameters, strict=True) if id(p) not in held
        ]
        raise PrivacyError(f"the optimizer lacks the trainable parameter {missing[0]}: add it or freeze it")
    return optimizer


def stated_epsilon(plan: Plan, steps: int, planned: int, budget: RenyiBudget | None) -> float:
    """The one ε to publish of a run that used `steps` steps of the `planned` ones that were fixed before it began.

    Guarantee: the run is (ε, δ)-differentially private with the plan's δ, also if it was stopped because of what was
    seen. A run that stops early shows no more than one that goes on to the end, but where it stops tells something, so
    the first steps' own ε does not hold for it. A budget covers every stop (`fodp.budget.RenyiBudget`).
    """
    if steps >= planned:
        return plan.epsilon(steps=steps)
    whole = plan.epsilon(steps=planned)
    return min(whole, budget.epsilon) if budget is not None and budget.delta <= plan.delta else whole


def steps_within(plan: Plan, target_epsilon: float) -> int:
    """The most steps of the plan whose ε does not exceed the target; refuses if not even one fits."""
    _checks.positive("target_epsilon", target_epsilon)
    if plan.epsilon() <= target_epsilon:
        return plan.steps
    low, high = 0, plan.steps  # ε(low) fits, ε(high) does not
    while high - low > 1:
        middle = (low + high) // 2
        if plan.epsilon(steps=middle) <= target_epsilon:
            low = middle
        else:
            high = middle
    if low == 0:
        raise PrivacyError(
            f"not even one step fits epsilon {target_epsilon:g} (one costs {rounded_up(plan.epsilon(steps=1))}): raise "
            "the noise multiplier or the target"
        )
    return low
