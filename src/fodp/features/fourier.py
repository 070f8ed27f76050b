"""Random Fourier features (Rahimi and Recht 2007): a linear model on them is a model with a Gaussian kernel."""

import math

import torch
from torch import Tensor, nn

from fodp.support import checks


class RandomFourier(nn.Module):
    """Rows of a table as √(2/width)·cos(Wx + b), with W and b drawn once from a public seed.

    Guarantee: what becomes of a row depends on that row and on public numbers alone. Choose the bandwidth from public
    knowledge: a median distance of the private rows is not public.

    Args:
        inputs: numbers in a row.
        width: numbers that a row becomes. Their Euclidean norm is at most √2, and about 1.
        bandwidth: distance over which the kernel exp(-‖x-y‖²/2·bandwidth²) falls; of inputs in [-1, 1], as a public
            schema gives them, √inputs is a plain choice, and the default.
        seed: public; the same seed gives the same features.

    Example:
        >>> rows = RandomFourier(inputs=3, width=64, seed=1)(torch.zeros(2, 3))
        >>> rows.shape
        torch.Size([2, 64])
    """

    directions: Tensor
    phases: Tensor

    def __init__(self, inputs: int, width: int, bandwidth: float | None = None, seed: int = 0) -> None:
        super().__init__()
        checks.whole("inputs", inputs)
        checks.whole("width", width)
        self.bandwidth = math.sqrt(inputs) if bandwidth is None else checks.positive("bandwidth", bandwidth)
        drawn = torch.Generator().manual_seed(checks.whole("seed", seed, minimum=0))
        self.register_buffer("directions", torch.randn(inputs, width, generator=drawn) / self.bandwidth)
        self.register_buffer("phases", torch.rand(width, generator=drawn) * 2 * math.pi)

    def forward(self, rows: Tensor) -> Tensor:
        """Features of rows (n, inputs), as (n, width)."""
        width = len(self.phases)
        return math.sqrt(2 / width) * torch.cos(rows.flatten(1) @ self.directions + self.phases)
