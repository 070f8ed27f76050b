"""A run: the five verbs on real data. Data only moves to the right; noise is added at `release`."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fodp import _checks, kernels
from fodp._checks import ConfigurationError, LedgerError, PrivacyError
from fodp._forks import Owner
from fodp._looks import Looks, is_rare
from fodp.accounting import Event, joint
from fodp.clipping import self_check
from fodp.clipping.augmentation import Augment, Augmentation
from fodp.clipping.batches import Keyed, Parts, repeat, take
from fodp.clipping.buffers import KeptState
from fodp.clipping.engine import HERE, Engine, LossFunction, Points
from fodp.clipping.gradients import Gradients
from fodp.clipping.layout import GradientBuffer
from fodp.clipping.maps import Factor, share
from fodp.clipping.padding import LOTS_COMPARED, Widths, padded_records, refuse_other_gradient
from fodp.clipping.remembered import Outside
from fodp.draws import Source
from fodp.memory import FractionalMemory
from fodp.noise import Streams, exact, release
from fodp.noise.banded import BandedNoise
from fodp.noise.ranges import RangedStreams
from fodp.noise.release import Noise
from fodp.options import Beginning
from fodp.options.filter import RESPONSE_LENGTH, FilterState, NoFilter
from fodp.options.made_up import made_up
from fodp.options.quantile import AdaptiveClip
from fodp.options.scaling import Kronecker, ScalingState, Transcript
from fodp.options.schedule import Numbers
from fodp.people import Owners, PeopleSampler
from fodp.plan import Plan
from fodp.prefetching import Ahead, workers_for
from fodp.private_data import PrivateData
from fodp.queries import Query
from fodp.ranks import here
from fodp.ranks.facts import facts, refuse_wrapped
from fodp.ranks.fsdp import is_sharded
from fodp.ranks.shards import ShardedGradients, Shards
from fodp.repeats import warn_of_equal_rows
from fodp.sampling import Collate, Fetcher, Lot, PoissonSampler


class Witness(Protocol):
    """Sees what a step releases, and says at its end whether that may be used (`fodp.training.witness`)."""

    def begin(self) -> None:
        """A step begins."""

    def see(self, released: Tensor) -> None:
        """It has released this."""

    def confirm(self) -> None:
        """Raise if what it has released may not be used."""


class Run:
    """Executes a plan step by step and checks every release against what the plan promised.

    `take_step()` performs one step of the plan's method and returns its private sum. A release whose
    event is not the promised one is refused before its noise is drawn, and so is a model that
    writes into its buffers, before anything of the step is used. A run belongs to the process that made it.
    """

    _has_loss = True  # False: the loss is in a loop of the owner's, and cannot be asked about public records

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dataset: Any,
        plan: Plan,
        *,
        streams: Streams | None = None,
        engine: str = "auto",
        microbatch: int | None = None,
        augment: Augment | None = None,
        copies: int = 1,
        owners: Any = None,
        public_score: Callable[[], float] | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        public_sample: Any = None,
    ):
        self.plan = plan
        self.step = 0
        self._owner, self._ended = Owner(), ""
        self.witness: Witness | None = None  # of a seeded run that is kept in a ledger
        if streams is None:
            streams = Streams.secure() if plan.seed is None else Streams.seeded(plan.seed)
        elif streams.seed != plan.seed:
            wanted = "secure streams (seed=None)" if plan.seed is None else f"the seed {plan.seed}"
            raise PrivacyError(f"the plan states {wanted}, these are {streams}: leave streams out, or mend the plan")
        refuse_wrapped(model)
        self.ranks = here()
        self.shards = self._divided(model, plan)
        with self.whole():
            self.engine = Engine(model, loss_fn, engine)
            self._parameters = tuple(model.parameters())
        self._fetcher = Fetcher(dataset, collate_fn, owners)
        self._own_collate, self._widths = self._fetcher.batched_by is not None, Widths()
        self._collate_looks = Looks(LOTS_COMPARED)  # at what collate_fn makes of records alone
        warn_of_equal_rows(dataset, owners)
        private = PrivateData(dataset)
        private.refuse("public_sample", public_sample)
        private.refuse_reaching("public_score", public_score)
        if self.ranks.count > 1 and plan.unit == "person":
            raise ConfigurationError(
                "several processes divide records among them, and a person's would be clipped on each: train with "
                "unit='person' in one process"
            )
        options = dict(copies=copies, augment=augment is not None, engine=engine, loss=type(loss_fn).__name__)
        with self.whole():
            self.ranks.compare(lambda secret: facts(secret, plan.to_dict(), model, dataset, self._fetcher, options))
        self.streams = self.ranks.shared(streams)
        # The first rank draws the noise, under a key of its own; of a divided model every rank that of its slices.
        apart = self.streams is not streams and self.shards is None
        self._noise_streams = streams if apart else None  # None: as all draws
        self._microbatch = None if microbatch is None else _checks.whole("microbatch", microbatch)
        self._copies = _checks.whole("copies", copies)
        self._sampler = self._made_sampler(owners)
        self._ahead = self._read_ahead(self._fetcher, workers_for(num_workers, pin_memory), pin_memory)
        self._augmentation = None if augment is None else Augmentation(augment, self._copies)
        with self.whole():
            self._watched = [self.engine.outside, Outside([augment, collate_fn], model, parts=False)]
        self._public_score = public_score
        self.add_noise: Callable[..., Tensor] = exact.release if plan.exact_noise else release.release
        self.method = plan.algorithm
        self._correlated = self._correlated_noise()
        self.state = self.method.init(plan, self.engine.layout.size)
        chosen = self.method.options
        beginning = Beginning(
            plan=plan,
            size=self.engine.layout.size,
            multipliers=[phase.events[-1].noise_multiplier for phase in plan.events()],
            engine=self.engine,
            sample=self._made_up(public_sample),
            same=self.ranks.from_first,
        )
        self.filter: FilterState = NoFilter() if chosen.filter is None else chosen.filter.start(beginning)
        self.adaptive_clip: AdaptiveClip | None = None if chosen.quantile is None else chosen.quantile.start(beginning)
        if self.shards is not None:
            for part in (self.state, self.filter):
                memory = getattr(part, "memory", part)
                if isinstance(memory, FractionalMemory):
                    memory.over_ranks = self.shards.add
        self.average = None if chosen.average is None else chosen.average.start(beginning)
        self.followed = chosen.rate.start(beginning)
        self.last_fresh: tuple[Tensor, float] | None = None  # the step's last release, before a memory, and its std
        self._shape: ScalingState | None = None if chosen.scaling is None else chosen.scaling.start(beginning)
        self.layers = chosen.clip.groups(self.engine.layout.names)
        # Of the last steps, the newest first: an adapted clip norm, or a normaliser, changes the noise.
        self._noise_stds: deque[float] = deque(maxlen=RESPONSE_LENGTH)
        self.last_clip_norm: float = plan.clip_norm  # of the step that was taken last
        self._begin()

    def _divided(self, model: nn.Module, plan: Plan) -> Shards | None:
        """The slices of a model that FSDP2 has divided; None: it is whole on every rank."""
        divided = is_sharded(model)
        # Before anything is gathered: a rank that does not take part would be waited for in vain.
        self.ranks.compare(lambda _: {"whether the model is sharded (fully_shard)": b"%d" % divided})
        if not divided:
            return None
        refuse_unfit_for_slices(plan)
        return Shards(model, self.ranks)

    @property
    def _noise(self) -> Noise:
        if self.shards is not None:
            return RangedStreams(self.streams, self.shards.slices.ranges)
        return self._noise_streams or self.streams

    def whole(self) -> AbstractContextManager[None]:
        """The model with all of its parameters here; if it is divided, all ranks must enter together."""
        return nullcontext() if self.shards is None else self.shards.whole()

    def _made_sampler(self, owners: Any) -> PoissonSampler:
        """Of what the plan's unit is: records, or people with the records that are theirs."""
        plan = self.plan
        if (plan.unit == "person") != (owners is not None):
            raise ConfigurationError(
                "the plan's unit is a person: give owners, a name for each record that says whose it is"
                if owners is None
                else "owners are given, and the plan's unit is a record: make the plan with unit='person' and "
                "records_per_person, or leave owners out"
            )
        turns, size = plan.algorithm.turns, self._fetcher.size
        rate = min(1.0, turns * plan.sampling_rate)
        if plan.records_per_person is None:
            return PoissonSampler(size, rate, self.streams, turns)
        most = plan.records_per_person
        return PeopleSampler(Owners(owners, size), rate, most, self.streams, copies=self._copies, turns=turns)

    def _read_ahead(self, fetcher: Fetcher, workers: int, pin_memory: bool) -> Ahead | None:
        """Lots read by worker processes, where each step draws one; tensors in memory are there already."""
        if (
            not workers
            or fetcher.rows_at_once is not None
            or any(len(phase.events) != 1 for phase in self.plan.events())
        ):
            return None

        def draw(step: int) -> Lot:
            rate = self.plan.events_at(step)[0].sampling_rate
            return self.ranks.mine(self._sampler.draw(step, "mask", rate))

        def source(lot: Lot) -> Source:
            return Source(self.streams, lot.step, lot.name)

        return Ahead(fetcher, workers, self.plan.steps, draw, source, self._microbatch, pin_memory)

    def close_workers(self) -> None:
        """End the processes that read ahead; another step starts fresh ones. A fork leaves its parent's alone."""
        if self._ahead is not None and self.is_here:
            self._ahead.close()

    def _correlated_noise(self) -> BandedNoise | None:
        """Noise that takes back some of itself, where the method asks for it and records take turns enough."""
        strategy, turns = tuple(self.method.strategy()), self.method.turns
        if len(strategy) > turns:
            raise PrivacyError(
                f"{self.plan.method} correlates its noise over {len(strategy)} steps and lets records take turns "
                f"among {turns} groups: a record would be in two lots whose noise is shared"
            )
        return BandedNoise(self._noise, strategy) if strategy != (1.0,) else None

    def _begin(self) -> None:
        self._lots: list[Lot] = []
        self._spent: list[float | None] = []  # joint noise multiplier of each lot so far in this step
        self._releases: dict[int, int] = {}  # how many each lot has made
        self._count: float | None = None  # the released count that will move the clip norm
        self._noise_std: float = 0.0  # of the step's last release
        self.last_fresh = None
        if self.witness is not None:
            self.witness.begin()

    def take_step(self) -> Tensor:
        """One step of the method: its private sum, filtered, to be divided by the plan's lot size.

        A step that breaks off after its lot was drawn is over: it counts, and its mask and noise are never used again.
        """
        self.refuse_other_process()
        if self._ended:
            raise PrivacyError(f"this run has ended, make a new one: {self._ended}")
        if self.step >= self.plan.steps:
            raise PrivacyError(f"the plan's {self.plan.steps} steps are done; a longer run needs another plan")
        self._begin()
        try:
            with self.ranks.together(), self.whole():
                released = self._made_step()
        except BaseException:
            self.step += bool(self._lots)
            raise
        self.last_clip_norm = self.clip_norm
        if self.adaptive_clip is not None:
            self.adaptive_clip.move(self._released_count())
        self._noise_stds.appendleft(self._noise_std)
        self.step += 1
        return self.filter(released)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the run, and not one that was forked from it since."""
        return self._owner.is_here

    def refuse_other_process(self) -> None:
        """Raise in a process that was forked from the one that made the run: both would go on, and one is charged."""
        if not self.is_here:
            raise PrivacyError(
                "this run was made before this process was forked, and it belongs to the process that made it: where "
                "both went on, each would release steps of its own and only one of them would be counted. Make the "
                "run (Trainer, make_private) in the process that trains"
            )

    def _made_step(self) -> Tensor:
        """What the method releases, if it is what the plan promised and the model has kept nothing."""
        context = self if self.method.options.schedules is None else _Scheduled(self)
        kept = KeptState(self.engine.model, self._watched, self._parameters)
        try:
            if self._shape is not None:
                self._shape.factors(self.step)
            released = self.method.step(context, self.state)
            kept.refuse_changes()
            emitted = tuple(Event(lot.rate, z) for lot, z in zip(self._lots, self._spent, strict=True) if z)
            if not _same(emitted, self._promised()):
                raise PrivacyError(f"step {self.step} emitted {emitted}, its plan promised {self._promised()}")
            self._confirm()
        except BaseException:
            kept.restore()  # un-noised statistics must not outlive a step that broke off
            raise
        return released

    def _confirm(self) -> None:
        """Have the step's releases compared with what is known of them. Memories hold them already: a refusal is the
        end of the run."""
        if self.witness is not None:
            try:
                self.witness.confirm()
            except BaseException as error:
                self._ended = str(error) or type(error).__name__
                raise

    def set_augmentation_aside(self) -> None:
        """From now on records are taken as they are: for audits whose records are no data that could be augmented.

        Copies stay: each record still has that many rows, whose gradients are averaged.
        """
        self._augmentation = None

    @property
    def clip_norm(self) -> float:
        """C of this step: the plan's, the scheduled or the adapted one."""
        schedules = self.method.options.schedules
        if schedules is not None and self.adaptive_clip is None:
            return schedules.at(self.plan, self.step).clip_norm
        return self.plan.clip_norm if self.adaptive_clip is None else self.adaptive_clip.clip_norm

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        """A fresh Poisson lot of the declared rate; `name` keeps the lots of one step apart.

        Where records take turns, it is drawn from those whose turn it is, at so many times the declared rate.
        """
        if name and not name.isalnum():
            raise PrivacyError(f"the name of a lot is letters and digits, got {name!r}")
        stream = f"mask{name}"
        if any(lot.name == stream for lot in self._lots):
            raise PrivacyError(f"this step has drawn a lot {name!r} already: give the second one another name")
        if self._ahead is not None and not name:
            lot = self._ahead.lot(self.step, self._sampler.rate if rate is None else rate)
        else:
            lot = self.ranks.mine(self._sampler.draw(self.step, stream, rate))
        self._lots.append(lot)
        self._spent.append(None)
        return lot

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the model's trainable parameters, in their order in a flat vector."""
        return tuple(parameter.shape for parameter in self.engine.layout.parameters)

    def gradients(self, lot: Lot, at: Points = HERE, blocks: Sequence[float] | None = None) -> Gradients:
        """The lot's per-example gradients at the model's parameters, or at points given by releases.

        `blocks` are public factors, one per parameter, that scale its part of every gradient.
        """
        self._place(lot)  # of this step
        self.engine.step, self.engine.look_again = self.step, self._looks_again()
        if self._own_collate and self._collate_looks.due(self.step, self._looks_again()):
            self._refuse_mixing_collate(lot)
        if (
            self.shards is not None and at is not HERE
        ):  # passes are made at whole points, and a method knows its slices of them
            at = tuple((c, None if offset is None else self.shards.slices.gather(offset)) for c, offset in at)
        return self._asked(self._batch(lot), lot, at, blocks)

    def _asked(self, batch: Any, lot: Lot, at: Points = HERE, blocks: Sequence[float] | None = None) -> Gradients:
        """The gradients of a lot, or of a part of one, with all that the method's parts make of them."""
        asked = Gradients(
            self.engine,
            batch,
            at,
            self._copies,
            self._microbatch,
            lot,
            exact=self.plan.exact_noise,
            layers=self.layers,
            stability=self.method.options.clip.stability,
            total=self.ranks.total if self.shards is None else self.shards.total,
            sizes=None if self.shards is None else self.shards.slices.sizes,
        )
        asked = asked if self._shape is None else asked.shaped(self._shape.factors(self.step))
        return asked if blocks is None else asked.scaled(blocks)

    def refuse_wrong_loss(self) -> None:
        """Raise if the loss function plainly has another form than loss_fn(model, batch) with one loss per example.

        Or if the batches cannot be taken apart, record by record.
        """
        self._fetcher.refuse_what_cannot_be_divided()
        self_check.refuse_wrong_form(self.engine, self._fetcher.fetch(torch.zeros(0, dtype=torch.int64)))

    def _batch(self, lot: Lot) -> Keyed:
        """The lot's records, each with draws of its own; fetched as they are worked on if they are many."""
        copies, source = self._copies, Source(self.streams, self.step, lot.name)
        rows = lot.records if copies == 1 else (lot.records[:, None] * copies + torch.arange(copies)).flatten()
        at_once = self._microbatch
        if self._augmentation is None and copies == 1 and (most := self._fetcher.rows_at_once) is not None:
            at_once = most if at_once is None else min(at_once, most)
        if at_once is None or len(lot.indices) <= at_once:
            return self._fetched(lot, source, torch.arange(len(lot.indices)), self._looks_again())
        looks = self._looks_again()
        parts = Parts(len(rows), at_once * copies, lambda part: self._part(lot, source, part, looks))
        return self._keyed(lot, torch.arange(len(lot.indices)), parts, rows, source)

    def _keyed(self, lot: Lot, places: Tensor, batch: Any, rows: Tensor, source: Source) -> Keyed:
        """The batch of some of the lot's records, with whose they are."""
        owners = None if lot.owners is None else lot.owners[places].repeat_interleave(self._copies)
        return Keyed(batch, rows, source, owners, self.plan.person_gradient == "sum")

    def _part(self, lot: Lot, source: Source, part: slice | Tensor, looks: bool) -> Any:
        """Some rows of a lot: their records are fetched, and augmented, without the others."""
        copies = self._copies
        wanted = torch.arange(len(lot.indices) * copies)[part]
        places, row_of = torch.unique(wanted // copies, return_inverse=True)
        found = self._fetched(lot, source, places, looks)
        chosen = row_of * copies + wanted % copies
        whole = len(chosen) == len(found.records) and bool((chosen == torch.arange(len(chosen))).all())
        return found.rows if whole else take(found.rows, chosen)

    def _fetched(self, lot: Lot, source: Source, places: Tensor, looks: bool) -> Keyed:
        copies, numbers = self._copies, lot.records[places]
        rows = numbers if copies == 1 else (numbers[:, None] * copies + torch.arange(copies)).flatten()
        fetched = self._read(self._fetcher, lot, source, places)
        if self._own_collate and len(places) > 1 and self._widths.grow(fetched):
            self._refuse_mixing_collate(lot, places)
        batch = self._keyed(lot, places, repeat(fetched, copies), rows, source)
        return batch if self._augmentation is None else self._augmentation(batch, looks)

    def _read(self, fetcher: Fetcher, lot: Lot, source: Source, places: Tensor) -> Any:
        """The batch of the records at these places of a lot, from a worker if one has read it."""
        start = int(places[0]) if len(places) else 0
        if self._ahead is not None and not (len(places) and int(places[-1]) - start + 1 != len(places)):
            batch = self._ahead.batch(lot, start, start + len(places))
            if batch is not None:
                return batch
        return fetcher.fetch(lot.indices[places], source, lot.records[places])

    def _refuse_mixing_collate(self, lot: Lot, some: Tensor | None = None) -> None:
        """Raise if `collate_fn` makes something else of a record in its lot than alone, and that has an effect.

        `some`: the places in the lot of the records that are collated together.
        """
        some = torch.arange(min(len(lot.indices), self._microbatch or len(lot.indices))) if some is None else some
        if not len(some):
            return
        if len(some) > 1:  # one record alone tells nothing
            self._collate_looks.told(self.step)
        source, copies = Source(self.streams, self.step, lot.name), self._copies
        indices, numbers = lot.indices[some], lot.records[some]
        batch = self._fetcher.fetch(indices, source, numbers)
        self._widths.grow(batch)
        padded = padded_records(self._fetcher, indices, numbers, source, batch)
        whole = self._fetched(lot, source, some, False) if padded else None
        for row, _, _ in padded:
            alone = self._fetched(lot, source, some[row][None], False)
            here = take(whole, slice(row * copies, (row + 1) * copies))
            refuse_other_gradient(self.engine, here, alone, copies, self._fetcher.batched_by)

    def _looks_again(self) -> bool:
        """Whether examples are looked at anew in this step: once in a while, at steps that anybody may know."""
        return is_rare(self.step)

    def adapt_clip(self, gradients: Gradients, query: Query, std: float) -> float:
        """With a quantile: release how many of the gradients are within C, and return the noise the query then needs.

        The count and the query share what the query alone would have cost with `std`: so it gets a little more noise,
        and the pair is the event that the plan promised. After the step the count moves C. Without a quantile nothing
        is released and `std` comes back as it is.
        """
        clip = self.adaptive_clip
        if clip is None:
            return std
        place = self._place(gradients.lot)
        if query.lot is not gradients.lot:
            raise PrivacyError("this query was not computed from the lot of the gradients that are counted")
        if self._count is not None:
            raise PrivacyError(f"step {self.step} has released its count already: call adapt_clip once in a step")
        multiplier = query.noise_multiplier(std)
        rest = clip.rest(multiplier)
        clip_norm = clip.clip_norm
        count = gradients.count(lambda norms: norms <= clip_norm)
        self._charge(place, count.noise_multiplier(clip.count_noise))
        self._count = float(self._noised(count, clip.count_noise, "count"))  # on an accelerator the one wait of a step
        return std * rest / multiplier

    def _released_count(self) -> float:
        if self._count is None:
            raise PrivacyError(
                f"a quantile is set, and the step of {self.plan.method} does not adapt the clip norm: leave quantile "
                "out, or write std = run.adapt_clip(gradients, query, std) before its last release"
            )
        return self._count

    def release(self, lot: Lot, query: Query, std: float) -> Tensor:
        """query + N(0, std²): charged to its lot, jointly with what that lot has released before.

        A query with a shape is scaled by it again once it has its noise.
        """
        place = self._place(lot)
        if query.lot is not lot:
            raise PrivacyError("this query was not computed from the lot it is released for")
        self._charge(place, query.noise_multiplier(std))
        earlier = self._releases.get(place, 0)
        self._releases[place] = earlier + 1
        name = lot.name.replace("mask", "noise", 1) + (f".{earlier}" if earlier else "")
        if self._correlated is None:
            self._noise_std = std
            released = self._mapped_back(query, self._noised(query, std, name))
            if self.followed is not None and released.shape == (self.size,):  # memories change a release in place
                self.last_fresh = released.clone(), std
            return released
        if sum(self._releases.values()) > 1:
            raise PrivacyError(f"step {self.step} has released already: correlated noise is for one release in a step")
        released = self._noised(query, std, name, self._correlated)
        self._noise_std = std * math.sqrt(self.ranks.number(self._correlated.variance))
        return self._mapped_back(query, released)

    def _mapped_back(self, query: Query, released: Tensor) -> Tensor:
        """The release without its shape, which has seen it: post-processing."""
        if self._shape is not None and query.shape is not None:
            self._shape.see(query, released, self._noise_std)
        return query.map_back_(released)

    def _made_up(self, public_sample: Any) -> Callable[[int], Any] | None:
        """Public records for a step: the user's, or made up from what is public of the data's form."""
        if not self._has_loss:
            return None
        if public_sample is not None:
            return lambda _: public_sample
        forms, engine, scaling = self._fetcher.forms, self.engine, self.method.options.scaling
        kind = scaling.shape_inputs if isinstance(scaling, Kronecker) else "auto"
        return lambda step: made_up(forms, engine.model, engine.loss_fn, kind, step)

    def _noised(self, query: Query, std: float, name: str, noise: BandedNoise | None = None) -> Tensor:
        """One release for all ranks, made on the first; of a vector in slices, each rank makes its own."""
        source = noise or self._noise
        if self.shards is not None and not query.is_number:
            released = self.add_noise(query, std, source, self.step, name)
        else:
            released = self.ranks.from_first(
                lambda: self.add_noise(query, std, source, self.step, name), lambda: query.empty(query.dtype)
            )
        if self.witness is not None:
            self.witness.see(released)
        return released

    def _charge(self, place: int, multiplier: float) -> None:
        if multiplier == math.inf:  # no example can change this query, so it costs nothing
            return
        before = self._spent[place]
        spent = multiplier if before is None else joint(before, multiplier)
        promised, rate = self._promised(), self._lots[place].rate
        if (
            place >= len(promised)
            or spent < promised[place].noise_multiplier * (1 - 1e-9)
            or rate > promised[place].sampling_rate * (1 + 1e-9)
        ):
            raise PrivacyError(
                f"step {self.step} would spend {spent:g} at rate {rate:g} on lot {place}, promised was {promised}"
            )
        self._spent[place] = spent

    def unclipped_fraction(self) -> float | None:
        """The released noisy share of examples within the clip norm in this step; None without a count."""
        if self.adaptive_clip is None or self._count is None:
            return None
        return self.adaptive_clip.fraction_of(self._released_count())

    def noise_variance(self) -> float:
        """Variance per coordinate of the noise in what the optimizer gets: public numbers only. 0 before any noise."""
        if not self._noise_stds:
            return 0.0
        # One of the two is a single number: what must know the variance gets no noise that was filtered twice.
        gains = np.convolve(self.method.noise_gains(self.state), self.filter.noise_gains()).tolist()
        total = math.fsum(gain * std * std for gain, std in zip(gains, self._noise_stds, strict=False))
        return total / self.plan.lot_size**2

    def take_fresh(self) -> tuple[Tensor, float] | None:
        """The step's last vector as it was released, before a memory or a filter, with the noise in it: for a rate
        rule, once."""
        fresh, self.last_fresh = self.last_fresh, None
        return fresh

    def noise_share(self, parameter: Tensor) -> float:
        """What share of that variance the noise of a parameter has: the mean squared factor of its way back."""
        return share(self.noise_factor(parameter))

    def noise_factor(self, parameter: Tensor) -> Factor:
        """By which number or map the noise of a parameter came back from the last release; 1 without a shape."""
        if self._shape is not None:
            for known, factor in zip(self.trained, self._shape.current, strict=True):
                if known is parameter:
                    return factor
        return 1.0

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters that an optimizer moves, in their order in a flat vector; divided ones of a divided model."""
        return self.engine.layout.parameters if self.shards is None else self.shards.trained

    @property
    def size(self) -> int:
        """How many numbers a release has here: the model's, or those of this rank's slices."""
        return self.engine.layout.size if self.shards is None else self.shards.slices.size

    def parameters(self) -> Tensor:
        """The model's trainable parameters as one flat vector; this rank's slices of them, if it has slices."""
        return self.engine.layout.read() if self.shards is None else self.shards.read()

    def set_parameters(self, flat: Tensor) -> None:
        """Put back what `parameters` gave."""
        if self.shards is None:
            self.engine.layout.write(flat)
        else:
            self.shards.write(flat)

    def norm(self, vector: Tensor) -> Tensor:
        """The ℓ2 norm of a release, or of anything else of its form: over all ranks where each has slices."""
        return vector.norm() if self.shards is None else self.shards.norm(vector)

    def is_finite(self) -> bool:
        """Whether all trainable parameters are; all ranks must ask."""
        here = bool(self.parameters().isfinite().all())
        return here if self.shards is None else self.shards.add([float(not here)])[0] == 0

    def gradient_buffer(self) -> GradientBuffer | ShardedGradients:
        """Where releases become gradients."""
        return GradientBuffer(self.engine.layout) if self.shards is None else ShardedGradients(self.shards)

    def uniform(self, count: int, name: str) -> Tensor:
        """Uniform numbers in [0, 1) from the run's own stream, the same on all ranks."""
        words = self.streams.words(count, self.step, f"uniform.{name}")  # never a lot's own words
        return torch.from_numpy((words >> 11) * 2.0**-53).to(self.engine.layout.device, non_blocking=True)

    def public_score(self) -> float:
        """The loss on data declared public."""
        if self._public_score is None:
            raise PrivacyError(f"{self.plan.method} scores proposals on public data: give the Trainer public_score")
        score = self._public_score
        with self.whole():
            return self.ranks.number(lambda: float(score()))

    def state_dict(self, *, views: bool = False) -> dict[str, Any]:
        """Method state, filter and clip norm: releases and public numbers only.

        With `views` large tensors are not copied: for a file that is written before the next step.
        """
        clip = None if self.adaptive_clip is None else self.adaptive_clip.clip_norm
        method, smoothing = (
            part.state_views() if views and hasattr(part, "state_views") else part.state_dict()
            for part in (self.state, self.filter)
        )
        # Earlier noise would let a reader take it off: a secure run that is resumed begins anew instead.
        kept = {} if self._correlated is None or self.plan.seed is None else {"noise": self._correlated.state_dict()}
        if self.average is not None:
            kept["average"] = self.average.state_views() if views else self.average.state_dict()
        if self.followed is not None:
            kept["rate"] = self.followed.state_views() if views else self.followed.state_dict()
        shape = None if self._shape is None else self._shape.state_dict()
        kept |= {} if shape is None else {"shape": shape}
        return kept | {
            "method": method,
            "filter": smoothing,
            "clip_norm": clip,
            "noise_stds": list(self._noise_stds),
            "kernels": kernels.library() is not None,
            "device": self.engine.layout.device.type,
            # Where lots are split says something about the records in them; a secure run can do without.
            "rows_at_once": self.engine.rows_at_once if self.plan.seed is not None else None,
        }

    def bytes_when_full(self) -> int:
        """How much `state_dict()` will hold at most, as far as its parts tell: a window is empty at first."""
        noise = None if self.plan.seed is None else self._correlated
        parts: tuple[Any, ...] = (self.state, self.filter, noise, self.average, self.followed, self._shape)
        size = self.size * self.engine.layout.dtype.itemsize // 4  # parts count numbers of four bytes
        return sum(part.bytes_when_full(size) for part in parts if hasattr(part, "bytes_when_full"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. A secure run does not know its groups, if its records take turns, and correlates its
        noise with none of before: its next step must begin a round (`next_round`)."""
        before, now = state.get("device", "cpu"), self.engine.layout.device.type
        if self.plan.seed is not None and before != now:
            raise LedgerError(
                f"this seeded run began on {before} and would go on on {now}, where its noise is another: steps that "
                f"are charged once would be released twice. Move the model to {before}, or start a new run"
            )
        if self._correlated is not None and self.plan.seed is not None:
            self._correlated.load_state_dict(state["noise"])
        elif self._correlated is not None:
            self._correlated.forget()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.followed is not None:
            self.followed.load_state_dict(state["rate"])
        self.state.load_state_dict(state["method"])
        self.filter.load_state_dict(state["filter"])
        self._noise_stds.clear()
        self._noise_stds.extend(state["noise_stds"])
        if self._shape is not None:
            self._shape.load_state_dict(state.get("shape"))
        self.engine.rows_at_once = state.get("rows_at_once")  # another split of a lot has other last bits
        if self.adaptive_clip is not None:
            self.adaptive_clip.clip_norm = float(state["clip_norm"])
        if self.plan.seed is not None and state["kernels"] != (kernels.library() is not None):
            _checks.warn(
                "this run began " + ("with" if state["kernels"] else "without") + " compiled kernels and goes on "
                "otherwise: the last bits of seeded noise will differ from those of a run without a break"
            )

    def whose_turn(self, step: int) -> Tensor | None:
        """The places in the data of the records that this step may draw; None: all. For audits: it is secret."""
        return self._sampler.whose_turn(step)

    def next_round(self, step: int) -> int:
        """The first step from this one on that a resumed secure run may take."""
        return min(self._sampler.next_round(step), self.plan.steps)

    def _place(self, lot: object) -> int:
        for place, known in enumerate(self._lots):
            if known is lot:
                return place
        raise PrivacyError("this lot was not drawn in this step: every step draws its own")

    def _promised(self) -> tuple[Event, ...]:
        return self.plan.events_at(self.step)


def refuse_unfit_for_slices(plan: Plan) -> None:
    """Raise for what a divided model cannot be trained with."""
    kind = type(plan.algorithm)
    if plan.exact_noise:
        raise ConfigurationError("exact noise is drawn whole, by one rank: leave exact_noise out, or the model whole")
    if isinstance(plan.options.scaling, Kronecker | Transcript):
        raise ConfigurationError(
            f"shape={plan.params['shape']!r} learns from whole releases or models, and ranks hold slices: use "
            "shape='fan-in', numbers of your own, or leave the model whole"
        )
    if plan.options.average is not None:
        raise ConfigurationError(
            "average= puts the average of iterates into the model, and ranks hold slices: use the callback "
            "WeightAverage, or leave the model whole"
        )
    if plan.options.rate.follows:
        raise ConfigurationError(
            "rate_rule='transcript' compares whole releases with the iterate, and ranks hold slices: leave rate_rule "
            "out, or the model whole"
        )
    if not (kind.__module__.startswith("fodp.methods.") or vars(kind).get("takes_slices", False)):
        raise ConfigurationError(
            f"{plan.method} is no method of this library, and on a sharded model its step would see slices of releases "
            "and parameters: take norms with run.norm, keep vectors of a release's form in flat tensors, then set "
            "takes_slices = True on the class"
        )


class _Scheduled:
    """A run as a method's step sees it: the plan's numbers are those of this step's place in the public schedules."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def plan(self) -> Numbers:
        """The public numbers of this step."""
        schedules = self._run.method.options.schedules
        assert schedules is not None
        return schedules.at(self._run.plan, self._run.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def _same(emitted: tuple[Event, ...], promised: tuple[Event, ...]) -> bool:
    """Equal, but for a rate below the promised one: fewer examples than charged for are no fault."""
    return len(emitted) == len(promised) and all(
        e.sampling_rate <= p.sampling_rate and math.isclose(e.noise_multiplier, p.noise_multiplier, rel_tol=1e-9)
        for e, p in zip(emitted, promised, strict=True)
    )
