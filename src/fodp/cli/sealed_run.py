"""One run of a sealed search, on a worker: nothing is written or shown, everything goes back to the search."""

import json
import secrets
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import TYPE_CHECKING, Any

from fodp.cli.job import Job
from fodp.errors import PrivacyError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

    from fodp.data import Splits


def sealed_run(config: str, plan: dict[str, Any], part: tuple[float, str] | None) -> dict[str, Any]:
    """Train as the plan says, on a part of the data if one is named; the score on public data and the weights.

    What a run would print is kept back: lines can be counted, and the number of runs is secret.
    """
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return _run(config, plan, part)


def _run(config: str, plan: dict[str, Any], part: tuple[float, str] | None) -> dict[str, Any]:
    import torch
    from safetensors.torch import save

    from fodp.plan import Plan
    from fodp.tuning.sealed import finite

    torch.set_num_threads(1)
    job = _job(config)
    torch.seed()
    model = job.model()
    data = None if part is None else subsample(job.splits.train, *part)
    trainer = job.trainer(model, Plan(**plan), data=data)
    lot = secrets.randbelow(2**53)
    try:
        outcome = trainer.fit()
    except PrivacyError as error:
        if "diverged" not in str(error):
            raise
        return {"score": None, "lot": lot, "weights": b""}
    if outcome.reason != "finished":
        raise PrivacyError("a run of the search was interrupted: go on with --resume")
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    return {"score": finite(_score(model, job.splits)), "lot": lot, "weights": save(weights)}


@lru_cache(maxsize=1)
def _job(config: str) -> Job:
    """The job, whose data is read once per process."""
    said = json.loads(config)
    return Job.of(said, data_dir=said.get("data_dir"), features_cache=said.get("features_cache"))


def scored_on(splits: "Splits") -> tuple[str, "TensorDataset"]:
    """The public data that decides: the validation split where there is one, so that the test split stays fresh."""
    return ("validation", splits.validation) if len(splits.validation) else ("test", splits.test)


def _score(model: Any, splits: "Splits") -> float:
    """More is better."""
    from fodp.runs.scores import accuracy, squared_error

    public = scored_on(splits)[1]
    return -squared_error(model, public)["loss"] if splits.card.is_regression else accuracy(model, public)[0]


def subsample(dataset: "TensorDataset", fraction: float, key: str) -> "TensorDataset":
    """Each record with this probability, the same ones for the same key."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    drawn = np.random.default_rng(int(key, 16)).random(len(dataset)) < fraction
    return TensorDataset(*(column[torch.from_numpy(drawn)] for column in dataset.tensors))
