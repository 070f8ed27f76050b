"""Data sets: `load` gives normalised tensors, `CARDS` the public numbers that a plan may use."""

from fodp.data.cards import CARDS, Card
from fodp.data.loading import Splits, load

__all__ = ["CARDS", "Card", "Splits", "load"]
