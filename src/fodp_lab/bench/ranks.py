"""Several processes, one model: time of a step, bytes that are sent, memory of the window, over gloo on this machine.

Strong scaling keeps the lot and adds ranks; weak scaling gives each rank as much. A rank has one thread. Bytes are
those of the tensors that a rank hands to PyTorch, counted; what a ring or tree makes of them is gloo's. Times are
medians of the slowest rank, by the clock and of its processor: where others use the machine, look at the second.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fodp import Plan, Trainer
from fodp.errors import PrivacyError
from fodp_lab.bench.workloads import WORKLOADS

MOST_RANKS = 3
NAMES = ("mlp", "transformer")
WINDOW = 8
_SETTLE = WINDOW + 1  # steps that fill the window; the first two lots are looked at besides
_COLLECTIVES = ("reduce", "broadcast", "all_gather")


def measured(names: Iterable[str], steps: int, say: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """One row for each workload and number of ranks, as soon as it is measured."""
    for name in names:
        lot = WORKLOADS[name].batch
        for ranks in range(1, MOST_RANKS + 1):
            say(f"{name}: {ranks} ranks")
            strong = _in_processes(ranks, name, lot, steps)
            weak = strong if ranks == 1 else _in_processes(ranks, name, lot * ranks, steps)
            first = strong[0]
            yield {
                "workload": name,
                "ranks": ranks,
                "lot": lot,
                "steps": steps,
                "parameters": first["parameters"],
                "strong": _slowest(strong),
                "weak": _slowest(weak),
                "bytes": first["bytes"],
                "window_bytes": max(found["window_bytes"] for found in strong),
                "load": round(os.getloadavg()[0], 1),
            }


def _slowest(found: list[dict[str, Any]]) -> dict[str, float]:
    return {clock: max(one[clock] for one in found) for clock in ("wall_ms", "processor_ms")}


def _in_processes(ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank measured."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_work, args=(rank, ranks, folder, *arguments)) for rank in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise PrivacyError("a rank of the benchmark failed: see above; nothing of this row was kept")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _work(rank: int, ranks: int, folder: str, name: str, lot: int, steps: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    sent: dict[str, int] = {}
    _count(sent)
    data = WORKLOADS[name].data()
    plan = Plan(
        sampling_rate=lot / len(data[0]), steps=steps + _SETTLE, lot_size=lot, clip_norm=1.0, noise_multiplier=1.0,
        delta=1e-5, seed=0, params=dict(window=WINDOW), method="fo-dp-sgd",
    )  # fmt: skip
    torch.manual_seed(0)
    session = Trainer(WORKLOADS[name].model(), _losses, data, plan).session
    for _ in range(_SETTLE):
        session.take_step()
    sent.clear()
    times = []
    for _ in range(steps):
        before = time.perf_counter(), time.process_time()
        session.take_step()
        times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    wall, processor = (1e3 * statistics.median(which) for which in zip(*times, strict=True))
    window = session.states["method"].state_dict()
    found = {
        "wall_ms": round(wall, 2),
        "processor_ms": round(processor, 2),
        "bytes": {name: round(total / steps) for name, total in sorted(sent.items())},
        "parameters": session.source.layout.size,
        "window_bytes": sum(tensor.numel() * tensor.element_size() for tensor in _tensors(window)),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()  # whoever ends first would break the others' connections
        dist.destroy_process_group()


def _losses(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _count(sent: dict[str, int]) -> None:
    """Count the bytes of every tensor that is handed to a collective."""
    for name in _COLLECTIVES:
        collective = getattr(dist, name)

        def counting(*args: Any, collective: Any = collective, name: str = name, **words: Any) -> Any:
            tensor = args[1] if name == "all_gather" else args[0]
            sent[name] = sent.get(name, 0) + tensor.numel() * tensor.element_size()
            return collective(*args, **words)

        setattr(dist, name, counting)
