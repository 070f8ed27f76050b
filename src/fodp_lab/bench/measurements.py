"""The results file: parts that were measured on one machine with one version, and what they say about the targets."""

import json
import os
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fodp
from fodp.errors import PrivacyError
from fodp_lab.bench.measure import paired
from fodp_lab.bench.targets import BEST_OPACUS, MEMORY_FACTOR, PLAIN, TARGETS, Target

Measured = dict[str, Any]


def conditions() -> dict[str, Any]:
    """Where and with what: parts measured under other conditions do not belong in one file."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "opacus", "jax-privacy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "fodp": fodp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        **packages,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def load(path: Path) -> Measured:
    """Read a results file."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrivacyError(f"cannot read {path} ({type(error).__name__}): give a file that fodp bench wrote") from None
    if not isinstance(results, dict) or "conditions" not in results:
        raise PrivacyError(f"{path} is not a results file of fodp bench")
    return results


def begun(path: Path) -> Measured:
    """What is in the file already; raises if it was measured under other conditions."""
    now = conditions()
    before = load(path) if path.exists() else {"conditions": now}
    if before["conditions"] != now:
        different = next(key for key in now if now[key] != before["conditions"].get(key))
        raise PrivacyError(
            f"{path} was measured with {different} {before['conditions'].get(different)}, now {now[different]}: "
            "give another --out folder"
        )
    return before


def merge(path: Path, parts: Measured) -> Measured:
    """Put newly measured parts beside those already in the file, if any, and write it."""
    before = begun(path)
    merged = {**before, **parts, "workloads": {**before.get("workloads", {}), **parts.get("workloads", {})}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


@dataclass(frozen=True)
class Judged:
    """A target beside what was measured; `ratio` None where a side of it was not."""

    target: Target
    ratio: float | None
    low: float
    high: float
    verdict: str
    note: str = ""


def judge(results: Measured) -> list[Judged]:
    """Every target of the measured workloads."""
    return [_judged(t, results["workloads"][t.workload]) for t in TARGETS if t.workload in results.get("workloads", {})]


def _judged(target: Target, measured: Measured) -> Judged:
    rows = measured["contenders"]
    over = best_opacus(rows) if target.over == BEST_OPACUS else target.over
    if over is None or over not in rows or target.under not in rows:
        return Judged(target, None, 0.0, 0.0, "not measured")
    ratio, low, high = paired(rows[over]["milliseconds"], rows[target.under]["milliseconds"])
    return Judged(target, ratio, low, high, target.verdict(low, high), over if over != target.over else "")


def best_opacus(rows: dict[str, Any]) -> str | None:
    """Its fastest mode."""
    modes = {name: statistics.median(row["milliseconds"]) for name, row in rows.items() if row["kind"] == "opacus"}
    return min(modes, key=lambda name: modes[name]) if modes else None


@dataclass(frozen=True)
class MemoryRow:
    """Peak resident memory of a contender beside what it may take."""

    workload: str
    batch: int
    contender: str
    peak_mb: float
    grown_mb: float  # above the process before its first step
    plain_mb: float
    plain_grown_mb: float
    window_mb: float

    @property
    def allowed_mb(self) -> float:
        """Some times plain training, plus the window."""
        return MEMORY_FACTOR * self.plain_mb + self.window_mb

    @property
    def verdict(self) -> str:
        """By whole processes; what they grow by is shown beside it."""
        return "met" if self.peak_mb <= self.allowed_mb else "missed"


def memory_rows(results: Measured) -> list[MemoryRow]:
    """Every memory measurement of this library beside plain training's on the same batch."""
    found = []
    for name, measured in results.get("workloads", {}).items():
        batches = {measured["batch"]: measured["contenders"], **{int(b): r for b, r in measured["memory"].items()}}
        for batch, rows in batches.items():
            plain = rows.get(PLAIN)
            for contender, row in rows.items():
                if row["kind"] != "private" or plain is None or None in (row["peak_mb"], plain["peak_mb"]):
                    continue
                window = 4 * measured["parameters"] * row["window"] / 2**20
                peak, grown = row["peak_mb"], row["peak_mb"] - row["idle_mb"]
                plain_grown = plain["peak_mb"] - plain["idle_mb"]
                found.append(
                    MemoryRow(name, batch, contender, peak, grown, plain["peak_mb"], plain_grown, window)
                )  # fmt: skip
    return found
