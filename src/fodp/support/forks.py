"""Which process something belongs to: a fork copies keys, noise and spending that may be used once only."""

import os

_forks = 0  # how many times this process's line of ancestors has forked since this module was loaded


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # absent where there is no fork
    os.register_at_fork(after_in_child=_count_fork)


class Owner:
    """The process that made it."""

    def __init__(self) -> None:
        self._process = os.getpid(), _forks  # numbers of processes come again, and not every fork is Python's

    @property
    def is_here(self) -> bool:
        """Whether that is this process, and not one that was forked from it since."""
        return self._process == (os.getpid(), _forks)
