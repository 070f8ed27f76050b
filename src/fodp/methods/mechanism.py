"""The paper's mechanism alone, for people with their own loop."""

from typing import Any, Protocol

import torch
from torch import Tensor

from fodp.accounting import Event
from fodp.errors import ConfigurationError
from fodp.noise import Streams
from fodp.queries import Query
from fodp.release import Gaussian, release
from fodp.support import checks


class Memory(Protocol):
    """What the mechanism needs of a memory of earlier releases."""

    def mix_in_(self, vector: Tensor, share: float) -> Tensor:
        """vector + share·u, in place, where u is the memory state (zero at first); the result is remembered."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""


class GaussianMechanism:
    """The paper's mechanism alone, for people with their own loop: clipped sum in, private sum out.

    `release(s)` returns β·s + (1-β)·u + N(0, (σC)²·I), where u is the memory of earlier releases, and
    remembers what it returned. A building block: it claims nothing about ε. If s changes by at most C
    with one example and comes from a Poisson lot of rate q, a release is a Poisson-subsampled Gaussian
    event with multiplier σ/β: `event(q)`. σ = 0 is for tests only.

    `beta` and `noise_multiplier` are plain attributes: a public schedule may change them between releases.
    `generator` None draws from a fresh cryptographic stream (use this for real data); a seeded
    `torch.Generator` makes runs repeatable and is not private against whoever knows the seed.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        beta: float = 1.0,
        memory: Memory | None = None,
        generator: torch.Generator | None = None,
    ):
        self.clip_norm = checks.clip_norm("clip_norm", clip_norm)
        self.noise_multiplier = checks.at_least_zero("noise_multiplier", noise_multiplier)
        self.beta = checks.fraction("beta", beta)
        if beta < 1 and memory is None:
            raise ConfigurationError(f"beta={beta} mixes in a memory: pass memory=fodp.FractionalMemory(...) or beta=1")
        self.memory = memory
        self._noise: Gaussian = Streams.secure() if generator is None else _TorchNoise(generator)
        self._step = 0

    def release(self, clipped_sum: Tensor) -> Tensor:
        """The private sum s̃; divide it by the public lot size L for a gradient."""
        query = self.beta * Query(clipped_sum, self.clip_norm)
        released = release(query, self.noise_multiplier * self.clip_norm, self._noise, self._step, "noise")
        self._step += 1
        return released if self.memory is None else self.memory.mix_in_(released, 1 - self.beta)  # post-processing

    def event(self, sampling_rate: float) -> Event:
        """What one release costs when its lot was drawn with this Poisson rate."""
        return Event(sampling_rate, self.noise_multiplier / self.beta)

    def state_dict(self) -> dict[str, Any]:
        """Memory and step; never a key."""
        return {"step": self._step, "memory": None if self.memory is None else self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; secure noise gets a fresh key, so none is ever repeated."""
        self._step = int(state["step"])
        if isinstance(self._noise, Streams):
            self._noise = Streams.secure()
        if self.memory is not None and state["memory"] is not None:
            self.memory.load_state_dict(state["memory"])


class _TorchNoise:
    """PyTorch's own generator, for repeatable research runs; it draws in order, whatever the step."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        return out.normal_(generator=self._generator).mul_(std)
