"""What a library can hope for: the private step written out for the MLP alone, without engine, checks or secure
randomness; and for a memory, a private step and one reading of a window."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fodp.memory import UniformMemory
from fodp_lab.bench.contenders import Step
from fodp_lab.bench.steps import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, private, size_of
from fodp_lab.bench.workloads import Workload

BETA, ALPHA, LAM, TAU, GAMMA = 0.9, 0.8, 0.05, 0.1, 0.1


def clipped_sum(layers: list[nn.Linear], inputs: Tensor, labels: Tensor, out: list[Tensor]) -> None:
    """Σ of clipped per-example gradients of tanh layers: one forward, one backward, one product per layer."""
    activations, outputs = [inputs], []
    for layer in layers:
        outputs.append(layer(activations[-1]))
        activations.append(torch.tanh(outputs[-1]))
    loss = F.cross_entropy(outputs[-1], labels, reduction="none")
    backs = torch.autograd.grad(loss, outputs, torch.ones_like(loss))
    with torch.no_grad():
        pairs = list(zip(activations, backs, strict=False))
        norm = torch.linalg.vector_norm
        squares = [norm(b, dim=1) ** 2 * (norm(a, dim=1) ** 2 + 1) for a, b in pairs]
        weights = (CLIP_NORM / torch.stack(squares).sum(0).sqrt_()).clamp_(max=1.0)
        for i, (a, b) in enumerate(pairs):
            weighted = b * weights[:, None]
            torch.mm(weighted.t(), a, out=out[2 * i])
            torch.sum(weighted, 0, out=out[2 * i + 1])


def by_hand(workload: Workload, window: int) -> tuple[Step, int]:
    """DP-SGD (window 1) or FO-DP-SGD with torch's own noise; two passes over the window."""
    inputs, labels = workload.data()
    model = workload.model()
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    parameters, size = list(model.parameters()), size_of(model)
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    total, release, gradient = torch.zeros(3, size)
    views, gradients = ([part.view_as(p) for part, p in _split(flat, parameters)] for flat in (total, gradient))
    for parameter, view in zip(parameters, gradients, strict=True):
        parameter.grad = view
    past = _Window(window, size) if window > 1 else None

    def step() -> None:
        rows = (torch.rand(workload.examples) < workload.batch / workload.examples).nonzero().flatten()
        clipped_sum(layers, inputs[rows], labels[rows], views)
        with torch.no_grad():
            release.normal_(0, NOISE_MULTIPLIER * CLIP_NORM).add_(total, alpha=BETA if past else 1.0)
            if past:
                past.mix_into(release)
            torch.div(release, workload.batch, out=gradient)
        optimizer.step()

    return step, size


def window_read(workload: Workload, window: int) -> tuple[Step, int]:
    """DP-SGD of this library, and beside it the average of K-1 vectors that never change: the least that an exact
    memory adds to a step, without its scores, its trend and the writing of releases."""
    step, size = private(workload, "dp-sgd", 0, {})
    memory, out = UniformMemory(window), torch.zeros(size)
    for _ in range(window - 1):
        memory.write(torch.randn(size))

    def both() -> None:
        step()
        memory.read(out)

    return both, size


class _Window:
    """A ring of releases and their trend, always taken as full."""

    def __init__(self, window: int, size: int):
        self.ring, self.trend, self.next = torch.zeros(window - 1, size), torch.zeros(size), 0
        self.squares, self.lags = np.zeros(window - 1), np.arange(1, window)

    def mix_into(self, release: Tensor) -> None:
        """Add the memory to a release, and the release to the memory."""
        square = float(torch.dot(self.trend, self.trend))
        apart = np.sqrt(np.maximum(self.squares - 2 * (self.ring @ self.trend).numpy() + square, 0))
        norm = max(square**0.5, 1.0)
        lags = np.roll(self.lags[::-1], self.next)
        kernel = (lags + 1) ** (ALPHA - 1) * np.exp(-(LAM + TAU * apart / norm) * lags)
        weights = torch.from_numpy((kernel / kernel.sum()).astype(np.float32))
        release.addmv_(self.ring.t(), weights, alpha=1 - BETA)
        self.ring[self.next].copy_(release)
        self.trend.lerp_(release, GAMMA)
        self.squares[self.next] = float(torch.dot(release, release))
        self.next = (self.next + 1) % len(self.ring)


def _split(flat: Tensor, parameters: list[nn.Parameter]) -> list[tuple[Tensor, nn.Parameter]]:
    return list(zip(flat.split([p.numel() for p in parameters]), parameters, strict=True))
