"""What does not go together: one table for options, methods, plans and doors. `docs/conflicts.md` is made of it.

    python -m fodp.options.conflicts > docs/conflicts.md

A plan tells its features, words of this table with what a message calls them (`Plan.features`, made of those of its
options and its method). A door is a way to train: the Trainer, a loop of your own, or another package. It says which of
its own words (`DOORS`) hold, and asks `refuse` once, before anything is charged.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fodp.errors import ConfigurationError
from fodp.support.checks import listed

# Words of doors and of what they were given, each with what a message calls it.
DOORS: Mapping[str, str] = {
    "own loop": "a loop of your own",
    "Hugging Face": "Hugging Face's Trainer",
    "Lightning": "Lightning",
    "several processes": "several processes",
    "a resumed loop": "resume in a loop of your own",
    "a lot in parts": "microbatch in a loop of your own",
    "an optimizer of yours": "an optimizer of yours",
    "a scheduler": "a scheduler",
    "owners": "owners",
    "no owners": "a run without owners",
    "no public score": "a run without public_score",
}


class Conflict(NamedTuple):
    """Two features that cannot be in one run, why, and the way out."""

    one: str
    other: str
    because: str
    instead: str


CONFLICTS: tuple[Conflict, ...] = (
    Conflict("clip='normalised'", "a quantile",
             "the first brings every gradient to the clip norm, and the second counts those below it",
             "leave one of them out"),
    Conflict("clip_schedule", "a quantile",
             "the first fixes the clip norm of every step beforehand, and the second adapts it",
             "leave one of them out"),
    Conflict("shape='kronecker'", "an update that takes out its noise",
             "the update must know the noise of every number, and the shape mixes it",
             "use another update, or shape='fan-in'"),
    Conflict("shape='transcript'", "an update that takes out its noise",
             "the update must know the noise of every number, and the shape moves it",
             "use another update, or shape='fan-in'"),
    Conflict("shape='kronecker'", "own loop",
             "the shape shows made-up records to the model and its loss, and in a loop of your own the loss is yours",
             "use fodp.Trainer, or another shape"),
    Conflict("a method that filters its noise", "a filter before an update that takes out its noise",
             "the update must know the variance of what it gets, and two filters hide it",
             "leave out the filter, or use another update"),
    Conflict("a method that weighs whole gradients", "clip='per-layer'",
             "a weight of a whole gradient is not one of its layers", "leave clip at 'flat'"),
    Conflict("a method that weighs whole gradients", "clip='normalised'",
             "normalised gradients have one norm, and none to weigh by", "leave clip at 'flat'"),
    Conflict("rate_rule='transcript'", "correlated noise",
             "the rule asks what is fresh in a release", "leave rate_rule out, or use bands=1"),
    Conflict("exact_noise", "correlated noise",
             "exact noise lies on a grid, and multiples of earlier noise do not",
             "leave out exact_noise, or use bands=1"),
    Conflict("unit='person'", "no owners", "owners say whose each record is", "give owners, a name for each record"),
    Conflict("unit='record'", "owners", "owners are about people, and the plan's unit is a record",
             "make the plan with unit='person' and records_per_person, or leave owners out"),
    Conflict("unit='person'", "own loop",
             "the records of a person are summed before they are clipped, and a loop of your own sums over records",
             "use fodp.Trainer"),
    Conflict("unit='person'", "several processes",
             "processes divide records among them, and the records of a person would be clipped on each",
             "train in one process"),
    Conflict("a method that scores proposals", "no public score", "proposals are scored on data declared public",
             "give fodp.Trainer public_score, or use another method"),
    Conflict("a method that brings its own update", "an optimizer of yours", "only one of them can make the update",
             "use fodp.Trainer with optimizer=None, and set the method's params"),
    Conflict("a rate in params", "an optimizer of yours", "the optimizer has a rate of its own, and params would do "
             "nothing", "set it in the optimizer and leave it out of params, or use fodp.Trainer with optimizer=None"),
    Conflict("a rate that moves", "a scheduler", "both would move the rate", "leave one of them out"),
    Conflict("a method that draws several lots", "own loop", "a loop of your own has one lot in a step",
             "use fodp.Trainer"),
    Conflict("a method that moves points", "own loop",
             "a loop of your own computes gradients at the model's own weights", "use fodp.Trainer"),
    Conflict("a resumed loop", "several processes", "each process would need a checkpoint of its own lots",
             "use fodp.Trainer, or one process"),
    Conflict("a lot in parts", "several processes", "processes divide a lot themselves",
             "use fodp.Trainer, or leave microbatch out"),
    Conflict("a rate that moves", "Hugging Face", "TrainingArguments(lr_scheduler_type=…, warmup_steps=…) alone moves "
             "the rate there", "leave it out of params"),
    Conflict("a rate in params", "Hugging Face", "the learning rate is TrainingArguments(learning_rate=…) there",
             "set it there and leave it out of params"),
    Conflict("an average", "Lightning", "Lightning scores and saves the module itself, which is the last iterate",
             "set average='none' (a plan without a method averages by itself) and use Lightning's callback "
             "WeightAveraging, which costs no epsilon either"),
)  # fmt: skip


def refuse(features: Mapping[str, str], facts: Mapping[str, bool] = MappingProxyType({})) -> None:
    """Raise if two of these features do not go together.

    Args:
        features: words of the table, each with what the message calls it: `plan.features`.
        facts: words of `DOORS`, each with whether it holds for this door.

    Raises:
        ConfigurationError: for every conflict it names both features, the reason and the way out.

    Example:
        >>> refuse({"clip_schedule": "clip_schedule", "exact_noise": "exact_noise"})
        >>> refuse({"clip_schedule": "clip_schedule", "a quantile": "quantile=0.5"})
        Traceback (most recent call last):
        fodp.errors.ConfigurationError: clip_schedule and quantile=0.5 do not go together: the first fixes ...
        >>> refuse({"unit='person'": "unit='person'"}, {"own loop": True, "several processes": False})
        Traceback (most recent call last):
        fodp.errors.ConfigurationError: unit='person' and a loop of your own do not go together: the records ...
    """
    said = {**features, **{word: DOORS[word] for word, holds in facts.items() if holds}}
    found = [
        f"{said[c.one]} and {said[c.other]} do not go together: {c.because}; {c.instead}"
        for c in CONFLICTS
        if c.one in said and c.other in said
    ]
    if found:
        raise ConfigurationError(listed(found))


def markdown() -> str:
    """The page docs/conflicts.md."""
    lines = [
        "# What does not go together",
        "",
        "<!-- Generated by `python -m fodp.options.conflicts > docs/conflicts.md`; a test compares it. -->",
        "",
        "Everything else composes: a test trains every pair of options, every option with every method, and both in",
        "every way to train. A pair of this table is refused when the plan is made, or when a way to train is given",
        "the plan: before any data is touched and before anything is charged.",
        "",
        "| this | and this | because | instead |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(conflict)} |" for conflict in CONFLICTS),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
