"""The standard image augmentations, for `Trainer(augment=…, copies=K)`: every image is treated by itself.

What is drawn is drawn for a whole batch with PyTorch's functions, one number for each row, so that a private run keys
it by record (`fodp.draws`): a record's K pictures of a step are the same whoever else is in the lot.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fodp.data.cards import Card
from fodp.errors import ConfigurationError
from fodp.support import checks

AUGMENTATIONS = ("standard", "crop", "flip", "crop+flip")


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Images (N, C, H, W), each moved by up to `padding` pixels; what comes in at a side is the reflection."""
    height, width = images.shape[-2:]
    wide = F.pad(images, [padding] * 4, mode="reflect")
    down, right = (torch.randint(2 * padding + 1, (len(images),), device=images.device) for _ in range(2))
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)  # a view: every place to cut at
    return windows[torch.arange(len(images), device=images.device), :, down, right]


def random_flip(images: Tensor) -> Tensor:
    """Images (N, C, H, W), each mirrored left to right with probability one half."""
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class ImageAugmentation:
    """Moves by up to `padding` pixels, and mirrors if `flip`; of batches (images, labels) it changes the images.

    Images are of `shape` (channels, height, width), whole or flattened, as floating-point numbers.
    """

    shape: tuple[int, ...]
    padding: int = 4
    flip: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != 3:
            raise ConfigurationError(
                f"images have a shape (channels, height, width), and these records {tuple(self.shape)}: leave the "
                "augmentation out, or write one of your own"
            )
        checks.whole("padding", self.padding, minimum=0, maximum=min(self.shape[1:]) - 1)

    def __call__(self, batch: Any) -> Any:
        """The batch with other images."""
        images, *others = batch
        moved = images.reshape(len(images), *self.shape)
        moved = random_crop(moved, self.padding) if self.padding else moved
        moved = random_flip(moved) if self.flip else moved
        return type(batch)((moved.reshape(images.shape), *others))


def augmentation(name: str, card: Card) -> ImageAugmentation:
    """An augmentation for a data set of images. It treats every image by itself.

    Args:
        name: "crop" moves an image by up to an eighth of a side (4 pixels of 32); "flip" mirrors it at random;
            "standard" does both, without the mirror where a mirrored image is of another class (digits).
        card: the public card of the data set.

    Returns:
        A function of a batch, for `Trainer(augment=…)`.

    Raises:
        ConfigurationError: if the name is unknown, or records are no images.

    Example:
        >>> import fodp
        >>> augment = augmentation("standard", fodp.data.CARDS["cifar10"])
    """
    checks.one_of("augment", name, AUGMENTATIONS)
    if card.schema is not None or len(card.shape) != 3:
        raise ConfigurationError(
            f"--augment {name} is for images (channels, height, width), and {card.name} has records of shape "
            f"{tuple(card.shape)}: leave it out, or write an augmentation of your own for the Trainer"
        )
    flips = card.mirrored if name == "standard" else "flip" in name
    return ImageAugmentation(card.shape, 0 if name == "flip" else max(1, min(card.shape[1:]) // 8), flips)
