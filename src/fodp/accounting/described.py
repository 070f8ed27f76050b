"""Sampling, noise and unit of a run in sentences: the one place that writes them, for every paper of the run.

Statement, configuration, cards and ledger say the same words, made of the promised events and of few public facts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fodp.accounting.events import Phase, rounded_up

ACCOUNTANT_NAMES = {
    "pld": "privacy loss distributions (tight)",
    "rdp": "Rényi DP with the tight conversion",
    "rdp-classic": "Rényi DP with the classic conversion (the paper's formula)",
}
_UNITS = {
    "record": "Unit: one training example. Adjacency: add or remove one example.",
    "person": "Unit: one person. Adjacency: one person with all of their records is added or removed.",
}
_PROTECTED = {
    "record": "one training example, added or removed",
    "person": "one person with all of their records, added or removed",
}
_NAMES = {"record": ("example", "examples"), "person": ("person", "people")}


@dataclass(frozen=True)
class Described:
    """What the sentences are made of: the events of the whole plan, and what they do not tell.

    `bands` is over how many steps noise is correlated; 1: not at all.
    """

    phases: tuple[Phase, ...]
    unit: str = "record"
    records_per_person: int | None = None
    person_gradient: str = "mean"
    bands: int = 1
    exact_noise: bool = False
    accountant: str | None = None
    delta: float | None = None

    @classmethod
    def of_run(cls, phases: Sequence[Phase], about: Mapping[str, Any]) -> "Described":
        """A run as a ledger knows it; rows from before the facts were written down take turns for bands."""
        facts = {name: about[name] for name in _FACTS if name in about}
        return cls(tuple(phases), **{"bands": max(phase.turns for phase in phases), **facts})

    def facts(self) -> dict[str, Any]:
        """What a ledger writes down beside the events."""
        of_people = ("unit", "records_per_person", "person_gradient")
        return {name: getattr(self, name) for name in _FACTS if self.unit == "person" or name not in of_people}

    def sentences(self) -> tuple[str, ...]:
        """Who is protected, how lots are drawn, what the noise is, who counts."""
        counted = () if self.accountant is None or self.delta is None else (self.accounting(),)
        return self.protected(), self.sampling(), self.noise(), *counted

    def protected(self) -> str:
        """Whom the guarantee is about, and which data sets are neighbours."""
        return _UNITS[self.unit]

    def sampling(self) -> str:
        """What a lot is, at the rates that are accounted with: they, and not the plan's own, are what is claimed."""
        one, many = _NAMES[self.unit]
        turns = max(phase.turns for phase in self.phases)
        used = "" if self.unit == "record" else f" {self._records_used()}"
        if turns == 1:
            lots = {len(phase.events) for phase in self.phases}
            most = max(lots)
            drawn = "a lot is drawn" if most == 1 else f"{'' if len(lots) == 1 else 'up to '}{most} lots are drawn"
            there = "it" if most == 1 else "each of them"
            return (
                f"Sampling: in each step {drawn} at random; each {one} is in {there} with {rates(self.phases)}, "
                f"independently of all other {many}, lots and steps (Poisson sampling).{used}"
            )
        return (
            f"Sampling: the {many} take turns. Each {one} is put at random into one of {turns} groups, independently "
            f"of all other {many}, and the groups are secret; the steps go through the groups in a fixed order. In "
            f"each step a lot is drawn at random from the group whose turn it is; each {one} of the group is in it "
            f"with {rates(self.phases)}, independently of all other {many} (Poisson sampling within the group). So in "
            f"each round of {turns} steps no {one} is in more than one lot.{used}"
        )

    def noise(self) -> str:
        """Whether it is fresh in each release, and whether it is exact."""
        made = "exact, on a grid" if self.exact_noise else "computed in floating point"
        if self.bands == 1:
            return f"Noise: Gaussian, drawn afresh for each release, independently of all other noise; {made}."
        earlier = "the step" if self.bands == 2 else f"the {self.bands - 1} steps"
        return (
            f"Noise: Gaussian and correlated over {self.bands} steps: each release also takes back a part of the noise "
            f"of {earlier} before it, which is counted for because the {_NAMES[self.unit][1]} take turns; {made}."
        )

    def accounting(self) -> str:
        """Who adds the events up, and for which δ."""
        name = ACCOUNTANT_NAMES.get(str(self.accountant), str(self.accountant))
        return f"Accountant: {name}, for delta {rounded_up(self.delta or 0.0, 6)}."

    def _records_used(self) -> str:
        """What of a person a step uses; the number is not there in a ledger's sum over several runs."""
        if self.records_per_person is None:
            return "Only some of a person's records, drawn at random, are used in a step."
        used = (
            "one of their records, drawn at random, is used"
            if self.records_per_person == 1
            else f"at most {self.records_per_person} of their records, drawn at random, are used"
        )
        return f"Of each person in a lot {used}, and the {self.person_gradient} of these records' gradients is clipped."


_FACTS = ("unit", "records_per_person", "person_gradient", "bands", "exact_noise", "accountant", "delta")


def protected_unit(unit: str) -> str:
    """Who is protected, as a cell of a table."""
    return _PROTECTED[unit]


def rates(phases: Sequence[Phase]) -> str:
    """The chances that the events are accounted with, and how many lots one example may be drawn into at each."""
    lots: Counter[float] = Counter()
    for phase in phases:
        for event in phase.events:
            lots[event.sampling_rate] += phase.times
    shown = [f"at most {rounded_up(rate, 6)} ({count} lots)" for rate, count in sorted(lots.items()) if count]
    if len(shown) == 1:
        return "probability " + shown[0].removeprefix("at most ")
    if len(shown) > 4:
        return f"probabilities from {rounded_up(min(lots), 6)} to {rounded_up(max(lots), 6)} ({lots.total()} lots)"
    return "probability " + ", ".join(shown[:-1]) + " and " + shown[-1]
