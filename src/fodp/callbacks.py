"""Everything optional about training, as `Trainer(…, callbacks=[…])` takes it: see each class."""

from fodp.training.callbacks import (
    Callback,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    Evaluate,
    Progress,
    TensorBoard,
    WeightAverage,
)
from fodp.training.loggers import MLflow, WandB

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
