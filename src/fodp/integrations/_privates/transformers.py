"""What of transformers' Trainer has no public name, or is set by its loop alone."""

from collections.abc import Callable
from typing import Any


def begin(trainer: Any, step: int) -> None:
    """Callbacks find the model, its optimizer and schedule, and no training loader: a lot is private."""
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
    handler.train_dataloader = None
    trainer.state.global_step = step


def at_step(trainer: Any, step: int, steps_per_epoch: int) -> None:
    """The state that callbacks and checkpoints are given."""
    trainer.state.global_step = step
    trainer.state.epoch = step / steps_per_epoch


def tell(trainer: Any, moment: str) -> None:
    """Tell the callbacks of a moment, such as "on_step_end"; what they ask for is in `trainer.control`."""
    listener: Callable[..., Any] = getattr(trainer.callback_handler, moment)
    trainer.control = listener(trainer.args, trainer.state, trainer.control)


def evaluate(trainer: Any, ignore_keys: list[str] | None) -> Any:
    """Score the evaluation data sets; a schedule that follows a score has its step."""
    return trainer._evaluate(None, ignore_keys)


def note_best(trainer: Any, metrics: Any, *, saves_best: bool) -> None:
    """Compare scores with the best so far; `saves_best`: a checkpoint is written if these are better, and only then."""
    is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
    if saves_best:
        trainer.control.should_save = is_best


def save_checkpoint(trainer: Any) -> None:
    """Write a folder of a checkpoint, and remove old ones."""
    trainer._save_checkpoint(trainer.model, trial=None)
