"""White-box canary gradients on the mechanism: the auditor paints every gradient and reads every release.

Many canaries are in one sum, each in coordinates of its own and far longer than the clip norm; half of them are
in the data. From each release the auditor guesses who was. Nobody takes part by chance here (rate 1): that the
sampling is as declared is another attack's business.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.audit.bounds import epsilon_at_exposure, exposure_lower
from fodp.audit.report import LEVEL, Finding, Progress, Refused, refused, silent, stepping
from fodp.audit.subject import Canvas, How, MakeTrainer, Pipeline, plain_trainer
from fodp.plan import Plan
from fodp.support import checks

TENSORS = 3
CANARIES = 64  # of each direction in a step, half of them in the data
BLANKS = 320  # coordinates of each tensor that carry nothing but noise
LAGS = 8  # earlier releases from which a release is predicted
OTHERS = 2  # examples that are always there
MOST_TRIALS = 400_000
LOUD = 100.0  # a canary's gradient, in clip norms
WIDTH = 2 * CANARIES + OTHERS + BLANKS
SPREAD = "all tensors"
DIRECTIONS = (*(f"tensor {k}" for k in range(TENSORS)), SPREAD)

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def attack_mechanism(
    plan: Plan,
    make: MakeTrainer = plain_trainer,
    *,
    trials: int | None = None,
    confidence: float = 1 - LEVEL,
    progress: Progress = silent,
    **how: Unpack[How],
) -> Finding:
    """White-box attack: the auditor paints every gradient, reads every release, and guesses who was in the data.

    Guarantee: if every step adds independent Gaussian noise of the promised multiplier to a sum in which one example
    moves by at most its bound, the bound exceeds the plan's ε with probability at most 1 - confidence. It is tight:
    with many trials it comes close to ε. It assumes Poisson sampling as declared, and Gaussian noise.

    Where records take turns, the auditor knows whose turn it is and guesses about these. Of correlated noise it uses
    what earlier releases say and not what later ones do, as an adversary could: the bound is then less tight.

    Args:
        plan: the claim under attack.
        make: what makes trainers, as `plain_trainer` does.
        trials: guesses for each direction of the gradient (each tensor, and all at once). None makes as many as show
            an error of a tenth in the noise, and not more than 400 000.
        confidence: of the bound.
        progress: called with the fraction that is done.
        how: `seed` and `secure` of the audit, see `How`.

    Returns:
        A `Finding` with a lower bound on ε.

    Raises:
        ConfigurationError: a number that cannot be.

    Example:
        >>> import fodp
        >>> from fodp import audit
        >>> plan = fodp.Plan(sampling_rate=0.1, steps=5, lot_size=10, noise_multiplier=2.0, delta=1e-3)
        >>> audit.attack_mechanism(plan, trials=640).consistent
        True
    """
    checks.open_fraction("confidence", confidence)
    wanted = min(MOST_TRIALS, math.ceil(15_000 / _promised_signal(plan, 0) ** 2)) if trials is None else trials
    turns = math.ceil(checks.whole("trials", wanted) / CANARIES)
    guesses = _Guesses()
    pipeline = Pipeline(make, **how)
    generator = torch.Generator().manual_seed(pipeline.seed)
    while guesses.steps < turns:
        run = replace(pipeline, seed=pipeline.seed + guesses.steps)  # each run has noise of its own
        try:
            _attack_run(run, plan, turns, guesses, generator, progress)
        except Refused as refusal:
            return refused("mechanism", plan, refusal)
    return _finding(plan, guesses, confidence)


class _Guesses:
    """What was guessed, and what was promised about how often guesses are right."""

    def __init__(self) -> None:
        self.steps = 0
        self.signals: defaultdict[str, list[float]] = defaultdict(list)  # promised μ behind each guess
        self.correct: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)
        self.scores: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, scores: dict[str, Array], present: dict[str, Mask], turn: dict[str, Mask], signal: float) -> None:
        self.steps += 1
        for direction, every in scores.items():
            each, there = every[turn[direction]], present[direction][turn[direction]]
            self.signals[direction] += [signal] * len(each)
            self.correct[direction] += int(((each > signal / 2) == there).sum())
            if len(self.scores["in"]) < 5000:
                self.scores["in"] += each[there].tolist()
                self.scores["out"] += each[~there].tolist()


def _attack_run(
    pipeline: Pipeline,
    plan: Plan,
    turns: int,
    guesses: _Guesses,
    generator: torch.Generator,
    progress: Progress,
) -> None:
    """One run of the plan in which everyone takes part, or of as many steps as are wanted."""
    plan = pipeline.rehearsal(plan, sampling_rate=1.0)
    present = {d: _half(generator) for d in DIRECTIONS}
    members = np.concatenate([np.ones(OTHERS, dtype=bool), *present.values()])
    canvas = Canvas(TENSORS, WIDTH)
    canvas.show(torch.zeros(len(members), TENSORS, WIDTH))
    session = pipeline.painted(canvas, torch.from_numpy(np.flatnonzero(members)), plan).session
    groups = plan.algorithm.turns
    drawn = torch.randint(groups, (len(members),), generator=generator) if groups > 1 else torch.zeros(len(members))
    places_in_data, absent_turns = np.cumsum(members) - 1, drawn.numpy()  # who is absent would have had some turn
    past: list[Array] = []
    for step in range(min(plan.steps, turns - guesses.steps)):
        painting, places = _paint(LOUD * plan.clip_norm, generator)
        canvas.show(painting)
        with stepping():
            released = session.take_step().detach().double().numpy().reshape(TENSORS, WIDTH)
        among = session.lots.whose_turn(step)
        there = np.ones(len(members), dtype=bool) if among is None else np.isin(places_in_data, among.numpy())
        turn = np.split(np.where(members, there, absent_turns == step % groups)[OTHERS:], len(DIRECTIONS))
        whose = dict(zip(DIRECTIONS, turn, strict=True))
        guesses.add(_scores(released, past, places), present, whose, _promised_signal(plan, step))
        past = [*past, released][-LAGS:]
        progress(guesses.steps / turns)


def _half(generator: torch.Generator) -> Mask:
    """Exactly half of the canaries of one direction."""
    return (torch.randperm(CANARIES, generator=generator) < CANARIES // 2).numpy()


def _promised_signal(plan: Plan, step: int) -> float:
    """μ of a step's events together: how far apart its releases with and without an example may be, over the noise."""
    return float(np.sqrt(sum(event.noise_multiplier**-2 for event in plan.events_at(step))))


def _paint(length: float, generator: torch.Generator) -> tuple[Tensor, list[npt.NDArray[np.int64]]]:
    """Gradients for one step, in fresh coordinates: others, one-tensor canaries, spread canaries, blanks."""
    rows = torch.zeros(OTHERS + len(DIRECTIONS) * CANARIES, TENSORS, WIDTH)
    spread = OTHERS + TENSORS * CANARIES
    places = []
    for k in range(TENSORS):
        place = torch.randperm(WIDTH, generator=generator)
        one = OTHERS + k * CANARIES
        rows[torch.arange(OTHERS), k, place[:OTHERS]] = length
        rows[torch.arange(one, one + CANARIES), k, place[OTHERS : OTHERS + CANARIES]] = length
        last = place[OTHERS + CANARIES : OTHERS + 2 * CANARIES]
        rows[torch.arange(spread, spread + CANARIES), k, last] = length / TENSORS**0.5
        places.append(place.numpy())
    return rows, places


def _scores(released: Array, past: list[Array], places: list[npt.NDArray[np.int64]]) -> dict[str, Array]:
    """How much of each canary is in a release, in units of the noise.

    What earlier releases say about this one (a memory, a filter, noise that is not fresh) is learnt from the blank
    coordinates and taken off, and so is the scale of the noise that is left.
    """
    scores: dict[str, Array] = {}
    spread = np.zeros(CANARIES)
    for k, place in enumerate(places):
        left = released[k]
        blank = place[OTHERS + 2 * CANARIES :]
        if past:
            lags = np.stack([earlier[k] for earlier in past], axis=1)
            left = left - lags @ np.linalg.lstsq(lags[blank], left[blank], rcond=None)[0]
        noise = np.sqrt((left[blank] ** 2).sum() / (BLANKS - len(past)))
        left = left / max(noise, 1e-12 * np.abs(released).max(), 1e-300)
        scores[f"tensor {k}"] = left[place[OTHERS : OTHERS + CANARIES]]
        spread = spread + left[place[OTHERS + CANARIES : OTHERS + 2 * CANARIES]] / TENSORS**0.5
    scores[SPREAD] = spread
    return scores


def _finding(plan: Plan, guesses: _Guesses, confidence: float) -> Finding:
    claimed = plan.epsilon()
    level = (1 - confidence) / len(DIRECTIONS)
    signals = guesses.signals
    shown = {d: exposure_lower(n, signals[d], level) for d, n in guesses.correct.items()}
    worst = max(shown.values())
    lower = epsilon_at_exposure(plan.events(), plan.delta, worst)
    faults = tuple(
        f"a gradient in {direction} shows at least {times:.3g} times as much as promised"
        for direction, times in sorted(shown.items(), key=lambda item: -item[1])
        if times > 1
    )
    accuracy = {d: n / max(1, len(signals[d])) for d, n in guesses.correct.items()}
    return Finding(
        attack="mechanism",
        summary=faults[0] if faults else f"canary gradients show at least {worst:.3g} of what was promised",
        faults=faults,
        numbers={"guesses": sum(map(len, signals.values())), "accuracy": accuracy, "exposure_lower": shown},
        epsilon_claimed=claimed,
        delta=plan.delta,
        epsilon_lower=lower,
        confidence=confidence,
        series=dict(guesses.scores),
    )
