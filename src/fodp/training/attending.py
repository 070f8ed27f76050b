"""Callbacks of the first rank of a sharded run: the others attend, and do with it what takes all of them.

Callbacks look at the model and save it, and no rank has more than its slices. So before they are called all ranks make
the model whole, if one of the callbacks may look at it; while they are called, the other ranks wait for what the first
asks for; and when they have returned, it says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fodp.training import sharded
from fodp.training.callbacks import Callback

if TYPE_CHECKING:
    from fodp.training.trainer import Trainer

_DONE, _SAVE = "done", "save "


@contextmanager
def attended(trainer: "Trainer", moment: str) -> Iterator[None]:
    """Around the callbacks of one moment, on every rank; nothing where the model is whole or the run has broken off."""
    run, ranks = trainer.run, trainer.run.ranks
    if run.shards is None or trainer._deserted:
        yield
        return
    looks = ranks.number(lambda: float(any(_looks(callback, moment) for callback in trainer.callbacks)))
    with run.whole() if looks else nullcontext():
        if not ranks.is_first:
            while (asked := ranks.text(str)) != _DONE:
                sharded.save(Path(asked.removeprefix(_SAVE)), trainer, None)
            yield
            return
        trainer._attended = True
        try:
            yield
        finally:
            trainer._attended = False
        ranks.text(lambda: _DONE)


def ask_for_slices(trainer: "Trainer", path: Path) -> None:
    """Tell ranks that attend to save their slices; elsewhere they have been called as this one was."""
    if trainer._attended:
        trainer.run.ranks.text(lambda: f"{_SAVE}{path.absolute()}")


def _looks(callback: Callback, moment: str) -> bool:
    """Whether a callback may look at the model then."""
    return callback.looks_at_model and getattr(type(callback), moment) is not getattr(Callback, moment)
