"""Made-up records in the format of real ones, for tests of what reads them."""

import numpy as np

from fodp_lab.paper import fair
from fodp_lab.paper.catalog import EXPERIMENTS, METHODS
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import NON_PRIVATE


def record(spec, top, rng, code="made-up"):
    """A run that rises to about `top`."""
    steps = list(range(spec.score_every, spec.steps + 1, spec.score_every)) or [spec.steps]
    share = np.arange(1, len(steps) + 1) / len(steps)
    curve = 0.1 + (top - 0.1) * (1 - np.exp(-6 * share)) + rng.normal(0, 0.004, len(steps))
    epsilon = spec.target_epsilon
    if epsilon is None and spec.method != NON_PRIVATE:
        epsilon = 24.0 * spec.params.get("beta", 1.0) / spec.noise_multiplier
    accuracy = [round(float(a), 4) for a in curve]
    return {
        "key": spec.key, "code": code, "run": spec.to_dict(), "algorithm": spec.method, "seed": spec.seed,
        "final_accuracy": accuracy[-1], "best_accuracy": max(accuracy), "final_loss": 2.0, "final_epsilon": epsilon,
        "noise_multiplier": spec.noise_multiplier or 1.0, "params": dict(spec.params), "seconds": 30.0,
        "curve": {"steps": steps, "accuracy": accuracy}, "torch": "2", "python": "3", "at": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def write_paper(folder, tops, seeds=5, only=None, spread=0.01):
    """Records of the paper's experiments; `tops(spec)` is where a run ends, seeds shift all methods alike."""
    records, rng = Records(folder / "paper.jsonl"), np.random.default_rng(0)
    lines = []
    for name, experiment in EXPERIMENTS.items():
        if only is None or name in only:
            for spec in experiment.runs(seeds):
                if records.get(spec.key) is None:
                    shift = spread * np.sin(spec.seed + 1)
                    lines.append(record(spec, tops(spec) + shift + rng.normal(0, spread / 5), rng))
                    records._found[spec.key] = lines[-1]
    _write(records, lines)


def write_fair(folder, tops, only=None, protocol=fair.FULL):
    """Records of the fair comparison, or of some of its rows."""
    records, rng = Records(folder / "fair.jsonl"), np.random.default_rng(1)
    rows = [row for row in fair.rows_in(folder) if only is None or row.label in only]
    comparison = fair.Comparison(rows, records, protocol)
    lines = []
    for _, specs in comparison.rounds():
        for spec in specs:
            if records.get(spec.key) is None:
                top = tops(spec) + 0.01 * np.sin(spec.seed) + rng.normal(0, 0.002)
                lines.append(record(spec, top, rng))
                records._found[spec.key] = lines[-1]
    _write(records, lines)


def write_runtime(folder, ratios, turns=25, code="made-up", day="2026-01-01"):
    """Rounds of turns of every method; `ratios` are relative to one second."""
    records, rng = Records(folder / "runtime.jsonl"), np.random.default_rng(2)
    for number in range(turns):
        times = {label: round(float(ratios.get(label, 1.0) * np.exp(rng.normal(0, 0.01))), 4) for label in METHODS}
        records.append({"key": f"runtime-{code}-{number}", "code": code, "round": number, "steps": 250,
                        "seconds": times, "torch": "2", "at": f"{day}T00:00:00Z"})  # fmt: skip


def _write(records, lines):
    """All at once: a sync to the disk for each of two thousand lines takes long."""
    import json

    records.path.parent.mkdir(parents=True, exist_ok=True)
    with records.path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
