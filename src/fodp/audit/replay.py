"""Neighbour replay: D and D' with the same masks, D' fed D's transcript, every query's distance against its bound."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fodp.audit.report import Finding, Progress, Refused, refused, silent
from fodp.audit.subject import Canvas, How, MakeTrainer, Pipeline, columns, in_short, plain_trainer
from fodp.audit.tape import Tape, event_faults, record, same
from fodp.clipping.engine import LossFunction
from fodp.gradients import FLOAT_TOLERANCE
from fodp.plan import Plan
from fodp.trainer import Trainer

ROWS = 24
STEPS = 10  # a window of 8 releases is full by then, and a rate rule has heard some
PLACES = {"huge": 3, "ordinary": 10, "zero": 15, "not finite": 20}  # rows of the odd examples


def replay_neighbours(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction,
    dataset: Any,
    make: MakeTrainer = plain_trainer,
    *,
    steps: int = STEPS,
    rate: float = 0.7,
    progress: Progress = silent,
    **how: Unpack[How],
) -> Finding:
    """Train on some rows of the data, then again without one of them and with everything else the same.

    Given the transcript, bounds, noise, rates and all that leaves the run must be the same with and without the
    example, to the last bit; only the queries' values may differ, by at most their bound. The examples taken away
    are an ordinary one and planted ones: huge, zero and not finite. Where the plan's unit is a person, a person with
    all of their rows is taken away. The same is done with painted gradients instead of a model, where one example can
    be as adverse as one likes. Model, loss and augmentation draw as in training: what they draw for the others must
    not change with the example.

    Guarantee: deterministic. A fault is a fault.

    Args:
        plan: the claim under attack. A longer plan is replayed in short: its noise stays, its schedules and all that
            is counted in its steps are shortened with it, so that what acts late in the plan acts in the replay.
        model, loss_fn: what is trained.
        dataset: tensors or a `TensorDataset`, of which some rows are taken.
        make: what makes trainers, as `plain_trainer` does.
        steps: how many steps at most.
        rate: the sampling rate of the replay, high enough for the odd examples to take part.
        progress: called with the fraction that is done.
        how: `seed` and `secure` of the audit, see `How`. With `secure` None both modes are replayed.

    Returns:
        A `Finding` with the distance of every query over its bound.

    Raises:
        DataError: a data set that is not made of tensors.

    Example:
        >>> import fodp, torch
        >>> from fodp import audit
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
        >>> plan = fodp.Plan(sampling_rate=0.5, steps=3, lot_size=20, noise_multiplier=2.0, delta=1e-3)
        >>> losses = lambda model, rows: torch.nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")
        >>> audit.replay_neighbours(plan, torch.nn.Linear(3, 2), losses, data).consistent
        True
    """
    steps = min(steps, plan.steps)
    faults: list[str] = []
    ratios: list[float] = []
    pipeline = Pipeline(make, **how)
    problems = list(_problems(pipeline, in_short(plan, steps), model, loss_fn, dataset, rate))
    try:
        for place, problem in enumerate(problems):
            whole = record(problem.trainer(problem.full, problem.owners), steps=steps)
            faults += event_faults(problem.plan, whole, steps)
            for done, (kind, row) in enumerate(problem.odd.items(), start=1):
                gone = int(problem.owners[row])
                stay = problem.owners != gone
                less = TensorDataset(*(column[stay] for column in problem.full.tensors))
                part = record(problem.trainer(less, problem.owners[stay]), steps=steps, of=whole, without=gone)
                faults += differences(whole, part, f"{kind} ({problem.mode})")
                both = zip(whole.releases, part.releases, strict=False)
                ratios += [_moved(a.value, b.value) / a.bound for a, b in both]
                progress((place + done / len(problem.odd)) / len(problems))
    except Refused as refusal:
        return refused("replay", plan, refusal)
    return _finding(plan, faults, ratios)


@dataclass(frozen=True)
class _Problem:
    """A pipeline, data for it, whose each row is, and which rows are taken away, with all others of their owner."""

    plan: Plan
    trainer: Callable[[TensorDataset, Tensor], Trainer]
    full: TensorDataset
    odd: dict[str, int]
    owners: Tensor

    @property
    def mode(self) -> str:
        return "secure" if self.plan.seed is None else "seeded"


def _problems(
    pipeline: Pipeline, plan: Plan, model: nn.Module, loss_fn: LossFunction, dataset: Any, rate: float
) -> Iterator[_Problem]:
    """The real model in every mode that is asked for, and painted gradients in one."""
    full, odd = plant(dataset, pipeline.seed)
    for secure in (False, True) if pipeline.secure is None else (pipeline.secure,):
        loud = replace(pipeline, secure=secure).rehearsal(plan, sampling_rate=rate)

        def trainer(rows: TensorDataset, owners: Tensor, loud: Plan = loud) -> Trainer:
            return pipeline.trainer(copy.deepcopy(model), loss_fn, rows, loud, owners.tolist())

        # Of people, each has two rows.
        yield _Problem(loud, trainer, full, odd, torch.arange(ROWS) // (2 if plan.unit == "person" else 1))
    loud = pipeline.rehearsal(plan, sampling_rate=rate)
    canvas, records, painted_odd = paint(plan.clip_norm, pipeline.seed)
    yield _Problem(
        loud,
        lambda rows, _: pipeline.painted(copy.deepcopy(canvas), rows.tensors[0], loud),
        records,
        painted_odd,
        torch.arange(ROWS),
    )


def plant(dataset: Any, seed: int = 0) -> tuple[TensorDataset, dict[str, int]]:
    """A few rows of the data with odd ones among them, and where those are."""
    found = columns(dataset)
    taken = torch.randint(len(found[0]), (ROWS,), generator=torch.Generator().manual_seed(seed))
    picked = [column[taken].clone() for column in found]
    for column in picked:
        if column.is_floating_point():
            signs = torch.ones_like(column[0])
            signs.view(-1)[1::2] = -1
            column[PLACES["huge"]] = 1e4 * signs
            column[PLACES["zero"]] = 0
            column[PLACES["not finite"]] = math.nan
    floating = any(column.is_floating_point() for column in picked)
    return TensorDataset(*picked), PLACES if floating else {"ordinary": PLACES["ordinary"]}


def paint(clip_norm: float, seed: int = 0) -> tuple[Canvas, TensorDataset, dict[str, int]]:
    """Painted gradients of all lengths; of the odd ones, "opposed" is long and against the sum of the ordinary ones."""
    canvas = Canvas(tensors=3, width=4)
    rows = torch.randn(ROWS, 3, 4, generator=torch.Generator().manual_seed(seed))
    lengths = clip_norm * 10 ** torch.linspace(-1, 1, ROWS)
    rows *= (lengths / rows.flatten(1).norm(dim=1)).view(-1, 1, 1)
    odd = {"opposed": 7, **PLACES}
    rows[odd["opposed"]] = -10 * rows.sum(0)
    rows[odd["huge"]] = 1e6 * clip_norm
    rows[odd["zero"]] = 0
    rows[odd["not finite"]] = math.nan
    canvas.show(rows)
    return canvas, TensorDataset(torch.arange(ROWS)), {f"painted {kind}": row for kind, row in odd.items()}


def differences(whole: Tape, part: Tape, kind: str) -> list[str]:
    """What changes too much between two taped runs; [] if nothing does."""
    faults = []
    if len(part.releases) != len(whole.releases):
        faults.append(f"{kind}: {len(whole.releases)} releases become {len(part.releases)}")
    for a, b in zip(whole.releases, part.releases, strict=False):
        here = f"{kind}, step {a.step}, {a.lot.name}"
        public: Mapping[str, tuple[float, float]] = {
            "bound": (a.bound, b.bound),
            "std": (a.std, b.std),
            "rate": (a.lot.rate, b.lot.rate),
        }
        faults += [f"{here}: {name} {x:g} becomes {y:g}" for name, (x, y) in public.items() if x != y]
        moved = _moved(a.value, b.value)
        # Sums of n terms of norm C carry rounding errors of this size; in float64 they vanish.
        rounding = 8 * torch.finfo(a.value.dtype).eps * max(a.value.norm().item(), len(a.lot.indices) * a.bound)
        if not moved <= a.bound * (1 + FLOAT_TOLERANCE) + rounding:
            faults.append(f"{here}: moved by {moved:g}, declared bound {a.bound:g}")
    for step, (x, y) in enumerate(zip(whole.seen, part.seen, strict=False)):
        faults += [f"{kind}: {what} after step {step} differs" for what in x if not same(x[what], y[what])]
    return faults


def _moved(a: Tensor, b: Tensor) -> float:
    return (a - b).norm().item()


def _finding(plan: Plan, faults: list[str], ratios: list[float]) -> Finding:
    worst = max(ratios, default=None)
    summary = faults[0] if faults else f"{len(ratios)} query pairs, the furthest moved {worst or 0:.6g} of its bound"
    return Finding(
        attack="replay",
        summary=summary,
        faults=tuple(faults),
        numbers={"queries": len(ratios), "worst_ratio": worst},
        epsilon_claimed=plan.epsilon(),
        delta=plan.delta,
        series={"distance over bound": ratios},
    )
