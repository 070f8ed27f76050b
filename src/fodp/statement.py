"""A plan in plain English: what it promises, to whom, under which assumptions, and what it leaves out."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fodp import accounting
from fodp.accounting import rounded_up
from fodp.options import ClipSchedule, NoiseSchedule, Normalised, PerLayer
from fodp.options.option import numbers
from fodp.options.schedule import pieces

if TYPE_CHECKING:
    from fodp.plan import Plan


def statement(plan: "Plan", *, steps: int | None, epsilon: float | None) -> str:
    """What the plan promises, to whom, under which assumptions, and what it leaves out.

    `steps` is where the run was fixed beforehand to end, the plan's own end unless given; `epsilon` a smaller ε that
    a budget guarantees.
    """
    steps = plan.steps if steps is None else steps
    phases = accounting.truncate(plan.events(), steps)
    epsilon = plan.epsilon(steps=steps) if epsilon is None else epsilon
    pair = accounting.epsilon_for_group(phases, plan.delta, 2)
    exchanged = accounting.epsilon_replace_one(phases, plan.delta)
    randomness = (
        "Randomness: secure. Masks and noise come from operating-system entropy; no key is recorded."
        if plan.seed is None
        else "Randomness: SEEDED, a research mode. Whoever knows the seed can subtract the noise "
        "and learn who took part: against them there is no guarantee at all. The seed must not be used for a second "
        "run, on this or other data: whoever sees both subtracts the noise without knowing the seed."
    )
    words, (unit, *how) = _WORDS[plan.unit](plan), plan.described().sentences()
    unprotected = (
        "timing attacks; rounding inside the model's passes (the noise itself is exact, on a grid)"
        if plan.exact_noise
        else "floating-point and timing attacks"
    )
    lines = [
        f"This run is ({rounded_up(epsilon)}, {rounded_up(plan.delta, 6)})-differentially private.",
        unit,
        f"Mechanism: {plan.method}, {steps} steps; {words.clipped}{_clipping(plan, steps)}, "
        f"noise multiplier {plan.noise_multiplier:.6g}{_factors(plan.options.noise_schedule, steps)}.",
        *how,
        randomness,
        "It holds against someone who sees every private release, and so the model after every step.",
        f"{words.two}: epsilon {rounded_up(pair)} at the same delta; {words.more}, more.",
        f"{words.replaced}: epsilon {rounded_up(exchanged)} at the same delta.",
        f"Not covered: {words.beyond}the choice of hyper-parameters if it was made by looking at this data; scores on "
        "data that is itself private; other runs on the same data (their budgets add up); "
        "random numbers that the model, loss, data set or augmentation takes from generators of their own; "
        f"{unprotected}; the public numbers of the plan (sampling rate, lot size, steps, classes{words.public}), which "
        "must not come from the data.",
    ]
    return "\n".join(lines)


class _Words(NamedTuple):
    """What a statement calls the unit."""

    clipped: str
    two: str
    more: str
    replaced: str
    beyond: str
    public: str


def _of_records(plan: "Plan") -> _Words:
    return _Words(
        clipped="each example's gradient",
        two="A person with 2 examples in the data",
        more="with k examples",
        replaced="Replacing one example instead of adding or removing it",
        beyond="",
        public="",
    )


def _of_people(plan: "Plan") -> _Words:
    return _Words(
        clipped="each person's gradient",
        two="Two people together, or one person whose records have 2 owners' names",
        more="with k people or names",
        replaced="Replacing one person, or changing their records, instead of adding or removing them",
        beyond="what other people's records tell about a person; ",
        public=", records per person",
    )


_WORDS: dict[str, Callable[["Plan"], _Words]] = {"record": _of_records, "person": _of_people}


def _clipping(plan: "Plan", steps: int) -> str:
    options, factors = plan.options, _factors(plan.options.clip_schedule, steps)
    shaped = "" if options.scaling is None else f", each parameter's part {options.scaling.in_words},"
    if not isinstance(options.clip, PerLayer):
        done = "scaled" if isinstance(options.clip, Normalised) else "clipped"
        return f"{shaped} is {done} to norm {plan.clip_norm:g}{factors}"
    return (
        f"{shaped} is clipped layer by layer, each to a public share of norm {plan.clip_norm:g}{factors} "
        "and all together to that norm"
    )


def _factors(schedule: NoiseSchedule | ClipSchedule | None, steps: int) -> str:
    """A public schedule of factors in words; nothing where there is none."""
    if schedule is None:
        return ""
    (factors,) = numbers(schedule).values()
    held = pieces(factors, steps)
    shown = [f"{value:g} for {count} steps" for value, count in held[:6]]
    more = f" and {len(held) - 6} more values" if len(held) > 6 else ""
    return f" (times a public schedule: {', '.join(shown)}{more})"
