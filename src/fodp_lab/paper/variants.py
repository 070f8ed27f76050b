"""What the paper leaves open about its data and its model, and augmentation: variants of a run that change one thing.

The paper says "normalized", "a fixed training subset", "a fixed test subset" and "the same initialization protocol".
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fodp.data import Card, Splits
from fodp.data.augmentations import augmentation


def _other_training(splits: Splits) -> Splits:
    return replace(splits, train=splits.validation, validation=splits.train)


def _other_test(start: int) -> Callable[[Splits], Splits]:
    """Training images that are not trained on, as many as the test set has."""
    return lambda splits: replace(splits, test=TensorDataset(*splits.validation[start : start + splits.card.test_size]))


def _rescaled(mean: float, std: float) -> Callable[[Splits], Splits]:
    """Pixels p in [0, 1] become (p - mean) / std, in place of the card's constants."""

    def change(splits: Splits) -> Splits:
        def again(data: TensorDataset) -> TensorDataset:
            images, labels = data.tensors
            return TensorDataset((_pixels(images, splits.card) - mean) / std, labels)

        return replace(splits, train=again(splits.train), validation=again(splits.validation), test=again(splits.test))

    return change


def _pixels(images: Tensor, card: Card) -> Tensor:
    """Back to [0, 1], whatever the shape."""
    means, stds = (torch.tensor(numbers).view(-1, 1) for numbers in (card.mean, card.std))
    return (images.view(len(images), len(card.mean), -1) * stds + means).view_as(images)


SPLITS: dict[str, Callable[[Splits], Splits]] = {
    "train[5000:10000]": _other_training,
    "tested on train[5000:7000]": _other_test(0),
    "tested on train[7000:9000]": _other_test(2000),
    "pixels in [0, 1]": _rescaled(0.0, 1.0),
    "pixels in [-1, 1]": _rescaled(0.5, 0.5),
}
SCALES = ("pixels in [0, 1]", "pixels in [-1, 1]")
GLOROT = "Glorot weights"
VARIANTS = (*SPLITS, GLOROT)
AUGMENTED = {"4 augmented views": ("standard", 4)}  # of the utility comparison: what to draw, and how many views


def varied(variant: str, splits: Splits, model: nn.Module) -> Splits:
    """The data of the variant; the model's weights are drawn anew where the variant says so."""
    if variant == GLOROT:  # usual with tanh; PyTorch's own are smaller
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        return splits
    return SPLITS[variant](splits) if variant and variant not in AUGMENTED else splits


def augmenting(variant: str, card: Card) -> dict[str, Any]:
    """The Trainer's words for a variant that augments; none for others."""
    if variant not in AUGMENTED:
        return {}
    name, copies = AUGMENTED[variant]
    return dict(augment=augmentation(name, card), copies=copies)
