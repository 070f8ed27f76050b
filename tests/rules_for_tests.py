"""What each private optimizer is without privacy, written down again in the plainest way.

At full participation, without noise and clipping, a method is a direction (a function of the parameters that may
remember), smoothed by a filter, and taken by an update. No part of fodp is used, but for
the numbers that a sum of exponentials was fitted to.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from fodp.memory.exponentials import fitted
from methods_for_tests import data, flat, losses, network, public_loss


class World:
    """The small problem as a function of one flat vector."""

    def __init__(self, lot_size):
        self.model, self.divisor = network(), lot_size
        self.inputs, self.labels = data().tensors

    def total(self, theta, rows=slice(None)):
        """Σ ∇ℓ_i(θ)."""
        vector_to_parameters(theta, self.model.parameters())
        loss = losses(self.model, (self.inputs[rows], self.labels[rows])).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.model.parameters()))])

    def public_loss(self, theta):
        vector_to_parameters(theta, self.model.parameters())
        return public_loss(self.model)


def value_at(schedule, step):
    return schedule if isinstance(schedule, float) else [v for start, v in schedule if start <= step][-1]


def remembered(past, p):
    """The paper's u: a weighted average of the past by fractional, exponential or equal weights; None at first."""
    compact = p.get("compact")
    lags = range(1, min(p["window"], len(past) + 1))
    if not lags:
        return None
    if compact == "exponentials":
        fit = fitted(p["alpha"], p["window"], p["lam"], p["compact_error"])
        pairs, lags = list(zip(fit.decays.tolist(), fit.shares.tolist(), strict=True)), range(1, len(past) + 1)
        kernel = {j: sum(share * decay ** (j - 1) for decay, share in pairs) for j in lags}
        return sum(kernel[j] * past[-j] for j in lags) / sum(kernel.values())
    if "alpha" in p:
        trend = past[0]
        for release in past[1:]:
            trend = p["gamma"] * release + (1 - p["gamma"]) * trend
        length = trend.norm().item()
        chi = length / (length + (p["zeta"] or 0))  # by default ζ and κ are on the scale of the noise: nothing
        scale = max(length, p["kappa"] or 0) + p["eps"]
        tempering = {j: p["lam"] + chi * p["tau"] * (past[-j] - trend).norm().item() / scale for j in lags}
        kernel = {j: (j + 1) ** (p["alpha"] - 1) * math.exp(-tempering[j] * j) for j in lags}
    else:
        kernel = {j: p.get("decay", 1.0) ** (j - 1) for j in lags}
    return sum(kernel[j] * past[-j] for j in lags) / sum(kernel.values())


def mix(beta, new, u):
    return beta * new if u is None else beta * new + (1 - beta) * u


def plain(world, p):
    return world.total


def feedback(world, p):
    past = []

    def direction(theta):
        past.append(mix(value_at(p["beta"], len(past)), world.total(theta), remembered(past, p)))
        return past[-1]

    return direction


def memory_after(world, p):
    past = []

    def direction(theta):
        past.append(world.total(theta))
        return mix(value_at(p["beta"], len(past) - 1), past[-1], remembered(past[:-1], p))

    return direction


def sharpness_aware(world, p):
    def one(theta, rows):
        g = world.total(theta, rows)
        return world.total(theta + p["rho"] * g / g.norm(), rows)

    return lambda theta: one(theta, slice(None))


def along_previous(world, p):
    previous = []

    def direction(theta):
        shift = p["rho"] * previous[-1] / previous[-1].norm() if previous else 0
        previous.append(world.total(theta + shift))
        return previous[-1]

    return direction


def kalman(world, p):
    kappa, gamma = p["kappa"], p["gamma"]
    points, estimates = [], []

    def direction(theta):
        c, d = (1 - kappa) / (kappa * gamma), theta - (points[-1] if points else theta)
        y = c * world.total(theta + gamma * d) + (1 - c) * world.total(theta)
        points.append(theta)
        estimates.append((1 - kappa) * estimates[-1] + kappa * y if estimates else y)
        return estimates[-1]

    return direction


def by_blocks(world, p):
    """Each layer's gradient times min(1, w/inputs): once √ before, once after what would be clipping."""
    shapes = [q.shape for q in world.model.parameters()]
    factors = torch.cat([torch.full((s.numel(),), min(1.0, p["width"] / math.prod(s[1:]))).double() for s in shapes])
    return lambda theta: factors * world.total(theta)


DIRECTIONS = {
    "dp-sgd": plain,
    "fo-dp-sgd": feedback,
    "fo-uniform": feedback,
    "fo-exponential": feedback,
    "post-fm-dp-sgd": memory_after,
    "dp-adam": plain,
    "dp-adambc": plain,
    "dp-adamw": plain,
    "adp-adamw": plain,
    "dp-is": None,  # random even without noise: TestImportanceSampling
    "dp-sam": sharpness_aware,
    "dp-sat": along_previous,
    "dp-adam-ac": plain,
    "sa-dpsgd": plain,
    "doppler": plain,
    "disk": kalman,
    "block-dp-sgd": by_blocks,
    "fo-noise": plain,
}


def low_pass(a, b):
    inputs, outputs, constants = [], [], []

    def smooth(x):
        inputs.append(x)
        t = len(inputs) - 1
        m = sum(b[r] * inputs[t - r] for r in range(len(b)) if r <= t)
        c = sum(b[r] for r in range(len(b)) if r <= t)
        outputs.append(m - sum(a[r - 1] * outputs[t - r] for r in range(1, len(a) + 1) if r <= t))
        constants.append(c - sum(a[r - 1] * constants[t - r] for r in range(1, len(a) + 1) if r <= t))
        return outputs[-1] / constants[-1]

    return smooth


def fractional(p):
    past, memory = [], dict(alpha=0.8, window=8, lam=0.05, tau=0.1, gamma=0.1, kappa=None, zeta=None, eps=1e-12)

    def smooth(x):
        u = remembered(past, memory)
        past.append(x)
        return mix(p["filter_beta"], x, u)

    return smooth


FILTERS = {
    "none": lambda p: lambda x: x,
    "momentum": lambda p: low_pass((-(p["momentum"] or 0.9),), (1 - (p["momentum"] or 0.9),)),
    "doppler": lambda p: low_pass(p["filter_a"], p["filter_b"]),
    "fractional": fractional,
}


def descent(p):
    buffer = None

    def update(theta, g, lr):
        nonlocal buffer
        mu = p["momentum"] if p["filter"] != "momentum" else 0
        buffer = g if buffer is None else mu * buffer + g
        return theta - lr * buffer

    return update


def adam(p):
    m = v = t = 0
    b1, b2, corrected = p["beta1"], p["beta2"], p["update"].endswith("bc")

    def update(theta, g, lr):
        nonlocal m, v, t
        m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, t + 1
        v_hat = v / (1 - b2**t)  # without noise there is nothing to subtract
        scale = v_hat.clamp(min=1e-16).sqrt() if corrected else v_hat.sqrt() + p["adam_eps"]
        return theta - lr * p["weight_decay"] * theta - lr * m / (1 - b1**t) / scale

    return update


def factors(p):
    """dp-adam-ac's factor on the learning rate when nothing is ever clipped; 1 for all others."""
    rate, factor = 1 - (p["quantile"] or 1), 1.0
    while True:
        if "smoothing" in p:
            rate = p["smoothing"] * rate
            factor = min(p["factor_max"], factor * p["up"]) if rate < 1 - p["quantile"] - p["band"] else factor
        yield factor


def non_private_rule(method: str, p: dict[str, Any], lot_size: float) -> Iterator[Tensor]:
    """The parameters after each step of what the method is without privacy."""
    world, theta = World(lot_size), flat(network())
    direction, smooth = DIRECTIONS[method](world, p), FILTERS[p["filter"]](p)
    update = descent(p) if p["update"] == "sgd" else adam(p)
    energy, rejected = math.inf, 0
    for factor in factors(p):
        proposal = update(theta, smooth(direction(theta)) / lot_size, p["lr"] * factor)
        if method == "sa-dpsgd":  # with k so large, a rise is taken only when patience is at its end
            new = world.public_loss(proposal)
            if new > energy and rejected < p["patience"]:
                proposal, rejected = theta, rejected + 1
            else:
                energy, rejected = new, 0
        theta = proposal
        yield theta
