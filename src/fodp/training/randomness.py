"""PyTorch's own randomness in a seeded run: what dropout and augmentation draw from."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_model(seed: int) -> None:
    """Begin a step's own stream, which is the same after a resume."""
    # torch.manual_seed would also queue a call, with its stack trace, for devices that are not in use.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def kept(seeded: bool) -> Iterator[None]:
    """After a seeded run the caller's random state is as it was."""
    if not seeded:
        yield
        return
    with torch.random.fork_rng() if torch.cuda.is_initialized() else torch.random.fork_rng(devices=[]):
        yield
