"""Weights of EfficientNet-Lite0 that are made up, with the names and shapes of the published file."""

import torch

from fodp.features.efficientnet_lite import _GROUPS


def made_up_weights():
    """A state dict of small random numbers."""
    drawn = torch.Generator().manual_seed(0)
    state = {}

    def layer(conv, norm, wanted, channels, kernel):
        state[f"{conv}.weight"] = (
            torch.randn(wanted, channels, kernel, kernel, generator=drawn) / channels**0.5 / kernel
        )
        for name, start in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            state[f"{norm}.{name}"] = start + 0.1 * torch.rand(wanted, generator=drawn)

    layer("_conv_stem", "_bn0", 32, 3, 3)
    number = 0
    for blocks, kernel, _, expansion, channels, wanted in _GROUPS:
        for place in range(blocks):
            at, narrow = f"_blocks.{number}", channels if place == 0 else wanted
            if expansion > 1:
                layer(f"{at}._expand_conv", f"{at}._bn0", narrow * expansion, narrow, 1)
            layer(f"{at}._depthwise_conv", f"{at}._bn1", narrow * expansion, 1, kernel)
            layer(f"{at}._project_conv", f"{at}._bn2", wanted, narrow * expansion, 1)
            number += 1
    layer("_conv_head", "_bn1", 1280, 320, 1)
    return state
