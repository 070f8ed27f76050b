"""TensorBoard, Weights & Biases and MLflow as callbacks: they get ε, public scores and the public numbers of a plan."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.callbacks import Callback
from fodp.ledger.store import whole_minutes
from fodp.support.extras import need

if TYPE_CHECKING:
    from fodp.trainer import Trainer


def _public_numbers(trainer: "Trainer") -> dict[str, Any]:
    """The plan without its seed, by which a reader could subtract the noise."""
    plan = {name: value for name, value in trainer.plan.to_dict().items() if name not in ("seed", "params")}
    return plan | {f"params.{name}": value for name, value in trainer.plan.params.items()}


def _new_scores(trainer: "Trainer") -> dict[str, float]:
    """ε of the steps so far, and every public score that is new."""
    scores = {name: score for name, score in trainer.metrics.items() if name in trainer.metrics.new}
    return {"epsilon": trainer.epsilon(), **scores}


class TensorBoard(Callback):
    """The ε of the steps so far and every new public score, at the step it belongs to (needs the extra `tensorboard`).

    Times are whole minutes, as in all files of a run: more exact ones tell how large the lots were.
    """

    order = 1

    def __init__(self, folder: str | Path):
        need("tensorboard", "the callback TensorBoard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write the scalars of this epoch."""
        for name, value in _new_scores(trainer).items():
            self._writer.add_scalar(name, value, trainer.step, walltime=whole_minutes())

    def on_stop(self, trainer: "Trainer") -> None:
        """Flush to disk."""
        self._writer.flush()


class WandB(Callback):
    """ε and every new public score as a run of Weights & Biases, in files of `folder` (needs the extra `wandb`).

    Offline, until you say `wandb sync`; `mode="online"` sends it at once. Everything is written when the fit ends: W&B
    notes the microsecond of every row, and while training these would tell how large the lots were. Other words go to
    `wandb.init`.
    """

    order = 1

    def __init__(self, project: str, folder: str | Path = ".", *, mode: str = "offline", **words: Any):
        need("wandb", "the callback WandB", extra="wandb")
        self._words = {"project": project, "dir": str(folder), "mode": mode, **words}
        self._rows: list[tuple[int, dict[str, float]]] = []

    def on_epoch(self, trainer: "Trainer") -> None:
        """Note the scores of this epoch."""
        self._rows.append((trainer.step, _new_scores(trainer)))

    def on_stop(self, trainer: "Trainer") -> None:
        """Write all of them."""
        import wandb

        Path(self._words["dir"]).mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(x_disable_stats=True, x_disable_meta=True, disable_git=True, console="off", silent=True)
        run = wandb.init(config=_public_numbers(trainer), settings=quiet, **self._words)
        for step, scores in self._rows:
            run.log(scores, step=step)
        run.finish()
        self._rows = []


class MLflow(Callback):
    """ε and every new public score as a run of MLflow, in files of `folder` (needs the extra `mlflow`).

    Times are whole minutes, as in all files of a run: more exact ones tell how large the lots were.
    """

    order = 1

    def __init__(self, folder: str | Path, experiment: str = "fodp"):
        need("mlflow", "the callback MLflow", extra="mlflow")
        self.folder, self.experiment = Path(folder).resolve(), experiment
        self.run_id: str | None = None

    def _client(self) -> Any:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are what was asked for
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.folder.as_uri())

    def on_start(self, trainer: "Trainer") -> None:
        """Begin a run with the plan's public numbers."""
        client = self._client()
        known = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if known is None else known.experiment_id
        self.run_id = client.create_run(number, start_time=self._now()).info.run_id
        for name, value in _public_numbers(trainer).items():
            client.log_param(self.run_id, name, value)

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write the scores of this epoch."""
        for name, value in _new_scores(trainer).items():
            self._client().log_metric(self.run_id, name, value, timestamp=self._now(), step=trainer.step)

    def on_stop(self, trainer: "Trainer") -> None:
        """End the run."""
        if self.run_id is not None:
            self._client().set_terminated(self.run_id, end_time=self._now())

    @staticmethod
    def _now() -> int:
        return int(whole_minutes() * 1000)
