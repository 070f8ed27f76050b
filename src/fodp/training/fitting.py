"""What fits a plan: the optimizer it may drive, and the steps that a target ε allows."""

import torch

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.accounting import rounded_up
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
