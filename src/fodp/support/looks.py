"""At which steps a piece of the user's code is looked at: the first two that tell something, and rare public ones."""

import hashlib

FIRST_STEPS = 2
_IN_256 = 1


def is_rare(step: int) -> bool:
    """Whether everything is looked at again in this step: about 1 step in 256, chosen by hashing the step's number."""
    return step > 0 and hashlib.blake2b(b"%d" % step, person=b"fodp.check").digest()[0] < _IN_256


class Looks:
    """The looks at one piece of the user's code (a loss, an augmentation, a data set, a `collate_fn`), by step.

    However often the code is called in a step, a look that has told something is the step's only one and counts once.
    Looks are not saved: a resumed run looks at its first two steps again.
    """

    def __init__(self, first: int = FIRST_STEPS):
        self._first = first
        self.steps: list[int | None] = []  # in which a look has told something
        self.step: int | None = None  # whose lot comes next; None: every batch is a step of its own
        self.again = False  # whether that lot is to be looked at too

    def begin(self, step: int) -> None:
        """What comes next is the lot of this step; of about 1 step in 256 it is looked at again."""
        self.step, self.again = step, is_rare(step)

    def take(self, again: bool = False) -> bool:
        """Whether to look now, in the step that was begun. A rare step is looked at once."""
        if not (self.again or again) and len(self.steps) >= self._first:
            return False
        due = self.due(self.step, self.again or again)
        self.again = self.again and not due
        return due

    def due(self, step: int | None, again: bool = False) -> bool:
        """Whether to look now. Without a step, as for an engine by itself, every call is a step of its own."""
        if step is not None and self.steps and self.steps[-1] == step:
            return False
        return again or len(self.steps) < self._first

    def told(self, step: int | None) -> None:
        """A look at this step had enough examples to tell something."""
        self.steps.append(step)
