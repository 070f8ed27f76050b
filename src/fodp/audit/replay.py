"""Neighbour replay: D and D' with the same masks, D' fed D's transcript, every query's distance against its bound."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset

from fodp.audit.report import Finding, Progress, Refused, refused, silent
from fodp.audit.subject import Canvas, MakeTrainer, columns, plain_trainer, rehearsal
from fodp.audit.tape import Tape, event_faults, record, same
from fodp.clipping.engine import LossFunction
from fodp.clipping.gradients import FLOAT_TOLERANCE
from fodp.plan import Plan

ROWS = 24
PLACES = {"huge": 3, "ordinary": 10, "zero": 15, "not finite": 20}  # rows of the odd examples


def replay_neighbours(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction,
    dataset: Any,
    make: MakeTrainer = plain_trainer,
    *,
    steps: int = 6,
    rate: float = 0.7,
    seed: int = 0,
    progress: Progress = silent,
) -> Finding:
    """Train on some rows of the data, then again without one of them and with everything else the same.

    Given the transcript, bounds, noise, rates and all that leaves the run must be the same with and without the
    example, to the last bit; only the queries' values may differ, by at most their bound. The examples taken away
    are an ordinary one and planted ones: huge, zero and not finite. The same is done with painted gradients instead
    of a model, where one example can be as adverse as one likes. The sampling rate is raised so that they take part;
    dropout is switched off, for its masks move with the size of a lot. Deterministic: a fault is a fault.
    """
    loud = rehearsal(plan, seed, sampling_rate=rate)
    steps = min(steps, plan.steps)
    faults: list[str] = []
    ratios: list[float] = []
    try:
        for place, problem in enumerate([(_still(model), loss_fn, *plant(dataset, seed)), paint(plan.clip_norm, seed)]):
            subject, losses, full, odd = problem
            whole = record(make(copy.deepcopy(subject), losses, full, loud), steps=steps)
            faults += event_faults(loud, whole, steps)
            for done, (kind, row) in enumerate(odd.items(), start=1):
                less = TensorDataset(*(column[torch.arange(ROWS) != row] for column in full.tensors))
                trainer = make(copy.deepcopy(subject), losses, less, loud)
                part = record(trainer, steps=steps, of=whole, without=row)
                faults += differences(whole, part, kind)
                both = zip(whole.releases, part.releases, strict=False)
                ratios += [_moved(a.value, b.value) / a.bound for a, b in both]
                progress((place + done / len(odd)) / 2)
    except Refused as refusal:
        return refused("replay", plan, refusal)
    return _finding(plan, faults, ratios)


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


def paint(clip_norm: float, seed: int = 0) -> tuple[Canvas, LossFunction, TensorDataset, dict[str, int]]:
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
    return (
        canvas,
        Canvas.losses,
        TensorDataset(torch.arange(ROWS)),
        {f"painted {kind}": row for kind, row in odd.items()},
    )


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


def _still(model: nn.Module) -> nn.Module:
    """A copy without dropout."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return copied


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
