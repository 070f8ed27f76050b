"""What both ways to train do before a session begins: look at the data, agree with other processes, draw the lots."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fodp.gradients import Source
from fodp.identity.repeats import warn_of_equal_rows
from fodp.lots.people import Owners, PeopleSampler
from fodp.lots.poisson import PoissonSampler
from fodp.lots.reading import Fetcher
from fodp.noise import Streams
from fodp.options import conflicts
from fodp.plan import Plan
from fodp.ranks import here
from fodp.ranks.facts import facts, refuse_wrapped
from fodp.sampling import Lots
from fodp.session import Session
from fodp.sources.ahead import Ahead


class Opening:
    """The streams and processes of a run that is about to begin, and what of its data must fit them.

    `facts` are words of `fodp.options.conflicts.DOORS`: what this way to train is and was given. A plan that does not
    fit them is refused here, before anything is charged.
    """

    def __init__(self, model: nn.Module, dataset: Any, plan: Plan, facts: Mapping[str, bool]):
        refuse_wrapped(model)
        self.plan, self.model, self.dataset = plan, model, dataset
        self.processes = here()
        conflicts.refuse(plan.features, {**facts, "several processes": self.processes.count > 1})
        own = Streams.secure() if plan.seed is None else Streams.seeded(plan.seed)
        self._own, self._shared = own, None  # type: Streams, Streams | None

    def refuse_unfit(self, fetcher: Fetcher, owners: Any, **options: Any) -> None:
        """Raise for processes that do not agree, and warn of equal records."""
        warn_of_equal_rows(self.dataset, owners)
        plan, model, dataset = self.plan, self.model, self.dataset
        self.processes.compare(lambda secret: facts(secret, plan.to_dict(), model, dataset, fetcher, options))

    @property
    def streams(self) -> Streams:
        """Where lots and records draw from, the same in all processes."""
        if self._shared is None:
            self._shared = self.processes.shared(self._own)
        return self._shared

    def lots(
        self,
        fetcher: Fetcher,
        owners: Any,
        copies: int,
        workers: int,
        microbatch: int | None,
        pin_memory: bool,
    ) -> tuple[Lots, Ahead | None]:
        """What draws the run's lots; with workers it is what reads them ahead, too.

        Tensors in memory are there already, and of methods that draw several lots in a step none is read ahead.
        """
        plan = self.plan
        lots = self.processes.lots(self._sampler(fetcher.size, owners, copies))
        several = any(len(phase.events) != 1 for phase in plan.events())
        if not workers or fetcher.rows_at_once is not None or several:
            return lots, None
        ahead = Ahead(
            fetcher,
            lots,
            self.streams,
            lambda step: plan.events_at(step)[0].sampling_rate,
            plan.steps,
            workers=workers,
            at_once=microbatch,
            pin_memory=pin_memory,
        )
        return ahead, ahead

    def _sampler(self, size: int, owners: Any, copies: int) -> PoissonSampler:
        """Of what the plan's unit is: records, or people with the records that are theirs."""
        plan = self.plan
        turns = plan.algorithm.turns
        rate = min(1.0, turns * plan.sampling_rate)
        if plan.records_per_person is None:
            return PoissonSampler(size, rate, self.streams, turns)
        most = plan.records_per_person
        return PeopleSampler(Owners(owners, size), rate, most, self.streams, copies=copies, turns=turns)

    def session(self, source: Source, lots: Lots, public_score: Callable[[], float] | None = None) -> Session:
        """The session of this plan on this source. The first process draws the noise, under a key of its own."""
        noise_streams = None if self.streams is self._own else self._own
        return Session(
            self.plan,
            source,
            lots,
            self.streams,
            self.processes,
            noise_streams=noise_streams,
            public_score=public_score,
        )
