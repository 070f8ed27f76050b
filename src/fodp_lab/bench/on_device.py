"""Plain and private steps on an accelerator, and the noise that is made there: `fodp bench --device NAME`."""

import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import fodp
from fodp.noise import chacha
from fodp.support import devices
from fodp_lab.bench.contenders import CONTENDERS, Contender
from fodp_lab.bench.measure import Say, interleaved, median_interval
from fodp_lab.bench.targets import PLAIN

_KINDS = "plain", "private"  # what runs where the model is; peers and loops by hand are the processor's
_NUMBERS = 2**24  # of noise at once
_TIMES = 5


def measured(device: torch.device, names: Sequence[str], rounds: int, burst_seconds: float, say: Say) -> dict[str, Any]:
    """Milliseconds of a step by the clock, of every contender on every workload, and nanoseconds of a normal."""
    workloads = {name: _workload(device, name, rounds, burst_seconds, say) for name in names}
    say("noise")
    return {
        "device": device_name(device),
        "torch": str(torch.__version__),
        "fodp": fodp.__version__,
        "workloads": workloads,
        "noise_ns": None if device.type == "cpu" else noise_ns(device),  # the CPU's noise is AES, and no part of this
    }


def _workload(device: torch.device, name: str, rounds: int, burst_seconds: float, say: Say) -> dict[str, Any]:
    taking_part = contenders(name)
    specs = {c.name: c.spec(name, device=str(device)) for c in taking_part}
    warm_up = {c.name: c.warm_up for c in taking_part}
    times, _, failed = interleaved(specs, warm_up, rounds, 1, burst_seconds, lambda text: say(f"{name}: {text}"))
    rows = {contender: _row(seconds, times.get(PLAIN)) for contender, seconds in times.items()}
    return {"rows": rows, "failed": failed}


def _row(seconds: Sequence[float], plain: Sequence[float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"milliseconds": [1e3 * value for value in median_interval(seconds)]}
    if plain:
        row["of plain"] = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
    return row


def noise_ns(device: torch.device, numbers: int = _NUMBERS) -> float:
    """Nanoseconds of one float32 normal that is made on the device and added there."""
    out, key = torch.zeros(numbers, device=device), bytes(32)  # of no run
    seconds = []
    for turn in range(_TIMES + 1):
        devices.finish(device)
        start = time.perf_counter()
        chacha.add_normals_(out, 1.0, key, 0)
        devices.finish(device)
        if turn:  # the first one compiles
            seconds.append(time.perf_counter() - start)
    return 1e9 * statistics.median(seconds) / numbers


def device_name(device: torch.device) -> str:
    """What it is called by whoever made it."""
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device.type} ({platform.processor() or platform.machine()})" if ask is None else str(ask(device))


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/scaling.md."""
    noise = f"; {results['noise_ns']:.3g} ns a normal that is made and added there" if results["noise_ns"] else ""
    lines = [
        f"{results['device']}, PyTorch {results['torch']}, fodp {results['fodp']}{noise}.",
        "",
        "| workload | step | ms, median [interval] | of plain |",
        "| --- | --- | --- | --- |",
    ]
    for name, workload in results["workloads"].items():
        for contender, row in workload["rows"].items():
            middle, low, high = row["milliseconds"]
            share = f"{row['of plain']:.2f}" if "of plain" in row else ""
            lines.append(f"| {name} | {contender} | {middle:.2f} [{low:.2f}, {high:.2f}] | {share} |")
        lines += [f"| {name} | {contender} | {why} | |" for contender, why in workload["failed"].items()]
    return "\n".join(lines) + "\n"


def contenders(name: str) -> list[Contender]:
    """Who is measured on a workload."""
    return [c for c in CONTENDERS if c.kind in _KINDS and name in c.workloads]
