"""From a data set's normalised pixels to what a backbone was trained on: its size and its own normalisation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fodp.support import checks


class Prepared(nn.Module):
    """A backbone behind public preprocessing: undo the data's normalisation, enlarge, normalise as the backbone wants.

    Args:
        backbone: takes images (n, 3, side, side).
        mean, std: constants of the data: a pixel p in [0, 1] was made (p - mean) / std.
        side: height and width that images are brought to (bicubic); None leaves them.
        wants_mean, wants_std: constants of the backbone, in the same form.

    Example:
        >>> halves = Prepared(nn.Flatten(), mean=[0.5], std=[0.5], wants_mean=0.5, wants_std=0.5)
        >>> halves(torch.zeros(1, 1, 1, 2))  # grey images become three equal channels
        tensor([[0., 0., 0., 0., 0., 0.]])
    """

    mean: Tensor
    std: Tensor
    wants_mean: Tensor
    wants_std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        side: int | None = None,
        wants_mean: float | Sequence[float] = (0.485, 0.456, 0.406),  # ImageNet's
        wants_std: float | Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.side = None if side is None else checks.whole("side", side, maximum=4096)
        for name, values in (("mean", mean), ("std", std), ("wants_mean", wants_mean), ("wants_std", wants_std)):
            self.register_buffer(name, torch.tensor(values).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """What the backbone makes of the images."""
        pixels = images * self.std + self.mean
        if self.side is not None:
            pixels = F.interpolate(pixels, size=(self.side, self.side), mode="bicubic", align_corners=False).clamp(0, 1)
        pixels = pixels.expand(-1, 3, -1, -1)
        # Channels last: convolutions of one channel each are twice as fast on a CPU.
        wanted = ((pixels - self.wants_mean) / self.wants_std).contiguous(memory_format=torch.channels_last)
        return self.backbone(wanted)
