"""What `records_per_person` costs and brings, from public numbers alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fodp import _checks
from fodp._checks import ConfigurationError


@dataclass(frozen=True)
class Cost:
    """One choice of m.

    `records_per_step` is what a step computes gradients of, on average; a step of as many single records would have
    lot_size of them. `used` is the share of all records that the people who are drawn bring along. `spread` is how far,
    for people with several records, the mean over those drawn is from the mean over all of theirs, relative to how far
    one record is: 1 for m = 1, 0 where everything is used. ε is the same for every m.
    """

    records_per_person: int
    records_per_step: float
    used: float
    spread: float


def records_per_person_costs(
    records: Sequence[int], *, lot_size: float, choices: Sequence[int] | None = None
) -> list[Cost]:
    """What each choice of `records_per_person` costs, for people who have so many records each.

    `records` is a public guess: how many records typical people have, each number as often as there are such people
    ([1, 1, 2, 40]: half have one, a quarter two, a quarter forty). Never count the private data for it. `lot_size` is
    the plan's. `choices` are the m to look at (None: 1, 2, 4, … up to the most that anybody has).

    Example:
        >>> for cost in records_per_person_costs([1, 1, 2, 40], lot_size=100, choices=[1, 4]):
        ...     print(cost.records_per_person, cost.records_per_step, round(cost.used, 2), round(cost.spread, 2))
        1 100.0 0.09 1.0
        4 200.0 0.18 0.34
    """
    _checks.positive("lot_size", lot_size)
    guessed = [_checks.whole("records", number) for number in records]
    if not guessed:
        raise ConfigurationError("records must hold at least one number: how many records a typical person has")
    if choices is None:
        choices = [2**k for k in range(math.ceil(math.log2(max(guessed))) + 1)]
    return [_cost(_checks.whole("choices", most), guessed, lot_size) for most in choices]


def _cost(most: int, records: Sequence[int], lot_size: float) -> Cost:
    used = [min(most, number) for number in records]
    # Drawn without replacement: the variance of a mean of m of n is (n - m) / (m·(n - 1)) of one record's.
    several = [number for number in records if number > 1]
    squares = [max(0.0, (n - most) / (most * (n - 1))) for n in several]
    spread = math.sqrt(sum(squares) / len(several)) if several else 0.0
    return Cost(most, lot_size * sum(used) / len(records), sum(used) / sum(records), spread)
