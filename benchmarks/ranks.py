"""What several processes cost and save: time of a step, bytes that are sent, memory, over gloo on this machine.

    python benchmarks/ranks.py [--workloads mlp transformer] [--ranks 1 2 3] [--steps 30] [--skips]

Strong scaling keeps the lot and adds ranks; weak scaling gives each rank as much. A rank has one thread. Bytes are
those of the tensors that a rank hands to PyTorch, counted; what a ring or tree makes of them is gloo's. Times are
medians of the slowest rank, by the clock and of its processor: where others use the machine, look at the second.
`--skips` times drawing a lot of 10 and 100 million records.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fodp import Plan, Trainer
from fodp.noise import Streams
from fodp.sampling import PoissonSampler, poisson_indices
from fodp_lab.bench.workloads import WORKLOADS


def losses(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB on Linux


def counted(sent: dict[str, int]) -> None:
    """Count the bytes of every tensor that is handed to a collective."""
    for name in ("reduce", "broadcast", "all_gather"):
        collective = getattr(dist, name)

        def counting(*args, collective=collective, name=name, **words):
            tensor = args[1] if name == "all_gather" else args[0]
            sent[name] = sent.get(name, 0) + tensor.numel() * tensor.element_size()
            return collective(*args, **words)

        setattr(dist, name, counting)


def work(rank: int, count: int, store: str, workload: str, lot: int, steps: int) -> dict:
    torch.set_num_threads(1)
    if count > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    sent: dict[str, int] = {}
    counted(sent)
    what = WORKLOADS[workload]
    data = what.data()
    plan = Plan(
        sampling_rate=lot / len(data[0]), steps=steps + 5, lot_size=lot, clip_norm=1.0, noise_multiplier=1.0,
        delta=1e-5, seed=0, params=dict(window=8), method="fo-dp-sgd",
    )  # fmt: skip
    torch.manual_seed(0)
    session = Trainer(what.model(), losses, data, plan).session
    for _ in range(3):  # two lots are looked at
        session.take_step()
    sent.clear()
    times = []
    for _ in range(steps):
        started = time.perf_counter(), time.process_time()
        session.take_step()
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    return {
        "milliseconds": [1e3 * statistics.median(which) for which in zip(*times, strict=True)],
        "bytes": {name: total / steps for name, total in sent.items()},
        "parameters": session.source.layout.size,
    }


def in_processes(count: int, *arguments) -> list[dict]:
    """Forked, so that PyTorch is loaded once; what each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(count):
            pid = os.fork()
            if not pid:
                try:
                    found = work(rank, count, f"{folder}/store", *arguments)
                    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def steps_table(workloads: list[str], ranks: list[int], steps: int) -> None:
    for workload in workloads:
        lot = WORKLOADS[workload].batch
        print(f"\n{workload}, FO-DP-SGD K=8, lot {lot}")
        print(
            "| ranks | same lot: ms of a step, of the processor | lot times ranks | bytes of sums, releases, meetings |"
        )
        print("| --- | --- | --- | --- |")
        for count in ranks:
            fewer = steps if workload == "mlp" else max(3, steps // 5)
            strong = in_processes(count, workload, lot, fewer)
            weak = strong if count == 1 else in_processes(count, workload, lot * count, fewer)
            slowest = [
                ", ".join(f"{max(found['milliseconds'][which] for found in ranks):.1f}" for which in (0, 1))
                for ranks in (strong, weak)
            ]
            sent = strong[0]["bytes"]
            told = [f"{sent.get(name, 0):,.0f}" for name in ("reduce", "broadcast", "all_gather")]
            print(f"| {count} | {slowest[0]} | {slowest[1]} | {', '.join(told)} |", flush=True)
        print(f"{strong[0]['parameters']} parameters; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def skips_table() -> None:
    print("\n| records | by | ms a lot of 1000 | MB |\n| --- | --- | --- | --- |")
    for size in (10**7, 10**8):
        for by in ("skips", "mask"):
            if by == "mask" and size > 10**7:
                continue  # 800 MB of words
            streams, before, times = Streams.secure(), resident(), []
            sampler = PoissonSampler(size, 1000 / size, streams)
            for step in range(5):
                started = time.perf_counter()
                if by == "skips":
                    sampler.draw(step)
                else:
                    poisson_indices(streams.words(size, step, "mask"), 1000 / size)
                times.append(1e3 * (time.perf_counter() - started))
            print(f"| {size:,} | {by} | {statistics.median(times):.2f} | {resident() - before:.0f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mlp", "transformer"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skips", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.skips:
        skips_table()
    else:
        steps_table(options.workloads, options.ranks, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
