"""Randomness of a run: keyed streams, exact noise on a grid, and the one release that adds noise."""

from fodp.noise.streams import Streams, keyed_from

__all__ = ["Streams", "keyed_from"]
