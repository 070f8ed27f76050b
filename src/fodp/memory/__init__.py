"""Memories of earlier releases: a window, the weights of its lags, a fixed kernel without a window."""

from fodp.memory.exponentials import ExponentialSumMemory
from fodp.memory.weights import ExponentialMemory, FractionalMemory, UniformMemory, noise_floor
from fodp.memory.window import WindowMemory

__all__ = [
    "ExponentialMemory",
    "ExponentialSumMemory",
    "FractionalMemory",
    "UniformMemory",
    "WindowMemory",
    "noise_floor",
]
