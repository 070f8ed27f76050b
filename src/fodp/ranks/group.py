"""The processes of one run, as PyTorch's process group knows them.

A record belongs to the rank that its place in the data names: place modulo the number of ranks. All ranks draw the same
lot, from one key that they share, and each keeps the records that it owns. So every record has one owner, a lot is the
lot of a run in one process, and one example moves the sum over the ranks by what it moves the part of its owner: the
bound of a query is that of one process.

A query's parts are summed to the first rank. It alone adds noise, once, and sends the release to the others: what they
remember and step by is the same to the last bit, and the key of the noise never leaves the first rank.

Before ranks do anything together they meet: each says what it is about to do, or that it has failed. So a mistake on
one of them ends all of them at the same place, and ranks that do different things are told apart from slow ones.
"""

import atexit
import hashlib
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fodp.errors import ConfigurationError, PrivacyError
from fodp.noise import Streams
from fodp.noise.streams import keyed_from
from fodp.processes import ALONE, Processes, Turn
from fodp.queries import Query
from fodp.ranks.leaving import leave
from fodp.release import Noise
from fodp.sampling import Lot, Lots

_DIGEST = 16  # bytes of a fact
_FACTS = 64  # at most, so that ranks of different versions exchange as much
_VALUES = 6  # numbers that a rank says when it meets the others


class RankLost(RuntimeError):
    """Another rank has failed, was killed or has stalled, so this one ends too.

    No refusal: the step is lost and charged, as with an exception in the data set, and the run can be resumed with any
    number of ranks. This process group is of no more use.
    """


class Disagreement(ConfigurationError):
    """Ranks do not have in common what they must; all of them know and refuse alike."""


class _Act(IntEnum):
    """What ranks meet for."""

    COMPARE, SUM, SEND, TURN, END = range(1, 6)


_SIZED = (_Act.SUM, _Act.SEND)  # all ranks must do these with as many numbers


@dataclass(frozen=True)
class OwnLots:
    """The lots of a run, reduced to the records that this rank owns."""

    lots: Lots
    group: "Group"

    @property
    def rate(self) -> float:
        """The chance of a record, or of one whose turn it is."""
        return self.lots.rate

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """This rank's part of the lot."""
        return self.group.mine(self.lots.draw(step, name, rate))

    def whose_turn(self, step: int) -> Tensor | None:
        """The records that this step may draw, on all ranks."""
        return self.lots.whose_turn(step)

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn."""
        return self.lots.next_round(step)


@dataclass(frozen=True)
class FromFirst:
    """Noise that the first rank alone adds; it sends the release to the others."""

    noise: Noise
    group: "Group"

    def add(self, query: Query, std: float, step: int, name: str) -> Tensor:
        """One release for all ranks."""
        return self.group.from_first(lambda: self.noise.add(query, std, step, name), lambda: query.empty(query.dtype))

    @property
    def is_fresh(self) -> bool:
        """As on the first rank."""
        return self.noise.is_fresh

    def scale(self) -> float:
        """As the first rank knows it, which is asked where it knows more than the others."""
        return self.noise.scale() if self.is_fresh else self.group.number(self.noise.scale)


class Group(Processes):
    """The default process group of PyTorch, with two or more ranks."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        backend = str(dist.get_backend())
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._meetings = self._runs = 0
        self._over: str | None = None  # why nothing more can be done together
        self._key: bytes | None = None

    def shared(self, own: Streams) -> Streams:
        """One key for lots and records, sent to all ranks, fresh for each run; the key of the noise is not sent."""
        if own.seed is not None:
            return own
        self._runs += 1
        with keyed_from(self._shared_key(b"streams of run %d" % self._runs)):
            return Streams.secure()

    def compare(self, facts: Callable[[bytes], Mapping[str, bytes]]) -> None:
        """Refuse ranks whose facts differ; all of them say so alike. Hashes of facts leave, under a secret key."""
        secret = self._shared_key(b"facts")
        known = facts(secret)
        names = list(known)
        if len(names) > _FACTS:
            raise PrivacyError(f"{len(names)} facts are too many to compare")
        digests = b"".join(
            hashlib.blake2b(name.encode() + b"=" + fact, digest_size=_DIGEST, key=secret).digest()
            for name, fact in known.items()
        )
        self._meet(_Act.COMPARE)
        said = self._gathered(torch.frombuffer(bytearray(digests.ljust(_DIGEST * _FACTS, b"\0")), dtype=torch.uint8))
        for place, name in enumerate(names):
            part = slice(place * _DIGEST, (place + 1) * _DIGEST)
            odd = [rank for rank in range(self.count) if not torch.equal(said[rank][part], said[0][part])]
            if odd:
                self._over = f"rank {odd[0]} has other values than rank 0 in {name}"
                raise Disagreement(
                    f"rank {odd[0]} does not agree with rank 0 in {name}: start all ranks with the same command, code "
                    "and data, in the same order; nothing was released or charged"
                )

    def lots(self, lots: Lots) -> Lots:
        """Each rank keeps the records that it owns."""
        return OwnLots(lots, self)

    def noise(self, noise: Noise) -> Noise:
        """Added on the first rank."""
        return FromFirst(noise, self)

    def mine(self, lot: Lot) -> Lot:
        """Records whose place in the data, modulo the number of ranks, is this rank."""
        places = (lot.indices % self.count == self.rank).nonzero()[:, 0]
        names = None if lot.names is None else lot.names[places]
        return replace(lot, indices=lot.indices[places], names=names, places=places, drawn=len(lot.indices))

    def total(self, part: Tensor) -> Tensor:
        """Sum to the first rank; what the others have is wiped, for only the release is theirs."""
        self._meet(_Act.SUM, part.numel())
        there = part.to(self._device)
        with self.reached():
            dist.reduce(there, 0)
        if not self.is_first:
            return part.zero_()
        return part if there is part else part.copy_(there)

    def from_first(self, make: Callable[[], Tensor], room: Callable[[], Tensor]) -> Tensor:
        """Made on the first rank, sent to the others; a failure there reaches them before they wait for it."""
        made = make() if self.is_first else room()
        self._meet(_Act.SEND, made.numel())
        there = made.to(self._device).contiguous()
        with self.reached():
            dist.broadcast(there, 0)
        return made if there is made else made.copy_(there)

    def number(self, make: Callable[[], float]) -> float:
        """A float64, to the last bit."""
        return float(
            self.from_first(
                lambda: torch.tensor(make(), dtype=torch.float64), lambda: torch.empty((), dtype=torch.float64)
            )
        )

    def text(self, make: Callable[[], str]) -> str:
        """UTF-8, its length first."""
        data = make().encode() if self.is_first else b""
        length = self._meet(_Act.END, len(data))[0][0]
        sent = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8).to(self._device)
        with self.reached():
            dist.broadcast(sent, 0)
        return sent.cpu().numpy().tobytes().decode()

    def turn(self, said: Turn) -> Turn:
        """Stop if anybody was asked to; where the run ends is the first rank's to say, who has the ledger."""
        turns = [
            Turn(step, signal, bool(stopped), last_step, bool(spent))
            for step, signal, stopped, last_step, spent, *_ in self._meet(_Act.TURN, *map(int, said))
        ]
        for rank, turn in enumerate(turns):
            if turn.step != turns[0].step:
                self._over = f"rank {rank} is at step {turn.step}, rank 0 at step {turns[0].step}"
                raise RankLost(f"{self._over}: resume all of them from one checkpoint")
        signal = next((turn.signal for turn in turns if turn.signal), 0)
        first = turns[0]
        stopped = any(turn.stopped for turn in turns)
        return first._replace(signal=signal, stopped=stopped)

    def refuse_drift(self, parameters: Callable[[], Tensor]) -> None:
        """Weights are made of the same releases everywhere; what differs by more than rounding was changed by hand."""
        own = parameters().detach()
        first = self.from_first(own.clone, lambda: torch.empty_like(own))
        apart = float((own - first).norm()) if self.rank else 0.0
        drifted = apart > 1e-4 * (float(first.norm()) + 1e-30)  # not finite: the end of the run says so
        ranks = [rank for rank, values in enumerate(self._meet(_Act.COMPARE, int(drifted))) if values[0]]
        if ranks:
            self._over = f"the weights of rank {ranks[0]} are not those of rank 0"
            raise Disagreement(
                f"{self._over}, though both had the same releases: something changes the model, the optimizer or the "
                "learning rate on one rank alone. Callbacks are called on rank 0 only: give a scheduler instead"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """An exception of this rank's own is told to the others when they meet next."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """They are told when they meet next."""
        if self._over is None:
            with suppress(RankLost):
                self._meet(_Act.END, failed=True)
            self._over = f"rank {self.rank} has ended with an exception"

    def _meet(self, act: _Act, *values: int, failed: bool = False) -> list[list[int]]:
        """Tell all ranks what this one does next; what each of them said, if all do the same and none has failed."""
        if self._over is not None:
            raise RankLost(f"{self._over}; resume the run in a new process group")
        self._meetings += 1
        padded = [*values, *[0] * (_VALUES - len(values))]
        mine = torch.tensor([int(failed), self._meetings, int(act), *padded], dtype=torch.int64)
        said = [row.tolist() for row in self._gathered(mine)]
        ended = [rank for rank, row in enumerate(said) if row[0]]
        if ended and not failed:
            self._over = f"rank {ended[0]} has ended with an exception, see its own messages"
            raise RankLost(f"{self._over}: this rank ends too; what was used stays charged, and the run can be resumed")
        sized = act in _SIZED
        for rank, row in enumerate(said):
            if not failed and (row[1:3] != said[0][1:3] or (sized and row[3] != said[0][3])):
                self._over = f"rank {rank} does something else than rank 0"
                raise RankLost(f"{self._over} ({_Act(row[2]).name} and {_Act(said[0][2]).name}): run the same program")
        return [row[3:] for row in said]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self._device)
        said = [torch.empty_like(mine) for _ in range(self.count)]
        with self.reached():
            dist.all_gather(said, mine)
        return [row.cpu() for row in said]

    def _shared_key(self, use: bytes) -> bytes:
        """32 bytes that all ranks have and nobody else: made on the first, sent once, never written down."""
        if self._key is None:
            sent = torch.from_numpy(np.frombuffer(bytearray(secrets.token_bytes(32)), dtype=np.uint8)).to(self._device)
            with self.reached():
                dist.broadcast(sent, 0)
            self._key = sent.cpu().numpy().tobytes()
        return hashlib.blake2b(use, digest_size=32, key=self._key, person=b"fodp.ranks").digest()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn what PyTorch says of a lost connection, or of a wait that was too long, into what it means."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._over = "another rank was killed or has stalled"
            raise RankLost(
                f"{self._over} ({first}): this rank ends too; what was used stays charged, and the run can be resumed"
            ) from error


# Weak: what holds PyTorch's group keeps its threads alive after destroy_process_group, and such a thread that frees
# a tensor while Python ends aborts the process.
_group: "tuple[weakref.ref[Any], Group] | None" = None


def here() -> Processes:
    """The ranks that this process belongs to: those of the default process group, if there are two or more."""
    global _group
    if not (dist.is_available() and dist.is_initialized()):
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigurationError(
                f"torchrun has started {os.environ['WORLD_SIZE']} processes, and there is no process group: each would "
                "release by itself, under the epsilon of one. Call torch.distributed.init_process_group first"
            )
        return ALONE
    if dist.get_world_size() == 1:
        return ALONE
    world = dist.group.WORLD
    if _group is None:
        atexit.register(leave)
    if _group is None or _group[0]() is not world:
        _group = (weakref.ref(world), Group())
    return _group[1]


def refuse_other_group(ranks: Processes) -> None:
    """Raise if this run was made for other ranks than there are now: it would release by itself under the ε of one."""
    if here() is not ranks:
        raise ConfigurationError(
            "the process group was begun or ended after this run was made, which would release on each rank by itself: "
            "call torch.distributed.init_process_group first, and make the Trainer, or the private loop, in it"
        )


def refuse_group(what: str) -> None:
    """Raise in a process group of several ranks, each of which would release by itself under one ε."""
    if here() is not ALONE:
        raise ConfigurationError(f"{what} is for one process, and this one belongs to a group: run it without torchrun")
