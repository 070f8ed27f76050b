"""The paper's experiments by name: which runs each one needs. The protocol is `RunSpec`'s defaults.

The paper states the learning rate of FO-DP-SGD (0.8, which is DP-SGD's too, being β=1) and says that the
baselines' settings were chosen by validation, without naming them. Here: 0.8 for all methods that take plain
SGD steps; for the Adam family the best rate on `train[6000:]`, as the experiment `baseline-rates` records.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fodp_lab.paper.spec import RunSpec
from fodp_lab.paper.variants import SCALES, VARIANTS

DATASETS = ("svhn", "cifar10", "cifar100")
BETAS = (1.0, 0.95, 0.9, 0.8, 0.65)
_BASELINE_RATES = (0.0001, 0.0003, 0.001, 0.003)
SEEDS = 5  # as the paper's table of final accuracies; where it shows one run, three here, one for `clipping`

DP_SGD, FO = "DP-SGD (FO, β=1)", "FO-DP-SGD"
AS_HERE = "our choices"  # of this project, where the paper names none


def fo(beta: float = 0.9, alpha: float = 0.8, window: int = 8, **more: Any) -> dict[str, Any]:
    """Parameters of FO-DP-SGD as the paper's main configuration has them."""
    return dict(lr=0.8, beta=beta, alpha=alpha, window=window, **more)


# The eight methods of the paper's first figure and tables: label, method, parameters.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    DP_SGD: ("dp-sgd", dict(lr=0.8)),
    "DP-Adam": ("dp-adam", dict(lr=0.0003)),
    "DP-AdamW": ("dp-adamw", dict(lr=0.0003)),
    "DP-IS": ("dp-is", dict(lr=0.8)),
    "DP-SAM": ("dp-sam", dict(lr=0.8)),
    "DP-SAT": ("dp-sat", dict(lr=0.8)),
    "DP-Adam-AC": ("dp-adam-ac", dict(lr=0.001)),
    FO: ("fo-dp-sgd", fo()),
}


@dataclass(frozen=True)
class Row:
    """One line of a figure or table: where it stands, what it is called, and its run but for the seed."""

    panel: str
    label: str
    spec: RunSpec


@dataclass(frozen=True)
class Experiment:
    """A named experiment: its rows, and over how many seeds."""

    name: str
    title: str
    rows: tuple[Row, ...]
    seeds: int = SEEDS

    def runs(self, seeds: int | None = None) -> Iterator[RunSpec]:
        """Every run: the first seed of all rows first, so that what an interrupted run leaves is balanced."""
        for seed in range(self.seeds if seeds is None else min(seeds, self.seeds)):
            for row in self.rows:
                yield row.spec.with_(seed=seed)


def _row(panel: str, label: str, dataset: str, method: str, params: dict[str, Any], **more: Any) -> Row:
    return Row(panel, label, RunSpec(dataset=dataset, method=method, params=params, **more))


def _all_methods(panel: str, dataset: str, **more: Any) -> list[Row]:
    return [_row(panel, label, dataset, method, params, **more) for label, (method, params) in METHODS.items()]


def _beta(panel: str, dataset: str) -> list[Row]:
    # β=1 is DP-SGD itself (a test shows the equality to the last bit), and is computed once for both.
    return [
        _row(panel, f"β={beta:g}", dataset, *(METHODS[DP_SGD] if beta == 1 else ("fo-dp-sgd", fo(beta))))
        for beta in BETAS
    ]


def _varied(name: str, values: tuple[Any, ...], label: str) -> list[Row]:
    return [_row("cifar10", f"{label}={v:g}", "cifar10", "fo-dp-sgd", fo(**{name: v})) for v in values]


def _sensitivity() -> list[Row]:
    """Each open parameter far below and far above its default; κ and ζ in units of the default's scale."""
    from fodp.memory import noise_floor

    size = 3072 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
    floor = noise_floor(1.1, size, 0.1)
    settings: list[tuple[str, dict[str, Any]]] = [("defaults", {})]
    for letter, name, low, high in (("λ", "lam", 0.0, 0.5), ("τ", "tau", 0.0, 1.0), ("γ", "gamma", 0.01, 0.5)):
        settings += [(f"{letter}={value:g}", {name: value}) for value in (low, high)]
    for letter, name in (("κ", "kappa"), ("ζ", "zeta")):
        settings += [(f"{letter}={factor:g}×", {name: factor * floor}) for factor in (0.1, 10.0)]
    return [_row("cifar10", label, "cifar10", "fo-dp-sgd", fo(**more)) for label, more in settings]


def _learning_rates() -> list[Row]:
    """The paper's protocol with nothing changed but the learning rate: same σ, same ε."""
    rows = [(DP_SGD, "dp-sgd", {}), (FO, "fo-dp-sgd", fo())]
    return [
        _row(f"lr={rate:g}", label, "cifar10", method, {**params, "lr": rate})
        for rate in (0.8, 0.2, 0.05)
        for label, method, params in rows
    ]


def _reference() -> list[Row]:
    """Our choices, and the same with one thing done otherwise that the paper leaves open; all for β=1, two for FO."""
    rows = []
    for label, names in ((DP_SGD, VARIANTS), (FO, SCALES)):
        row = _row(label, AS_HERE, "cifar10", *METHODS[label])
        rows += [row, *(Row(label, name, row.spec.with_(variant=name)) for name in names)]
    return rows


def _clipping() -> list[Row]:
    return [
        row
        for sigma in (1.5, 2.0)
        for clip in (0.5, 1.0, 1.5, 2.0)
        for row in _all_methods(f"σ={sigma:g}, C={clip:g}", "cifar10", noise_multiplier=sigma, clip_norm=clip)
    ]


def _baseline_rates() -> list[Row]:
    adam = {label: method for label, (method, _) in METHODS.items() if "adam" in method}
    return [
        _row(label, f"lr={rate:g}", "cifar10", method, dict(lr=rate), scored_on="validation")
        for label, method in adam.items()
        for rate in _BASELINE_RATES
    ]


def _memory_designs() -> list[Row]:
    beta = dict(lr=0.8, beta=0.9, window=8)
    return [
        _row("cifar10", "current only", "cifar10", *METHODS[DP_SGD]),
        _row("cifar10", "uniform", "cifar10", "fo-uniform", beta),
        _row("cifar10", "exponential", "cifar10", "fo-exponential", beta),
        _row("cifar10", FO, "cifar10", *METHODS[FO]),
    ]


def _insertion() -> list[Row]:
    return [
        _row("cifar10", "DP-SGD", "cifar10", *METHODS[DP_SGD]),
        _row("cifar10", "Post-FM-DP-SGD", "cifar10", "post-fm-dp-sgd", fo()),
        _row("cifar10", FO, "cifar10", *METHODS[FO]),
    ]


def _of(rows: Callable[[str, str], list[Row]], datasets: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(row for dataset in datasets for row in rows(dataset, dataset))


EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment("baseline-rates", "Learning rates of the Adam family", tuple(_baseline_rates()), seeds=1),
        Experiment("final-accuracy", "Final accuracy, five seeds", tuple(_all_methods("cifar10", "cifar10"))),
        Experiment("accuracy", "Test accuracy per epoch, eight methods", _of(_all_methods, DATASETS), seeds=3),
        Experiment("insertion", "Memory in the query or after the release", tuple(_insertion())),
        Experiment("memory-design", "Four designs of memory in the query", tuple(_memory_designs())),
        Experiment("window", "Memory depth K", tuple(_varied("window", (1, 2, 8, 32), "K"))),
        Experiment("order", "Fractional order α", tuple(_varied("alpha", (0.2, 0.5, 0.8), "α"))),
        Experiment("beta-tradeoff", "Accuracy against ε, five values of β", _of(_beta, DATASETS), seeds=3),
        Experiment("beta-joint", "Accuracy and ε per epoch, five values of β", _of(_beta, ("cifar100",)), seeds=3),
        Experiment("clipping", "Clipping norms at σ=1.5 and σ=2", tuple(_clipping()), seeds=1),
        Experiment("learning-rate", "Ours: the learning rate alone", tuple(_learning_rates()), seeds=3),
        Experiment(
            "reference", "Ours: the images, pixels and weights that the paper leaves open", tuple(_reference()), seeds=3
        ),
        Experiment("sensitivity", "The parameters that the paper leaves open", tuple(_sensitivity()), seeds=3),
    )
}
RUNTIME = "runtime"  # measured one run at a time, see `runtime.py`
NAMES = (*EXPERIMENTS, RUNTIME)


def quick(spec: RunSpec) -> RunSpec:
    """A tenth of an hour for everything: ten epochs, the same settings."""
    return spec.with_(plan_steps=250, steps=250)


# What the paper prints.
# Table "Final accuracy comparison over five independent random seeds": mean, standard deviation, 95% interval.
PRINTED_FINAL: dict[str, tuple[float, float, float, float]] = {
    FO: (0.3654, 0.0075, 0.3560, 0.3748),
    "DP-SAM": (0.3292, 0.0111, 0.3154, 0.3430),
    "DP-SAT": (0.3281, 0.0105, 0.3150, 0.3412),
    DP_SGD: (0.3241, 0.0091, 0.3128, 0.3354),
    "DP-IS": (0.2928, 0.0079, 0.2829, 0.3027),
    "DP-Adam": (0.2438, 0.0108, 0.2304, 0.2572),
    "DP-AdamW": (0.2268, 0.0103, 0.2141, 0.2395),
    "DP-Adam-AC": (0.2054, 0.0086, 0.1947, 0.2161),
}

# Tables "Runtime comparison on CIFAR-10" (seconds for 250 epochs) and "Relative runtime overhead".
PRINTED_SECONDS: dict[str, float] = {
    DP_SGD: 59.1,
    "DP-Adam": 76.1,
    "DP-AdamW": 65.7,
    "DP-IS": 65.6,
    "DP-SAM": 92.6,
    "DP-SAT": 88.6,
    "DP-Adam-AC": 60.7,
    FO: 60.1,
}
PRINTED_RELATIVE: dict[str, float] = {
    DP_SGD: 1.00,
    "DP-Adam": 1.29,
    "DP-AdamW": 1.11,
    "DP-IS": 1.11,
    "DP-SAM": 1.57,
    "DP-SAT": 1.50,
    "DP-Adam-AC": 1.03,
    FO: 1.02,
}
