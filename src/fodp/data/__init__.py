"""Data sets: `load` and `from_table` give tensors, `CARDS` the public numbers that a plan may use."""

from typing import TYPE_CHECKING, Any

from fodp.data.cards import CARDS, Card
from fodp.data.loading import Splits, load
from fodp.data.schema import Schema, read_schema

if TYPE_CHECKING:
    from fodp.data.augmentations import ImageAugmentation as ImageAugmentation
    from fodp.data.augmentations import augmentation as augmentation
    from fodp.data.packing import unpack as unpack
    from fodp.data.tables import from_table as from_table

__all__ = [
    "CARDS",
    "Card",
    "ImageAugmentation",
    "Schema",
    "Splits",
    "augmentation",
    "from_table",
    "load",
    "read_schema",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name == "from_table":  # loads torch, which asking for a card does not wait for
        from fodp.data.tables import from_table

        return from_table
    if name in ("ImageAugmentation", "augmentation"):
        from fodp.data import augmentations

        return getattr(augmentations, name)
    if name == "unpack":
        from fodp.data.packing import unpack

        return unpack
    raise AttributeError(f"module 'fodp.data' has no attribute {name!r}")
