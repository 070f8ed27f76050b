"""One-run auditing of real training with many canaries (Steinke, Nasr & Jagielski, NeurIPS 2023).

Every canary joins the data by the toss of a coin. After one ordinary training the auditor, who sees the model after
every step, guesses about the canaries that it followed most and least.
"""

import copy
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fodp.audit.bounds import one_run_epsilon
from fodp.audit.report import LEVEL, Finding, Progress, Refused, refused, silent, stepping
from fodp.audit.subject import How, MakeTrainer, Pipeline, columns, plain_trainer
from fodp.callbacks import Callback
from fodp.clipping.chunks import Chunks
from fodp.clipping.engine import Engine, LossFunction
from fodp.gradients import Gradients
from fodp.plan import Plan
from fodp.support import checks
from fodp.trainer import Trainer

# What shares of the canaries are guessed to be in and to be out; the best pair counts, and the level is split.
SHARES = tuple((each, other) for each in (0.02, 0.05, 0.1, 0.25, 0.5) for other in (each, 0.0))
CHUNK = 512  # canaries measured at a time


def attack_training(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction,
    dataset: Any,
    canaries: Any,
    make: MakeTrainer = plain_trainer,
    *,
    owners: Sequence[int | str] | None = None,
    looks: int = 50,
    confidence: float = 1 - LEVEL,
    progress: Progress = silent,
    **how: Unpack[How],
) -> Finding:
    """One training of the whole plan on the data and about half of the canaries; then guesses which half.

    Guarantee: if the training is (ε, δ)-private, the bound exceeds ε with probability at most 1 - confidence,
    whatever the model, the method and the canaries are. δ is the plan's, or smaller where the confidence demands it;
    the claimed ε is that of the plan at the same δ.

    Args:
        plan: the claim under attack.
        model, loss_fn: what is trained.
        dataset: tensors or a `TensorDataset`. The finding is computed from it without noise: publish it only if the
            data is public.
        canaries: records like those of the data; where the plan's unit is a person, each is a person.
        make: what makes trainers, as `plain_trainer` does.
        owners: where the plan's unit is a person, whose each row is. None: each row has an owner of its own.
        looks: how often the auditor looks at the model, without the augmentation.
        confidence: of the bound.
        progress: called with the fraction that is done.
        how: `seed` and `secure` of the audit, see `How`.

    Returns:
        A `Finding` with a lower bound on ε.

    Raises:
        DataError: a data set that is not made of tensors.

    Example:
        >>> import fodp, torch
        >>> from fodp import audit
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
        >>> plan = fodp.Plan(sampling_rate=0.5, steps=3, lot_size=20, noise_multiplier=2.0, delta=1e-3)
        >>> losses = lambda model, rows: torch.nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")
        >>> canaries = audit.random_canaries(data, 20, classes=2)
        >>> audit.attack_training(plan, torch.nn.Linear(3, 2), losses, data, canaries).consistent
        True
    """
    checks.open_fraction("confidence", confidence)
    pipeline = Pipeline(make, **how)
    rows, candidates = columns(dataset), columns(canaries)
    coins = torch.rand(len(candidates[0]), generator=torch.Generator().manual_seed(pipeline.seed)) < 0.5
    both = zip(rows, candidates, strict=True)
    members = TensorDataset(*(torch.cat([row, candidate[coins]]) for row, candidate in both))
    whose = range(len(rows[0])) if owners is None else owners
    names = [*(f"data {name}" for name in whose), *(f"canary {i}" for i in range(int(coins.sum())))]
    spy = _Spy(candidates, loss_fn, max(1, plan.steps // checks.whole("looks", looks)), progress)
    trainer = pipeline.trainer(copy.deepcopy(model), loss_fn, members, pipeline.rehearsal(plan), names)
    trainer.callbacks.append(spy)
    try:
        with stepping():
            reason = trainer.fit().reason
    except Refused as refusal:
        return refused("one-run", plan, refusal)
    if reason == "interrupted":
        raise KeyboardInterrupt
    return _finding(plan, spy.scores, coins, confidence)


def _finding(plan: Plan, scores: Tensor, coins: Tensor, confidence: float) -> Finding:
    """The best lower bound among the shares that may be guessed about, the level split among them."""
    count = len(scores)
    guessed = [_guess(scores, coins, *shares) for shares in SHARES]
    level = (1 - confidence) / len(SHARES)
    # Up to 2mδ of the guesses may be right for nothing, so at small levels the claim is tested at a smaller δ.
    delta = min(plan.delta, 5 * level / count)
    lower, guesses, correct = max((one_run_epsilon(count, *g, delta, level), *g) for g in guessed)
    claimed = plan.epsilon(delta=delta)
    wrong = f"at delta {delta:.2g} epsilon is at least {lower:.4g}, claimed was {claimed:.4g}"
    return Finding(
        attack="one-run",
        summary=wrong if lower > claimed else f"{correct} of {guesses} guesses about {count} canaries were right",
        faults=(wrong,) if lower > claimed else (),
        numbers={
            "canaries": count,
            "guesses": guesses,
            "correct": correct,
            "epsilon_lower_at_95_percent": max(
                one_run_epsilon(count, *g, plan.delta, 0.05 / len(SHARES)) for g in guessed
            ),
            "plan_delta": plan.delta,
        },
        epsilon_claimed=claimed,
        delta=delta,
        epsilon_lower=lower,
        confidence=confidence,
        series={"in": scores[coins].tolist(), "out": scores[~coins].tolist()},
    )


def _guess(scores: Tensor, coins: Tensor, top: float, bottom: float) -> tuple[int, int]:
    """How many guesses, and how many right ones, if the top share is said to be in and the bottom share out."""
    count = len(scores)
    ranking = scores.argsort(descending=True)
    inside, outside = ranking[: int(count * top)], ranking[count - int(count * bottom) :]
    return len(inside) + len(outside), int(coins[inside].sum() + (~coins[outside]).sum())


class _Spy(Callback):
    """Adds up how far updates went along each canary's normalised gradient: the fall of its loss over its norm."""

    def __init__(self, canaries: tuple[Tensor, ...], loss_fn: LossFunction, every: int, progress: Progress):
        self._canaries, self._loss_fn, self._every, self._progress = canaries, loss_fn, every, progress
        self.scores = torch.zeros(len(canaries[0]), dtype=torch.float64)

    def on_start(self, trainer: Trainer) -> None:
        """The first look, with an engine of its own: the run's is to look at the run's lots first."""
        self._engine = Engine(trainer.model, self._loss_fn)
        self._losses, self._norms = self._look(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Look again, now and then."""
        self._progress(trainer.step / trainer.last_step)
        if trainer.step % self._every and trainer.step != trainer.last_step:
            return
        losses, norms = self._look(trainer)
        self.scores += ((self._losses - losses) / self._norms.clamp(min=1e-12)).nan_to_num(0.0, 0.0, 0.0)
        self._losses, self._norms = losses, norms

    def _look(self, trainer: Trainer) -> tuple[Tensor, Tensor]:
        """Losses and norms; what the model draws is the same in all looks, so that they can be compared."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._measure(trainer.model)

    def _measure(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        losses: list[Tensor] = []
        for start in range(0, len(self.scores), CHUNK):
            batch = tuple(column[start : start + CHUNK] for column in self._canaries)

            def keep(norms: Tensor) -> Tensor:
                found.append(norms)
                return norms

            Gradients(Chunks(self._engine, batch), self._engine.layout).count(keep)  # asked only to be shown the norms
            with torch.no_grad():
                losses.append(self._loss_fn(model, batch).detach())
        return torch.cat(losses).double().cpu(), torch.cat(found).double().cpu()


def random_canaries(dataset: Any, count: int, classes: int, *, loudness: float = 3.0, seed: int = 0) -> TensorDataset:
    """Canaries for data of (inputs, labels), which can only be learnt by heart.

    Every input is shuffled over the data by itself and made `loudness` times as strong; labels are drawn at random.

    Args:
        dataset: tensors or a `TensorDataset` of inputs and labels.
        count: how many canaries.
        classes: how many labels there are.
        loudness: how much stronger than the data.
        seed: of what is drawn.

    Returns:
        A `TensorDataset`.

    Example:
        >>> import torch
        >>> from fodp import audit
        >>> len(audit.random_canaries((torch.randn(40, 3), torch.arange(40) % 2), 20, classes=2))
        20
    """
    inputs, labels = columns(dataset)
    generator = torch.Generator().manual_seed(seed)
    flat = inputs.flatten(1)
    rows = torch.randint(len(flat), (checks.whole("count", count), flat.shape[1]), generator=generator)
    mixed = loudness * flat.gather(0, rows).reshape(count, *inputs.shape[1:])
    drawn = torch.randint(checks.whole("classes", classes), (count,), generator=generator)
    return TensorDataset(mixed, drawn.to(labels.dtype))
