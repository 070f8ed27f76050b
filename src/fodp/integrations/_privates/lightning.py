"""What of Lightning's Trainer has no public name, or is set by Lightning alone.

What changes a Trainer returns a function that puts it back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource

PutBack = Callable[[], None]


def detects_anomalies(trainer: pl.Trainer) -> bool:
    """Whether the Trainer was made with detect_anomaly=True."""
    return bool(trainer._detect_anomaly)


def training_loader(trainer: pl.Trainer) -> Any:
    """The loader that the fit was given, or that the module or its data module makes."""
    return trainer.fit_loop._data_source.dataloader()


def validation_loaders(trainer: pl.Trainer) -> Any:
    """The loaders that the fit scores."""
    return trainer.fit_loop.epoch_loop.val_loop._data_source.dataloader()


def set_precision(trainer: pl.Trainer, plugin: Precision) -> PutBack:
    """The plugin that runs backward passes and the optimizer's steps."""
    strategy = trainer.strategy
    before, strategy.precision_plugin = strategy.precision_plugin, plugin

    def put_back() -> None:
        strategy.precision_plugin = before

    return put_back


def set_length(trainer: pl.Trainer, steps: int) -> PutBack:
    """The fit ends after so many steps, however many epochs these are."""
    loop = trainer.fit_loop
    before = loop.max_epochs, loop.epoch_loop.max_steps
    loop.max_epochs, loop.epoch_loop.max_steps = -1, steps

    def put_back() -> None:
        loop.max_epochs, loop.epoch_loop.max_steps = before

    return put_back


def feed(
    trainer: pl.Trainer,
    batches: Iterable[Any],
    epochs: int,
    guarded: Callable[[Callable[..., None]], Callable[..., None]],
) -> PutBack:
    """The fit takes these batches in each of so many epochs; what training logs goes through `guarded`."""
    loop = trainer.fit_loop
    source, results = loop._data_source, loop.epoch_loop._results
    loop.max_epochs = epochs  # for the progress bar; optimizers have seen the steps
    loop._data_source, loop._combined_loader = _DataLoaderSource(batches, ""), None
    results.log = guarded(results.log)

    def put_back() -> None:
        loop._data_source, loop._combined_loader = source, None
        vars(results).pop("log", None)

    return put_back


def end_if(trainer: pl.Trainer, over: bool) -> None:
    """End the fit after this step."""
    trainer.should_stop = trainer.should_stop or over
