"""`torchrun -m fodp train`: join the processes that were started with this one, and let the first speak for all."""

import contextlib
import io
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fodp.errors import ConfigurationError, PrivacyError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.ranks import Processes


class Silent(SystemExit):
    """A rank ends without a word: the first one says what there is to say."""


@contextlib.contextmanager
def joined(seconds: float) -> Iterator["Processes | None"]:
    """The ranks of this command; None, without loading PyTorch, unless torchrun or the like has started several."""
    wait = checks.positive("--rank-timeout", seconds)
    count = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or count == "1":
        yield None
        return
    import torch.distributed as dist

    from fodp.ranks.leaving import leave

    _join(timedelta(seconds=wait))
    try:
        yield from _speaking()
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # a rank that leaves first breaks the connection that another may still be using
    finally:
        leave()


def _join(wait: timedelta) -> None:
    """Meet the others at the address in the environment; a rank that is there already is refused."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        store, number, size = next(rendezvous("env://", timeout=wait))
        _refuse_second(store, number)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=wait)
    except PrivacyError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"rank {rank} of {count} could not join the others within {wait.total_seconds():g} s "
            f"({str(error).splitlines()[0]}): start all of them, each once, with one MASTER_ADDR and MASTER_PORT"
        ) from None


def _refuse_second(store: Any, rank: int) -> None:
    if store.add(f"fodp.rank.{rank}", 1) > 1:
        raise ConfigurationError(f"rank {rank} has joined twice: start each rank once; nothing was released or charged")


def _speaking() -> Iterator["Processes"]:
    """What ends all ranks is said by the first one; what ends this one alone, by itself."""
    from fodp.ranks import Disagreement, RankLost, here

    ranks = here()
    quiet = contextlib.ExitStack()
    if not ranks.is_first:
        quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
    try:
        with quiet, ranks.together():
            yield ranks
    except Disagreement as error:
        raise error if ranks.is_first else Silent(2) from None
    except RankLost as error:
        raise PrivacyError(f"rank {ranks.rank}: {error}") from None
