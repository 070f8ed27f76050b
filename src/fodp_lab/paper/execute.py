"""One run of an experiment, from a spec to a record."""

import platform
import time
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fodp.callbacks import Callback
from fodp.cli._malloc import keep_freed_memory
from fodp.data import Splits
from fodp.data.models import cross_entropy
from fodp.identity.private_data import declare_public
from fodp.lots.poisson import PoissonSampler
from fodp.noise import Streams
from fodp.runs.scores import accuracy
from fodp.trainer import Trainer
from fodp_lab.paper import models
from fodp_lab.paper.code_version import code_of
from fodp_lab.paper.spec import NON_PRIVATE, RunSpec, recorded
from fodp_lab.paper.variants import augmenting, varied

_PUBLIC_SCORE = 1000  # of the validation examples: for methods that score proposals, not for choosing settings


class Curve(Callback):
    """Test (or validation) accuracy now and then; best and final come from it."""

    def __init__(self, model: nn.Module, dataset: TensorDataset, every: int):
        self.model, self.dataset, self.every = model, dataset, every
        self.steps: list[int] = []
        self.accuracy: list[float] = []
        self.loss = float("nan")

    def on_step(self, trainer: Trainer) -> None:
        """Score at every `every`-th step and at the last: the average of the iterates, where the plan has one."""
        if self._is_due(trainer.step, last := trainer.step == trainer.last_step):
            with trainer.averaged():
                self.score(trainer.step, last)

    def score(self, step: int, last: bool) -> None:
        """Add a point to the curve, if one is due."""
        if self._is_due(step, last):
            score, self.loss = accuracy(self.model, self.dataset)
            self.steps.append(step)
            self.accuracy.append(score)

    def _is_due(self, step: int, last: bool) -> bool:
        return step % self.every == 0 or last


def execute(spec: RunSpec) -> dict[str, Any]:
    """Train as the spec says, on one thread, and return the record. The same spec gives the same record."""
    torch.set_num_threads(1)
    keep_freed_memory()
    splits = splits_for(spec.dataset, spec.model)
    torch.manual_seed(spec.seed)
    model = models.make(spec.model, splits.card)
    splits = varied(spec.variant, splits, model)
    curve = Curve(model, _scored(spec, splits), spec.score_every)
    started = time.perf_counter()
    if spec.method == NON_PRIVATE:
        _train_without_privacy(spec, splits, model, curve)
        claim: dict[str, Any] = {"epsilon": None, "noise_multiplier": 0.0, "params": dict(spec.params)}
    else:
        trainer = make_trainer(spec, splits, model, [curve])
        outcome = trainer.fit()
        plan = trainer.plan
        claim = {
            "epsilon": outcome.epsilon,
            "noise_multiplier": plan.noise_multiplier,
            "params": recorded(plan),
        }
    return {
        "key": spec.key,
        "code": code_of(spec),
        "run": spec.to_dict(),
        "algorithm": spec.method,
        "seed": spec.seed,
        "final_accuracy": curve.accuracy[-1],
        "best_accuracy": max(curve.accuracy),
        "final_loss": round(curve.loss, 6),
        "final_epsilon": claim["epsilon"],
        "noise_multiplier": claim["noise_multiplier"],
        "params": claim["params"],
        "seconds": round(time.perf_counter() - started, 2),
        "curve": {"steps": curve.steps, "accuracy": [round(a, 4) for a in curve.accuracy]},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def make_trainer(spec: RunSpec, splits: Splits, model: nn.Module, callbacks: list[Callback]) -> Trainer:
    """The trainer of a private run."""
    public = declare_public(TensorDataset(*splits.validation[: _public(splits)]))  # a split of a public data set
    return Trainer(
        model,
        cross_entropy,
        splits.train,
        spec.plan(),
        callbacks=callbacks,
        last_step=spec.steps,
        public_score=lambda: accuracy(model, public)[1],
        **augmenting(spec.variant, splits.card),
    )


@lru_cache(maxsize=3)
def splits_for(dataset: str, model: str) -> Splits:
    """The data, read once per process."""
    return models.splits(dataset, model)


def _public(splits: Splits) -> int:
    """How many validation examples score proposals: a tenth where there are few."""
    few = len(splits.validation) < 2 * _PUBLIC_SCORE
    return len(splits.validation) // 10 if few else _PUBLIC_SCORE


def _scored(spec: RunSpec, splits: Splits) -> TensorDataset:
    if spec.scored_on == "test":
        return splits.test
    return TensorDataset(*splits.validation[_public(splits) :])


def _train_without_privacy(spec: RunSpec, splits: Splits, model: nn.Module, curve: Curve) -> None:
    """Plain SGD on the same Poisson lots, divided by the same L: no clipping, no noise, no guarantee."""
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.params["lr"])
    sampler = PoissonSampler(len(splits.train), spec.sampling_rate, Streams.seeded(spec.seed))
    for step in range(spec.steps):
        lot = sampler.draw(step)
        optimizer.zero_grad()
        loss = cross_entropy(model, splits.train[lot.indices]).sum() / spec.lot_size
        loss.backward()
        optimizer.step()
        curve.score(step + 1, last=step + 1 == spec.steps)
