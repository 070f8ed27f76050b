"""What fits a plan: the optimizer it may drive, and the steps that a target ε allows."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fodp import _checks
from fodp._checks import BudgetError, ConfigurationError
from fodp.accounting import rounded_up
from fodp.accounting.budget import RenyiBudget
from fodp.clipping.maps import Factor, mapped_length
from fodp.methods import Method
from fodp.options.option import numbers
from fodp.options.rate import AGREEMENT, automatic_rate, relative_noise
from fodp.options.rate_rules import FollowedTranscript
from fodp.plan import Plan
from fodp.run import Run

PLANNED = "planned_lr"  # the rate of a schedule's factor 1, in the optimizer's groups


def fitting_optimizer(run: Run, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The method's own optimizer, or the given one if it holds exactly the trainable parameters."""
    method = run.plan.algorithm
    if optimizer is None:
        made = method.optimizer(run.trained)
        rate = _automatic_rate(run) if method.options.rate.is_automatic else None
        for group in made.param_groups:
            group["lr"] = group["lr"] if rate is None else rate
            if _moves(run):
                group[PLANNED] = group["lr"]  # beside the optimizer's own numbers, and in checkpoints with them
        return made
    if method.owns_optimizer:
        raise ConfigurationError(f"{method.name} is an optimizer of its own: leave optimizer=None and set its params")
    _refuse_what_would_not_act(method)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates the loss by itself, outside the private release: use SGD or Adam")
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    wanted = {id(p) for p in run.trained}
    if held - wanted:
        raise ConfigurationError(
            "the optimizer holds parameters that are not this model's: build it on model.parameters()"
        )
    if wanted - held:
        missing = [n for n, p in zip(run.engine.layout.names, run.trained, strict=True) if id(p) not in held]
        raise ConfigurationError(f"the optimizer lacks the trainable parameter {missing[0]}: add it or freeze it")
    return optimizer


def refuse_plateau(scheduler: Any, otherwise: str) -> None:
    """Raise for a scheduler that wants a score: in training there is none that no record is in."""
    if any(isinstance(part, ReduceLROnPlateau) for part in (scheduler, *getattr(scheduler, "_schedulers", ()))):
        raise ConfigurationError(
            "ReduceLROnPlateau wants a score at every step, and there is none to give it: use a scheduler "
            f"of the step alone (StepLR, CosineAnnealingLR), or {otherwise}"
        )


def set_rate(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Before an update: the rate of the step that was just taken, where the method's own optimizer has a schedule.

    Public numbers, and with a rate rule the releases themselves, which are in `.grad` now. With lr="auto" and a
    quantile the gradient is scaled by C/C_t, made of releases, so that its noise is that of the plan's clip norm: on
    the device, which may be the only one to know C_t.
    """
    if not _moves(run) or any(PLANNED not in group for group in optimizer.param_groups):
        return  # a constant rate, or an optimizer of the user's
    factor = run.method.options.rate.at(run.step - 1, run.plan.steps)
    if run.followed is not None:
        factor *= run.ranks.number(partial(_followed, run, run.followed, run.take_fresh()))
    for group in optimizer.param_groups:
        group["lr"] = group[PLANNED] * factor
        if _follows_clip(run):
            relative = run.plan.clip_norm / run.last_clip_norm
            for parameter in group["params"]:
                parameter.grad.mul_(relative)


def _followed(run: Run, rule: FollowedTranscript, fresh: tuple[Tensor, float] | None) -> float:
    """What a rate rule makes of the release of the step."""
    if fresh is None:  # of numbers alone: there is no way to compare them with
        return 1.0
    layout, (release, std) = run.engine.layout, fresh
    deviations = [partial(_along, std, run.noise_factor(p)) for p in layout.parameters]
    return rule.factor(layout.parameters, layout.views(release), deviations)


def _along(std: float, factor: Factor, way: Tensor) -> float:
    """The standard deviation of a way's product with noise that came back by this factor."""
    return std * mapped_length(factor, way)


def _moves(run: Run) -> bool:
    return run.method.options.rate.acts or _follows_clip(run)


def _follows_clip(run: Run) -> bool:
    """Plain steps of lr="auto" are measured by their noise, which an adapted clip norm changes; Adam's are anyway."""
    options = run.method.options
    return options.rate.is_automatic and run.adaptive_clip is not None and options.update.is_plain


def _automatic_rate(run: Run) -> float:
    """From the plan's numbers and the model as it is now, before the run: a checkpoint brings its own rate along."""
    method, plan = run.method, run.plan
    options = method.options
    response = method.known_response(plan)
    if options.filter is not None:
        response = np.convolve(response, options.filter.response()).tolist()
    deviations = np.asarray(method.step_noises(plan)) / plan.lot_size
    if run.adaptive_clip is not None:  # the count takes its share of what a step may spend
        z = plan.events_at(0)[-1].noise_multiplier
        deviations = deviations * run.adaptive_clip.rest(z) / z
    schedules = options.schedules
    clips = [plan.clip_norm if schedules is None else schedules.at(plan, step).clip_norm for step in range(plan.steps)]
    signal = AGREEMENT * np.asarray(clips) / math.sqrt(run.engine.layout.size)
    walk = options.update.noise_walk(deviations, response, options.rate.factors(plan.steps), signal)
    shares = [run.noise_share(parameter) if options.update.is_plain else 1.0 for parameter in run.trained]
    with run.whole():
        relative = relative_noise(zip(run.engine.layout.parameters, shares, strict=True))
    return automatic_rate(options.rate.auto_ratio, walk, relative)


def _refuse_what_would_not_act(method: Method) -> None:
    """Raise for a learning rate in the plan beside an optimizer with its own: it would be recorded and never used."""
    usual = numbers(method.from_dict({}).options.rate)
    for name, value in numbers(method.options.rate).items():
        if value != usual[name]:
            raise ConfigurationError(
                f"params set {name}={value!r}, which does nothing beside an optimizer of your own: set it there and "
                "leave it out of params, or leave optimizer=None"
            )


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
        raise BudgetError(
            f"not even one step fits epsilon {target_epsilon:g} (one costs {rounded_up(plan.epsilon(steps=1))}): raise "
            "the noise multiplier or the target"
        )
    return low
