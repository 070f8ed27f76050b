"""What fits a plan: the optimizer it may drive, and the steps that a target ε allows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fodp.accounting import rounded_up
from fodp.clipping.maps import Factor, mapped_length
from fodp.errors import BudgetError, ConfigurationError
from fodp.options.rate import AGREEMENT, automatic_rate, relative_noise
from fodp.options.rate_rules import FollowedTranscript
from fodp.plan import Plan, warn_of_large_rates
from fodp.session import Session
from fodp.support import checks

PLANNED = "planned_lr"  # the rate of a schedule's factor 1, in the optimizer's groups


def fitting_optimizer(session: Session, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The method's own optimizer, or the given one if it holds exactly the trainable parameters."""
    method = session.plan.algorithm
    if optimizer is None:
        made = method.optimizer(session.source.layout.parameters)
        rate = _automatic_rate(session) if method.options.rate.is_automatic else None
        for group in made.param_groups:
            group["lr"] = group["lr"] if rate is None else rate
            if moves_rate(session):
                group[PLANNED] = group["lr"]  # beside the optimizer's own numbers, and in checkpoints with them
        return made
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigurationError(
            f"optimizer must be a torch.optim optimizer, made of the model's parameters, got {what}: for example "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    warn_of_large_rates(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates the loss by itself, outside the private release: use SGD or Adam")
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    wanted = {id(p) for p in session.source.layout.parameters}
    if held - wanted:
        raise ConfigurationError(
            "the optimizer holds parameters that are not this model's: build it on model.parameters()"
        )
    if wanted - held:
        missing = [
            n
            for n, p in zip(session.source.layout.names, session.source.layout.parameters, strict=True)
            if id(p) not in held
        ]
        raise ConfigurationError(f"the optimizer lacks the trainable parameter {missing[0]}: add it or freeze it")
    return optimizer


def fitting_scheduler(
    scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """The scheduler, made from the optimizer if it was given as a function."""
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        checks.function("scheduler", scheduler)
        scheduler = scheduler(optimizer)
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ConfigurationError(
            "the scheduler drives another optimizer: build it on the one given to the Trainer, or give a function "
            "of the optimizer that makes it"
        )
    refuse_plateau(scheduler, "step it in a callback with a public score")
    return scheduler


def refuse_plateau(scheduler: Any, otherwise: str) -> None:
    """Raise for a scheduler that wants a score: in training there is none that no record is in."""
    if isinstance(scheduler, list | tuple):
        parts = list(scheduler)
    else:  # SequentialLR and ChainedScheduler, also within each other, and wrappers of others' libraries
        parts = [*getattr(scheduler, "_schedulers", ()), *getattr(scheduler, "__dict__", {}).values()]
    for part in parts:
        if isinstance(part, LRScheduler | list | tuple) and part is not scheduler:
            refuse_plateau(part, otherwise)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau wants a score at every step, and there is none to give it: use a scheduler "
            f"of the step alone (StepLR, CosineAnnealingLR), or {otherwise}"
        )


def set_rate(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Before an update: the rate of the step that was just taken, where the method's own optimizer has a schedule.

    Public numbers, and with a rate rule the releases themselves, which are in `.grad` now. With lr="auto" and a
    quantile the gradient is scaled by C/C_t, made of releases, so that its noise is that of the plan's clip norm: on
    the device, which may be the only one to know C_t.
    """
    if not moves_rate(session) or any(PLANNED not in group for group in optimizer.param_groups):
        return  # a constant rate, or an optimizer of the user's
    factor = session.method.options.rate.at(session.number - 1, session.plan.steps)
    rule: FollowedTranscript | None = session.states.get("rate")
    if rule is not None:
        factor *= session.processes.number(partial(_followed, session, rule, rule.take()))
    clip = session.adaptive_clip if _follows_clip(session) else None
    for group in optimizer.param_groups:
        group["lr"] = group[PLANNED] * factor
        if clip is not None:
            relative = session.plan.clip_norm / clip.used
            for parameter in group["params"]:
                parameter.grad.mul_(relative)


def _followed(session: Session, rule: FollowedTranscript, fresh: tuple[Tensor, float] | None) -> float:
    """What a rate rule makes of the release of the step."""
    if fresh is None:  # of numbers alone: there is no way to compare them with
        return 1.0
    layout, (release, std) = session.source.layout, fresh
    deviations = [partial(_along, std, session.noise_factor(p)) for p in layout.parameters]
    return rule.factor(layout.parameters, layout.views(release), deviations)


def _along(std: float, factor: Factor, way: Tensor) -> float:
    """The standard deviation of a way's product with noise that came back by this factor."""
    return std * mapped_length(factor, way)


def moves_rate(session: Session) -> bool:
    """Whether the plan moves the rate of the method's own optimizer from step to step."""
    return session.method.options.rate.acts or _follows_clip(session)


def _follows_clip(session: Session) -> bool:
    """Plain steps of lr="auto" are measured by their noise, which an adapted clip norm changes; Adam's are anyway."""
    options = session.method.options
    return options.rate.is_automatic and session.adaptive_clip is not None and options.update.is_plain


def _automatic_rate(session: Session) -> float:
    """From the plan's numbers and the model as it is now, before the run: a checkpoint brings its own rate along."""
    method, plan = session.method, session.plan
    options = method.options
    response = method.known_response(plan)
    if options.filter is not None:
        response = np.convolve(response, options.filter.response()).tolist()
    deviations = np.asarray(method.step_noises(plan)) / plan.lot_size
    if session.adaptive_clip is not None:  # the count takes its share of what a step may spend
        z = plan.events_at(0)[-1].noise_multiplier
        deviations = deviations * session.adaptive_clip.rest(z) / z
    schedules, layout = options.schedules, session.source.layout
    clips = [plan.clip_norm if schedules is None else schedules.at(plan, step).clip_norm for step in range(plan.steps)]
    signal = AGREEMENT * np.asarray(clips) / math.sqrt(layout.size)
    walk = options.update.noise_walk(deviations, response, options.rate.factors(plan.steps), signal)
    shares = [session.noise_share(parameter) if options.update.is_plain else 1.0 for parameter in layout.parameters]
    relative = relative_noise(zip(layout.parameters, shares, strict=True))
    return automatic_rate(options.rate.auto_ratio, walk, relative)


def steps_within(plan: Plan, target_epsilon: float) -> int:
    """The most steps of the plan whose ε does not exceed the target; refuses if not even one fits."""
    checks.positive("target_epsilon", target_epsilon)
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
