"""Normalisation of each record by itself. By means of the whole data it would cost privacy."""

from torch import Tensor, nn
from torch.nn import functional as F

from fodp.support import checks


class PerExample(nn.Module):
    """Each record minus its own mean, divided by its own Euclidean norm; the shape stays.

    With one linear layer on records of norm 1 the gradient's norm is that of the error, which suits clipping.

    Example:
        >>> import torch
        >>> PerExample()(torch.tensor([[1.0, 3.0], [7.0, 5.0]]))
        tensor([[-0.7071,  0.7071],
                [ 0.7071, -0.7071]])
    """

    def forward(self, records: Tensor) -> Tensor:
        """Records (n, …), normalised."""
        rows = records.flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        return F.normalize(centred, dim=1, eps=1e-6).view_as(records)


class Grouped(nn.Module):
    """Channels in groups, each with mean 0 and variance 1 within a record (Tramèr and Boneh 2021: "handcrafted DP").

    This is group normalisation without weights. They use 9 to 81 groups for scattering channels.

    Example:
        >>> import torch
        >>> normalised = Grouped(2)(torch.rand(5, 4, 3, 3))
        >>> bool(normalised[0, :2].mean().abs() < 1e-6)
        True
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = checks.whole("groups", groups)

    def extra_repr(self) -> str:
        """For `repr`."""
        return str(self.groups)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width), normalised; channels must be a multiple of groups."""
        return F.group_norm(images, self.groups)
