"""The table of contenders: who is measured, on what, and where its step is built."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fodp_lab.bench.targets import DP_SGD, FO_8, FO_32, FO_32_FIXED, MAIN, PLAIN, UNKEYED

if TYPE_CHECKING:
    from fodp_lab.bench.workloads import Workload

Step = Callable[[], None]

# Who builds a step: (workload, settings) -> a function that takes one step, and the number of parameters.
_BUILDERS = {
    "plain": ("fodp_lab.bench.steps", "plain"),
    "private": ("fodp_lab.bench.steps", "private"),
    "unkeyed": ("fodp_lab.bench.steps", "unkeyed"),
    "by hand": ("fodp_lab.bench.floor", "by_hand"),
    "window read": ("fodp_lab.bench.floor", "window_read"),
    "opacus": ("fodp_lab.bench.peers", "opacus"),
    "jax-privacy": ("fodp_lab.bench.peers", "jax_privacy"),
}
PEERS = ("opacus", "jax-privacy")
_WITH_DROPOUT = (*MAIN, "mlp-dropout")
_WINDOW_COUNTS = "mlp", "embedding"  # where the window is a large part of a step
TERMS = 2  # exponentials that stand for the window of the row below (a test counts them)


@dataclass(frozen=True)
class Contender:
    """One row: a name, who builds it with which settings, and the workloads it takes part in."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    workloads: tuple[str, ...] = MAIN

    @property
    def is_peer(self) -> bool:
        """Another library, which may be missing or may not know a layer."""
        return self.kind in PEERS

    @property
    def window(self) -> int:
        """Vectors of its memory: K (K-1 releases and their trend; not the free row), none for DP-SGD."""
        window = int(self.settings.get("params", {}).get("window", self.settings.get("window", 1)))
        return window if window > 1 else 0

    @property
    def rows(self) -> int:
        """The memory it keeps, in float32 vectors."""
        compact = self.settings.get("params", {}).get("compact")
        return TERMS if compact == "exponentials" else self.window

    @property
    def warm_up(self) -> int:
        """Steps before measuring: caches, first-lot checks, and a window that must be full."""
        return max(4, self.window + 1)

    def spec(self, workload: str, **changes: Any) -> dict[str, Any]:
        """What a worker process needs to know."""
        return {"workload": workload, "kind": self.kind, "settings": self.settings, **changes}


def fodp_contender(
    name: str, method: str, *, seed: int | None = 0, only: Sequence[str] = MAIN, **params: Any
) -> Contender:
    """A row of this library; `seed` None is secure noise."""
    settings = dict(method=method, seed=seed, params=params)
    return Contender(name, "private", settings, tuple(only))


CONTENDERS = (
    Contender(PLAIN, "plain", workloads=_WITH_DROPOUT),
    fodp_contender(DP_SGD, "dp-sgd", only=_WITH_DROPOUT),
    Contender(UNKEYED, "unkeyed", workloads=("mlp", "mlp-dropout")),
    fodp_contender(FO_8, "fo-dp-sgd", window=8),
    fodp_contender(FO_32, "fo-dp-sgd", window=32),
    # λ·K = 4, as the memory advises: at the default λ this window ends while its weights are large.
    fodp_contender(
        FO_32_FIXED, "fo-dp-sgd", only=_WINDOW_COUNTS, window=32, compact="exponentials", tau=0.0, lam=0.125
    ),
    fodp_contender("dp-sgd, secure noise", "dp-sgd", seed=None, only=["mlp"]),
    fodp_contender("fo-dp-sgd K=8, secure noise", "fo-dp-sgd", seed=None, only=["mlp"], window=8),
    Contender("dp-sgd by hand", "by hand", dict(window=1), ("mlp",)),
    Contender("fo-dp-sgd K=8 by hand", "by hand", dict(window=8), ("mlp",)),
    Contender("dp-sgd and a bare read, K=8", "window read", dict(window=8), _WINDOW_COUNTS),
    Contender("dp-sgd and a bare read, K=32", "window read", dict(window=32), _WINDOW_COUNTS),
    Contender("opacus hooks", "opacus", dict(mode="hooks")),
    Contender("opacus functorch", "opacus", dict(mode="functorch")),
    Contender("opacus ghost", "opacus", dict(mode="ghost")),
    # Whole batches instead of micro-batches take seconds per step on a processor.
    Contender("jax-privacy, micro-batch 20", "jax-privacy", dict(microbatch=20), ("mlp",)),
)


def build(kind: str, workload: "Workload", settings: dict[str, Any]) -> tuple[Step, int]:
    """One contender's step on a workload, and the number of parameters it trains."""
    module, function = _BUILDERS[kind]
    made: tuple[Step, int] = getattr(import_module(module), function)(workload, **settings)
    return made
