"""Inclusion frequencies and event counts: are the lots Poisson at the promised rate, and is every step charged?"""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Unpack

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from fodp.audit.bounds import two_sided
from fodp.audit.report import LEVEL, Finding, Progress, Refused, refused, silent
from fodp.audit.subject import Canvas, How, MakeTrainer, Pipeline, plain_trainer
from fodp.audit.tape import Tape, event_faults, record
from fodp.plan import Plan
from fodp.sampling import Lot
from fodp.support import checks

Counts = npt.NDArray[np.int64]

FEW_RECORDS, FEW_STEPS = 2, 60  # a data set so small that lots are often empty
MOST_RECORDS, MOST_STEPS = 200_000, 2000
FEWEST_LOTS, LEAST_VARIANCE = 50, 10.0  # for the one test that is not exact


def check_sampling(
    plan: Plan,
    make: MakeTrainer = plain_trainer,
    *,
    steps: int | None = None,
    confidence: float = 1 - LEVEL,
    progress: Progress = silent,
    **how: Unpack[How],
) -> Finding:
    """Run the plan's method on made-up records and count who was drawn, and what was charged.

    Every step must emit the promised events, whoever was drawn and if nobody was; over many steps, each record must
    be drawn at the declared rate, independently of the others, of other steps and of other lots. Where records take
    turns, this holds of those whose turn it is, and nobody may have two.

    Guarantee: a correct sampler fails with probability 1 - confidence at most. The tests are exact binomial ones, and
    one with matched moments for the spread of lot sizes.

    Args:
        plan: the claim under attack.
        make: what makes trainers, as `plain_trainer` does.
        steps: how many steps are counted. None: enough for the plan's rate.
        confidence: of the finding.
        progress: called with the fraction that is done.
        how: `seed` and `secure` of the audit, see `How`.

    Returns:
        A `Finding` without a bound on ε.

    Raises:
        ConfigurationError: a confidence that is no probability.

    Example:
        >>> import fodp
        >>> from fodp import audit
        >>> plan = fodp.Plan(sampling_rate=0.1, steps=5, lot_size=10, noise_multiplier=2.0, delta=1e-3)
        >>> audit.check_sampling(plan, steps=60).consistent
        True
    """
    checks.open_fraction("confidence", confidence)
    rate = plan.sampling_rate
    size = min(MOST_RECORDS, max(50, math.ceil(20 / max(rate * (1 - rate), 1e-9)))) if rate < 1 else 50
    turns = steps or min(MOST_STEPS, max(200, math.ceil(40 / rate)))
    pipeline = Pipeline(make, **how)
    faults: list[str] = []
    try:
        short, longer = (pipeline.rehearsal(plan, steps=steps) for steps in (FEW_STEPS, turns))
        few = _tape(pipeline, short, FEW_RECORDS, silent)
        faults += [f"{FEW_RECORDS} records: {f}" for f in event_faults(short, few)]
        tape = _tape(pipeline, longer, size, progress)
        faults += [f"{size} records: {f}" for f in event_faults(longer, tape)]
    except Refused as refusal:
        return refused("sampling", plan, refusal)
    p_values = dict(_tests(tape, size, plan.algorithm.turns))
    level = (1 - confidence) / max(1, len(p_values))
    faults += [f"{what} (p = {p:.2g})" for what, p in p_values.items() if p < level]
    return _finding(plan, faults, p_values, tape, size, confidence)


def _tape(pipeline: Pipeline, plan: Plan, size: int, progress: Progress) -> Tape:
    canvas = Canvas(tensors=1, width=2)
    canvas.show(torch.full((size, 1, 2), plan.clip_norm))
    return record(pipeline.painted(canvas, size, plan), watch=False, progress=progress)


def _tests(tape: Tape, everyone: int, turns: int) -> Iterator[tuple[str, float]]:
    """Each fault there may be, and how likely such counts are without it."""
    groups: dict[tuple[str, float, int], list[Lot]] = defaultdict(list)
    for (step, name), lot in tape.lots.items():
        groups[name, lot.rate, step % turns].append(lot)
    if turns > 1:
        yield from _turns(groups, everyone)
    for (name, rate, turn), lots in groups.items():
        here = f"lots {name!r} of rate {rate:g}" + (f" of group {turn}" if turns > 1 else "")
        among = _among(lots[0], everyone)
        if not (size := len(among)):
            continue
        drawn = [np.searchsorted(among, _drawn(lot)) for lot in lots]
        sizes = np.array([len(each) for each in drawn])
        if any(len(np.unique(each)) != len(each) for each in drawn):
            yield f"{here}: a record was drawn twice into one lot", 0.0
        if rate == 1:
            yield f"{here}: somebody was left out", 1.0 if (sizes == size).all() else 0.0
            continue
        total = int(sizes.sum())
        frequency = total / (size * len(lots))
        yield f"{here}: records are drawn with frequency {frequency:.4g}", two_sided(total, size * len(lots), rate)
        counts = np.bincount(np.concatenate(drawn), minlength=size)
        for word, extreme in (("least", counts.min()), ("most", counts.max())):
            p = min(1.0, size * two_sided(int(extreme), len(lots), rate))
            yield f"{here}: one record of {size} was in {extreme} of {len(lots)} lots, {word} of all", p
        if len(lots) >= FEWEST_LOTS and size * rate * (1 - rate) >= LEAST_VARIANCE:
            spread = _spread(sizes, size, rate)
            yield f"{here}: sizes spread {spread:.3g} as much as they should", _spread_p(sizes, size, rate)
        pairs = len(drawn) // 2
        shared = sum(len(np.intersect1d(drawn[2 * i], drawn[2 * i + 1])) for i in range(pairs))
        yield f"{here}: successive lots share {shared} records in all", two_sided(shared, pairs * size, rate**2)
    yield from _between_lots(tape, everyone)


def _among(lot: Lot, everyone: int) -> Counts:
    """The records that could be drawn."""
    return np.arange(everyone) if lot.among is None else np.asarray(lot.among)


def _turns(groups: dict[tuple[str, float, int], list[Lot]], everyone: int) -> Iterator[tuple[str, float]]:
    """Groups must stay as they are, and a record must be in the lots of its own group alone."""
    turn_of = np.full(everyone, -1)
    for (_, _, turn), lots in groups.items():
        members = _among(lots[0], everyone)
        steady = all(np.array_equal(_among(lot, everyone), members) for lot in lots)
        yield f"group {turn} does not keep its records", float(steady)
        yield f"a record of group {turn} is in another one too", float((turn_of[members] == -1).all())
        turn_of[members] = turn
        inside = all(np.isin(_drawn(lot), members).all() for lot in lots)
        yield f"a lot of group {turn} holds others than its records", float(inside)


def _drawn(lot: Lot) -> Counts:
    """The numbers of the records in a lot, or of the people: made-up people come in the order of their numbers."""
    return np.asarray(lot.indices if lot.owners is None else lot.owners.unique_consecutive())


def _between_lots(tape: Tape, size: int) -> Iterator[tuple[str, float]]:
    """Lots of one step with different names must be independent as well."""
    by_step: dict[int, list[Lot]] = defaultdict(list)
    for (step, _), lot in tape.lots.items():
        by_step[step].append(lot)
    shared: dict[tuple[str, str, float], list[int]] = defaultdict(list)
    for lots in by_step.values():
        for a, b in combinations(lots, 2):
            if a.rate < 1 and b.rate < 1:
                common = len(np.intersect1d(_drawn(a), _drawn(b)))
                shared[a.name, b.name, a.rate * b.rate].append(common)
    for (a_name, b_name, chance), each in shared.items():
        what = f"lots {a_name!r} and {b_name!r} of a step share {sum(each)} records in all"
        yield what, two_sided(sum(each), size * len(each), chance)


def _spread(sizes: Counts, size: int, rate: float) -> float:
    """The variance of lot sizes over that of a binomial."""
    return float(((sizes - size * rate) ** 2).mean() / (size * rate * (1 - rate)))


def _spread_p(sizes: Counts, size: int, rate: float) -> float:
    """Two-sided; a gamma distribution with the mean and variance that the sum of squares really has."""
    variance = size * rate * (1 - rate)
    per_lot = 2 + (1 - 6 * rate * (1 - rate)) / variance
    statistic = _spread(sizes, size, rate) * len(sizes)
    law = stats.gamma(len(sizes) / per_lot, scale=per_lot)
    return float(min(1.0, 2 * min(law.cdf(statistic), law.sf(statistic))))


def _finding(
    plan: Plan, faults: list[str], p_values: dict[str, float], tape: Tape, size: int, confidence: float
) -> Finding:
    events = len(tape.events())
    good = f"{events} events as promised, lots of {size} made-up records as Poisson sampling draws them"
    return Finding(
        attack="sampling",
        summary=faults[0] if faults else good,
        faults=tuple(faults),
        numbers={"events": events, "records": size, "smallest_p_value": min(p_values.values(), default=None)},
        epsilon_claimed=plan.epsilon(),
        delta=plan.delta,
        confidence=confidence,
        series={"lot sizes": [float(len(_drawn(lot))) for lot in tape.lots.values() if lot.rate < 1]},
    )
