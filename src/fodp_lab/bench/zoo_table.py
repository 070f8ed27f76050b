"""`fodp bench --zoo`: what private gradients of real models cost, and the page that shows it.

A row is measured in a process of its own, forked from one that has imported everything and computed nothing. Plain,
private and Opacus's steps take turns, and what counts is the median of their processor time, which other people's work
on the machine moves less than the clock's.
"""

import ctypes
import gc
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fodp.clipping import Clipper
from fodp_lab.bench import measurements
from fodp_lab.bench.zoo import REAL, ZOO, Example, Look, build, look

Step = Callable[[], Any]
Say = Callable[[str], None]
CLIP_NORM = 0.1
MODES = ("hooks", "functorch", "ghost")


@dataclass
class Row:
    """What one model showed. Ratios are over a plain step's forward and backward pass; memory is in MB."""

    path: str
    error: float
    reason: str = ""
    plain_seconds: float = 0.0
    private: float | None = None
    opacus: dict[str, float | str] = field(default_factory=dict)  # by mode: the ratio, or why there is none
    plain_mb: float = 0.0
    private_mb: float | None = None

    @property
    def best_opacus(self) -> tuple[str, float] | None:
        """Its fastest mode."""
        ran = [(mode, value) for mode, value in self.opacus.items() if not isinstance(value, str)]
        return min(ran, key=lambda each: each[1], default=None)


# --- steps ----------------------------------------------------------------------------------------------------


def plain_step(example: Example) -> Step:
    """Forward and backward of the mean loss."""
    model, batch, loss_fn = example

    def step() -> None:
        model.zero_grad()
        loss_fn(model, batch).mean().backward()

    return step


def private_step(example: Example) -> Step:
    """A clipped sum, with the first lots, which are looked at, behind it."""
    model, batch, loss_fn = example
    clipper = Clipper(model, loss_fn, seed=0)
    for _ in range(2):
        clipper.clipped_sum(batch, CLIP_NORM)
    return lambda: clipper.clipped_sum(batch, CLIP_NORM)


def opacus_step(example: Example, mode: str) -> Step:
    """The clipped sum by Opacus: per-example gradients, or two backward passes."""
    from opacus.grad_sample.utils import prepare_module

    model, batch, loss_fn = example
    ghost = mode == "ghost"
    options: dict[str, Any] = dict(max_grad_norm=CLIP_NORM, use_ghost_clipping=True) if ghost else {}
    private: Any = prepare_module(model, mode, loss_reduction="sum", **options)
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]

    def two_passes() -> None:
        private.zero_grad()
        losses = loss_fn(private, batch)
        private.enable_hooks()
        losses.sum().backward(retain_graph=True)
        weights = private.get_clipping_coef()
        private.zero_grad()
        private.disable_hooks()
        (weights * losses).sum().backward()
        private.enable_hooks()

    def held() -> None:
        private.zero_grad()
        loss_fn(private, batch).sum().backward()
        gradients: list[Tensor] = [p.grad_sample for p in trained if p.grad_sample is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        weights = (CLIP_NORM / (norms + 1e-6)).clamp(max=1)
        for gradient in gradients:
            torch.einsum("i,i...", weights, gradient)

    return two_passes if ghost else held


# --- measuring ------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int, peers: bool = True) -> Row:
    """One row; peers take part where installed."""
    seen: Look = look(name)
    row = Row(seen.path, seen.error, seen.reason)
    if seen.path == "refused":
        return row
    model = build(name, REAL)
    steps: dict[str, Step] = {"plain": plain_step(model), "private": private_step(model)}
    for mode in MODES if peers else ():
        try:
            step = opacus_step(build(name, REAL), mode)
            step()
            steps[mode] = step
        except Exception as why:
            row.opacus[mode] = f"{type(why).__name__}: {why}".splitlines()[0][:160]
    row.plain_mb, row.private_mb = (_held(model[0]) + _growth(steps[each]) for each in ("plain", "private"))
    seconds = _seconds(steps, rounds)
    row.plain_seconds, row.private = seconds["plain"], seconds["private"] / seconds["plain"]
    for mode in MODES:
        if mode in seconds:
            row.opacus[mode] = seconds[mode] / seconds["plain"]
    return row


def _seconds(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of processor time by contender, in turns."""
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(rounds + 1):
        for contender, step in steps.items():
            begin = time.process_time()
            step()
            seconds[contender].append(time.process_time() - begin)
    return {contender: statistics.median(each[1:]) for contender, each in seconds.items()}


def _growth(step: Step) -> float:
    """How much the process grows at most in a step, in MB. What earlier steps had is given back first."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins here
    step()
    return _status("VmHWM") - before


def _held(model: nn.Module) -> float:
    """MB of parameters: what training has before its first step."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def _status(entry: str) -> float:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(entry + ":"))
    return int(line.split()[1]) / 1024


def _apart(function: Callable[..., Any], *given: Any) -> Any:
    """In a forked process: nothing of it stays."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        theirs.send(function(*given))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"measuring {given[0]} ended with exit code {process.exitcode}") from None
    finally:
        process.join()


def measured(names: list[str], rounds: int, peers: bool, say: Say) -> Iterator[dict[str, Any]]:
    """The results, again after every row, with where and under which load they were measured."""
    import peft
    import torch._dynamo  # noqa: F401  # which a first pass imports: once, not in every fork
    import transformers

    packages = {"transformers": transformers.__version__, "peft": peft.__version__}
    rows: dict[str, Any] = {}
    loads: list[float] = []
    for name in names:
        say(name)
        rows[name] = asdict(_apart(measure, name, rounds, peers))
        loads.append(os.getloadavg()[0])
        yield {
            "conditions": measurements.conditions() | packages,
            "load": [min(loads), max(loads)],
            "rounds": rounds,
            "size": asdict(REAL),
            "zoo": rows,
        }


def merged(before: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """New rows beside those that are there, in the zoo's order; rows of other conditions are left out."""
    same = ("conditions", "rounds", "size")
    if before is None or any(before[key] != new[key] for key in same):
        return new
    rows = before["zoo"] | new["zoo"]
    loads = before["load"] + new["load"]
    return new | {"load": [min(loads), max(loads)], "zoo": {name: rows[name] for name in ZOO if name in rows}}


def everything() -> list[str]:
    """The names of all models."""
    return list(ZOO)


# --- the page -------------------------------------------------------------------------------------------------

# What was aimed at, private over plain, by words of a name; the first that fits.
TARGETS: list[tuple[tuple[str, ...], float]] = [
    (("LoRA", "DoRA", "IA3", "prompt"), 1.3),
    (("BERT", "GPT", "T5", "Llama", "Qwen", "Gemma", "Mistral", "OPT", "ViT", "Transformer", "class token"), 1.5),
    (("LSTM", "GRU"), 2.5),
    (("",), 2.0),
]


def target(name: str) -> float:
    """The ratio that was aimed at."""
    return next(ratio for words, ratio in TARGETS if any(word in name for word in words))


def markdown(results: dict[str, Any]) -> str:
    """The page of a results file."""
    where, size = results["conditions"], results["size"]
    rows = {name: Row(**row) for name, row in results["zoo"].items()}
    met = [name for name, row in rows.items() if row.private is not None and row.private <= target(name)]
    fast = [name for name, row in rows.items() if row.path in ("layers", "functions")]
    compared = {name: row for name, row in rows.items() if row.best_opacus and row.private is not None}
    ahead = {name: row.best_opacus[1] / row.private for name, row in compared.items()}  # type: ignore[index, operator]
    lines = [
        "# Models that people have",
        "",
        "Made from [zoo.json](zoo.json) by `fodp bench --zoo --markdown docs/zoo.json`, part of `make docs`; measured",
        "by `fodp bench --zoo --out docs`.",
        "",
        f"Of {len(rows)} models {len(fast)} leave the one-example loop, and {len(met)} meet what was aimed at. Opacus "
        f"runs on {len(compared)} of",
        f"them in one mode or another: this library is at least as fast on {sum(a >= 1 for a in ahead.values())}, and "
        f"twice as fast on {sum(a >= 2 for a in ahead.values())}.",
        "",
        "| model | path | error | private over plain | aim | Opacus, best mode | over it | memory over plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ZOO:
        cells = _cells(name, rows[name]) if name in rows else [name, "not measured", *["–"] * 6]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = [f"* {name}: {row.reason}" for name, row in rows.items() if row.reason]
    none = [name for name, row in rows.items() if not row.best_opacus and row.opacus]
    return "\n".join(
        [
            *lines,
            "",
            "* path: rules for layers, rules for functions, or the one-example loop.",
            "* error: relative, of the clipped sum against the one-example loop, on a tiny model in float64.",
            f"* private over plain: a clipped sum over forward and backward, median of {results['rounds']} turns of "
            "processor time, one",
            f"  thread. Lots of {size['lot']}, texts of {size['length']} words out of {size['words']}, layers of "
            f"{size['width']}, images of {size['image']} pixels.",
            "* Opacus: per-example gradients by hooks or functorch, or ghost clipping, the fastest that runs; clipped",
            "  and summed, no noise.",
            "* memory: parameters and the growth of the process in a step, over that of plain training.",
            "",
            *([*reasons, ""] if reasons else []),
            *([f"Opacus runs in no mode on: {', '.join(none)}.", ""] if none else []),
            f"{where['processor']}, {where['cores']} cores, {where['system']}, Python {where['python']}, torch "
            f"{where['torch']}, transformers {where['transformers']},",
            f"peft {where['peft']}, opacus {where['opacus']}, fodp {where['fodp']}. Others worked on the machine: load "
            f"averages of {results['load'][0]:.1f} to {results['load'][1]:.1f}.",
            "",
        ]
    )


def _cells(name: str, row: Row) -> list[str]:
    if row.private is None:
        return [name, row.path, "–", "–", f"{target(name):g}", "–", "–", "–"]
    best = row.best_opacus
    return [
        name,
        row.path,
        "–" if row.path == "loop" else f"{row.error:.0e}",
        f"{row.private:.2f}" if row.private <= target(name) else f"**{row.private:.2f}**",
        f"{target(name):g}",
        f"{best[1]:.2f} ({best[0]})" if best else "does not run",
        f"{best[1] / row.private:.2f}" if best else "–",
        f"{row.private_mb / row.plain_mb:.2f}" if row.private_mb is not None and row.plain_mb > 1 else "–",
    ]
