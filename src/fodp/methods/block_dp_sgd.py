"""Block-DP-SGD: layers with many inputs get a smaller share of each example's clipped gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp import _checks
from fodp.methods.base import Steps
from fodp.methods.dp_sgd import DPSGD, DPSGDParams
from fodp.updates import AdamBC


@dataclass(frozen=True, kw_only=True)
class BlockDPSGDParams(DPSGDParams):
    """`width` w: a layer with more than w inputs is scaled down; above the widest layer it is DP-SGD."""

    width: float = 64.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive("width", self.width)


class BlockDPSGD(DPSGD):
    """The gradient of block l times b_l = min(1, √(w/inputs of l)), clipped as a whole; the release times b_l again.

    Flat clipping spends the sensitivity where the gradient is large, and the first layer of a wide network
    holds most of every example's norm: the others drown in the noise. b is public, made of shapes alone, so
    sensitivity and event (q, σ) are DP-SGD's.
    """

    name = "block-dp-sgd"
    summary = "DP-SGD with public weights per layer, before clipping and again after the release."
    reference = "This library; of the family of group-wise clipping (He et al., ICLR 2023)"
    advice = "Where the first layer is much wider than the others."
    Params = BlockDPSGDParams

    def weight(self, shape: Sequence[int]) -> float:
        """b of a parameter of this shape; biases and gains have one input each."""
        return min(1.0, math.sqrt(self.params.width / max(1, math.prod(shape[1:]))))

    def step(self, run: Steps, state: Any) -> Tensor:
        """Scale, clip and sum, release, scale."""
        weights = [self.weight(shape) for shape in run.shapes]
        lot = run.draw()
        clipped_sum = run.gradients(lot, blocks=weights).clipped_sum(run.clip_norm)
        release = run.release(lot, clipped_sum, std=run.plan.noise_multiplier * run.clip_norm)
        for part, b in zip(release.split([math.prod(shape) for shape in run.shapes]), weights, strict=True):
            part.mul_(b)
        return release

    def tune(self, optimizer: torch.optim.Optimizer, run: Steps, state: Any) -> None:
        """AdamBC must know that the noise differs from block to block."""
        super().tune(optimizer, run, state)
        if isinstance(optimizer, AdamBC):
            for group in optimizer.param_groups:
                group["noise_shares"] = [self.weight(parameter.shape) ** 2 for parameter in group["params"]]
