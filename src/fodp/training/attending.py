"""Callbacks of the first rank of a sharded run: the others attend, and do with it what takes all of them.

Callbacks look at the model and save it, and no rank has more than its slices. So before they are called all ranks make
the model whole, if one of the callbacks may look at it; while they are called, the other ranks wait for what the first
asks for; and when they have returned, it says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fodp._checks import ConfigurationError
from fodp.ranks.fsdp import is_fsdp
from fodp.training import sharded
from fodp.training.callbacks import Callback

if TYPE_CHECKING:
    from fodp.training.trainer import Trainer

_DONE, _SAVE = "done", "save "


@contextmanager
def attended(trainer: "Trainer", moment: str) -> Iterator[None]:
    """Around the callbacks of one moment, on every rank; nothing where the model is whole.

    A run that has broken off has nobody who attends, so its model cannot be made whole, and is not to be called.
    """
    run, ranks = trainer.run, trainer.run.ranks
    if run.shards is None:
        yield
        return
    if trainer._deserted:
        with _uncalled(trainer.model, "this sharded run has broken off"):
            yield
        return
    looks = ranks.number(lambda: float(any(_looks(callback, moment) for callback in trainer.callbacks)))
    with run.whole() if looks else _uncalled(trainer.model, "no callback here has looks_at_model = True"):
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
    """Whether a callback may look at the model then; one object's own function for that moment counts."""
    function = getattr(callback, moment)
    return callback.looks_at_model and getattr(function, "__func__", function) is not getattr(Callback, moment)


@contextmanager
def _uncalled(model: nn.Module, why: str) -> Iterator[None]:
    """The model refuses to be called: FSDP would wait for ranks that do something else, which ends a process."""

    def refuse(*_: Any) -> None:
        raise ConfigurationError(f"{why}: this rank has slices of the model alone, and cannot call it")

    hooks = [module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules() if is_fsdp(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
