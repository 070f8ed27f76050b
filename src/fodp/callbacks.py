"""Everything optional about training, as `Trainer(…, callbacks=[…])` takes it: see each class.

Callbacks see public things only: the plan, the step, ε, the model (itself post-processing of releases)
and scores on data that was declared public.
"""

from collections import Counter, UserDict
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fodp.errors import ConfigurationError
from fodp.identity.private_data import PrivateData
from fodp.support.checks import shown

if TYPE_CHECKING:
    from fodp.integrations.loggers import MLflow, TensorBoard, WandB
    from fodp.runs.callbacks import Checkpoint, CSVLog, Progress
    from fodp.runs.scores import EarlyStopping, Evaluate, WeightAverage
    from fodp.trainer import Trainer

__all__ = [
    "CSVLog",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Evaluate",
    "MLflow",
    "Progress",
    "TensorBoard",
    "WandB",
    "WeightAverage",
]

# The extensions that bring callbacks are loaded when one of them is used.
_HOMES = {
    **dict.fromkeys(("MLflow", "TensorBoard", "WandB"), "fodp.integrations.loggers"),
    **dict.fromkeys(("CSVLog", "Checkpoint", "Progress"), "fodp.runs.callbacks"),
    **dict.fromkeys(("EarlyStopping", "Evaluate", "WeightAverage"), "fodp.runs.scores"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fodp.callbacks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


class Callback:
    """Called by the trainer at fixed moments; override what you need.

    Scores on public data go into `trainer.metrics`, by name; logs write all that are new, checkpoints keep them.
    """

    # Those of a lower order are called first: 0 makes scores, 1 reads them, 2 writes everything down.
    order = 0

    def public_data(self) -> Iterable[Any]:
        """The data that it takes as public: a fit that trains on rows of it is refused before its first step."""
        return ()

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of a fit."""

    def on_step(self, trainer: "Trainer") -> None:
        """After every step."""

    def on_epoch(self, trainer: "Trainer") -> None:
        """After every round(1/q) steps, and at the end."""

    def on_stop(self, trainer: "Trainer") -> None:
        """When a fit ends, also by an interrupt or an error."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint kept."""


class Metrics(UserDict[str, float]):
    """Public scores by name, kept until the next ones; `new` are the names set since the last epoch ended."""

    def __init__(self) -> None:
        self.new: set[str] = set()
        super().__init__()

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"the score {name!r} must be a number, got {shown(value)}") from None
        super().__setitem__(name, number)
        self.new.add(name)


class Callbacks(list[Callback]):
    """The callbacks of a trainer. Those of a lower order are called first."""

    def __init__(self, callbacks: Any):
        given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        wrong = [callback for callback in given if not isinstance(callback, Callback)]
        if wrong or not isinstance(callbacks, Iterable):
            odd = wrong[0] if wrong else callbacks
            name = "None" if odd is None else type(odd).__name__
            raise ConfigurationError(
                f"callbacks must be a list of callbacks (fodp.callbacks), got {name}: callbacks=[…]"
            )
        super().__init__(given)
        self._compared: list[Callback] = []  # whose public data was compared with the private

    def refuse_private_scores(self, dataset: Any) -> None:
        """Raise if a callback has the data that is trained on, or a copy of it, in its hands."""
        private = PrivateData(dataset)
        for callback in self:
            if any(callback is known for known in self._compared):
                continue
            for public in callback.public_data():
                private.refuse(type(callback).__name__, public)
            private.refuse_reaching(type(callback).__name__, callback)
            self._compared.append(callback)

    def call(self, moment: str, trainer: "Trainer") -> None:
        """Call all of them at a moment: "on_start", "on_step" or "on_epoch"."""
        for callback in self._ordered():
            getattr(callback, moment)(trainer)
        if moment == "on_epoch":
            trainer.metrics.new.clear()

    def stop(self, trainer: "Trainer") -> None:
        """Each gets its chance to put things in order, even if one before it fails."""
        failed: Exception | None = None
        for callback in self._ordered():
            try:
                callback.on_stop(trainer)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of each, by name."""
        return {name: callback.state_dict() for name, callback in self._named()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint kept; callbacks that it does not know stay as they are."""
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(state[name])

    def _ordered(self) -> list[Callback]:
        return sorted(self, key=lambda callback: callback.order)

    def _named(self) -> list[tuple[str, Callback]]:
        """Callbacks by kind and number, so that leaving one out on resuming does not mix up the others."""
        seen: Counter[str] = Counter()
        named = []
        for callback in self:
            kind = type(callback).__name__
            named.append((f"{kind}.{seen[kind]}", callback))
            seen[kind] += 1
        return named
