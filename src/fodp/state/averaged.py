"""The average of a run's iterates in the place of the iterate: for scores, for what is saved, and after a fit."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fodp.session import Session


class AveragedWeights:
    """Puts the average of the iterates into a run's model, and the iterate back. Without an average it does nothing.

    While the average is in the model, `iterate` holds where training goes on from.
    """

    def __init__(self, session: Session):
        self._session = session
        self.iterate: Tensor | None = None
        self._shown: Tensor | None = None  # what was put in: other weights are the owner's

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The model has the average for so long, if there is one by now."""
        if self._holds():
            yield
            return
        self.put_in()
        try:
            yield
        finally:
            self.put_back(anyway=True)

    def put_in(self) -> None:
        """From here on the model is the average, until `put_back`."""
        mean = None if self._session.average is None else self._session.average.value()
        if mean is None or self._holds():
            return
        layout = self._session.source.layout
        self.iterate = layout.read()
        layout.write(mean)
        self._shown = layout.read()

    def put_back(self, anyway: bool = False) -> None:
        """The model has its iterate again; weights that the owner has set meanwhile stay, if not `anyway`."""
        iterate = self.iterate if anyway or self._holds() else None
        self.forget()
        if iterate is not None:
            self._session.source.layout.write(iterate)

    def forget(self) -> None:
        """What is in the model now is the iterate."""
        self.iterate = self._shown = None

    def _holds(self) -> bool:
        """Whether the average is in the model."""
        return self._shown is not None and _same(self._session.parameters(), self._shown)


def _same(here: Tensor, there: Tensor) -> bool:
    """Bit for bit, a NaN like a NaN."""
    return bool(((here == there) | (here.isnan() & there.isnan())).all())
