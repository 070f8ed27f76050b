"""Real processes that train together over gloo, forked from this warm one: importing PyTorch anew takes seconds."""

import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 120  # that a test may take, on a machine with much else to do


def in_ranks(count, work, *, timeout=30.0):
    """`work(rank)` in `count` processes of one group; what each returned, or the exception's type and message.

    None stands for a process that was killed.
    """
    with tempfile.TemporaryDirectory() as folder:

        def joined(rank):
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout),
            )
            return work(rank)

        return waited([forked(rank, joined) for rank in range(count)])


def forked(rank, work):
    """A process that does `work(rank)`: its number, and the file that will hold what came out."""
    file = Path(tempfile.mkstemp(prefix="fodp-rank-")[1])
    pid = os.fork()
    if pid:
        return pid, file
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            outcome = work(rank)
        except BaseException as error:
            if os.environ.get("FODP_SHOW_RANKS"):
                traceback.print_exc()
            outcome = (type(error).__name__, str(error))
        torch.save(outcome, f"{file}.part")
        os.rename(f"{file}.part", file)
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        os._exit(0)


def waited(children):
    """What came out of each process; all of them must end."""
    ended, deadline = set(), time.monotonic() + SECONDS
    running = {pid for pid, _ in children}
    while running - ended and time.monotonic() < deadline:
        ended |= {pid for pid in running - ended if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.005)
    for pid in running - ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended == running, "not all processes ended"
    outcomes = [torch.load(file, weights_only=False) if file.stat().st_size else None for _, file in children]
    for _, file in children:
        file.unlink()
    return outcomes
