"""What is compared with what, and the ratio that is asked for. Plain numbers; torch is not loaded for them."""

from dataclasses import dataclass

# Workloads by name, as the tables call them.
TITLES = {
    "mlp": "the paper's MLP (3072-64-32-10)",
    "mlp-dropout": "the paper's MLP with dropout 0.5 after both hidden layers",
    "conv": "conv net with GroupNorm on 32x32 images",
    "transformer": "transformer encoder, 4 layers, width 128, length 128",
    "embedding": "embedding (20k x 16), mean, linear",
}
MAIN = ("mlp", "conv", "transformer", "embedding")  # where everybody takes part
# DP-SGD without what keeps its premise: no draws by record, no look at generators and later lots.
UNKEYED = "dp-sgd, draws not by record"
PLAIN, DP_SGD, FO_8, FO_32 = "plain SGD", "dp-sgd", "fo-dp-sgd K=8", "fo-dp-sgd K=32"
FO_32_FIXED = "fo-dp-sgd K=32 exponentials"  # with τ=0, two vectors instead of thirty-one
BEST_OPACUS = "opacus, best mode"  # stands for the fastest of its modes on the workload

PAPER_RUN_SECONDS = 30.0
MEMORY_FACTOR = 1.4  # peak memory: this many times plain training, plus the window
MEMORY_BATCH = 1024  # the largest batch for which that is promised
LINEAR_EXPONENT = 1.1  # cost per step may grow with at most this power


@dataclass(frozen=True)
class Target:
    """A bound on the time of one contender over that of another: at most `limit`, or at least if `at_least`."""

    workload: str
    over: str
    under: str
    limit: float
    at_least: bool = False

    @property
    def label(self) -> str:
        """Such as `dp-sgd / plain SGD`."""
        return f"{self.over} / {self.under}"

    @property
    def bound(self) -> str:
        """Such as `≤ 1.15`."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    def verdict(self, low: float, high: float) -> str:
        """Met or missed if the whole interval of the measured ratio says so, otherwise unclear."""
        worst, best = (low, high) if self.at_least else (high, low)
        return "met" if self._holds(worst) else "unclear" if self._holds(best) else "missed"

    def _holds(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit


def _targets(
    workload: str, dp_sgd: float, fo_8: float, fo_32: float, compact: float | None, opacus: float
) -> list[Target]:
    rows = [
        Target(workload, DP_SGD, PLAIN, dp_sgd),
        Target(workload, FO_8, DP_SGD, fo_8),
        Target(workload, FO_32, DP_SGD, fo_32),
    ]
    if compact is not None:
        rows.append(Target(workload, FO_32_FIXED, DP_SGD, compact))
    return [*rows, Target(workload, BEST_OPACUS, DP_SGD, opacus, at_least=True)]


TARGETS = (
    *_targets("mlp", 1.15, 1.06, 1.25, 1.1, 2.0),
    Target("mlp", FO_8, PLAIN, 1.4),
    Target("mlp", DP_SGD, UNKEYED, 1.03),
    Target("mlp-dropout", DP_SGD, UNKEYED, 1.1),
    *_targets("conv", 1.8, 1.03, 1.06, None, 2.0),
    *_targets("transformer", 1.6, 1.03, 1.06, None, 1.5),
    *_targets("embedding", 1.3, 1.1, 1.3, 1.15, 2.0),
)
