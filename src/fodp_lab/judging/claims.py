"""The paper's claims: where it makes them, in its words, and what the records say about each."""

from dataclasses import dataclass

from fodp_lab.judging import verdicts
from fodp_lab.judging.results import Results
from fodp_lab.judging.verdicts import Verdict, best, equal_epsilon, final, late, trajectory, undecided
from fodp_lab.paper.catalog import DP_SGD, FO, METHODS


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that numbers can decide."""

    id: str
    experiment: str
    where: str
    words: str
    rule: str  # a key of `verdicts.RULES`
    judge: verdicts.Judge
    number: str = ""
    note: str = ""


FIGURE_1, FIGURE_2 = "Fig. cross-dataset accuracy", "Fig. privacy-utility tradeoff over β"
TABLE = "Table final accuracy"
_TRADEOFF_WORDS = {
    "svhn": "On SVHN … all fractional-memory variants outperform the β=1.00 baseline in the privacy-utility plane",
    "cifar10": "On CIFAR-10, the fractional configurations achieve high accuracy at substantially smaller "
    "privacy budgets",
    "cifar100": "On CIFAR-100 … The β=1.00 curve remains far below the other variants",
}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "final-baseline",
        "final-accuracy",
        TABLE,
        "FO-DP-SGD (β=1.00) 0.3241 ± 0.0091, [0.3128, 0.3354]",
        "number",
        verdicts.baseline,
        "0.3241",
    ),
    Claim(
        "final-fo",
        "final-accuracy",
        TABLE,
        "FO-DP-SGD (β=0.90, α=0.80, K=8) 0.3654 ± 0.0075, [0.3560, 0.3748]",
        "number",
        verdicts.main_row,
        "0.3654",
    ),
    Claim(
        "final-gain",
        "final-accuracy",
        TABLE,
        "The non-overlapping confidence intervals between these two variants "
        "indicate that the improvement … is statistically consistent",
        "better",
        verdicts.one_over("final-accuracy", FO, final, None, DP_SGD),
        "+4.13 points",
    ),
    Claim(
        "final-best",
        "final-accuracy",
        TABLE,
        "achieves the highest final test accuracy among all evaluated methods",
        "better",
        verdicts.one_over("final-accuracy", FO, final),
        "+3.62 points over DP-SAM, +3.73 over DP-SAT",
    ),
    Claim(
        "final-others",
        "final-accuracy",
        TABLE,
        "DP-SAM 0.3292, DP-SAT 0.3281, DP-IS 0.2928, DP-Adam 0.2438, DP-AdamW 0.2268, DP-Adam-AC 0.2054",
        "number",
        verdicts.other_rows,
        note="The paper does not name the settings of these methods, so a difference says little.",
    ),
    Claim(
        "accuracy-svhn",
        "accuracy",
        FIGURE_1,
        "On SVHN, the proposed method achieves the highest accuracy trajectory "
        "among the compared methods for most of the training process",
        "better",
        verdicts.one_over("accuracy", FO, trajectory, "svhn"),
    ),
    Claim(
        "accuracy-cifar10",
        "accuracy",
        FIGURE_1,
        "On CIFAR-10 … Its trajectory remains consistently above the DP-Adam, DP-AdamW, DP-SAM, DP-SAT, DP-Adam-AC, "
        "and DP-SGD/FO-DP-SGD β=1.00 baselines",
        "better",
        verdicts.one_over("accuracy", FO, trajectory, "cifar10", *(label for label in METHODS if label != "DP-IS")),
    ),
    Claim(
        "accuracy-cifar100",
        "accuracy",
        FIGURE_1,
        "The CIFAR-100 results … achieves the best final trajectory and maintains a clear advantage "
        "over the standard … baseline as well as the adaptive DP optimizer variants",
        "better",
        verdicts.one_over("accuracy", FO, late, "cifar100"),
    ),
    Claim(
        "fewer-epochs",
        "accuracy",
        "Conclusion",
        "required fewer training epochs to reach target utility levels",
        "better",
        verdicts.sooner,
        note="The target is 95% of DP-SGD's mean final accuracy; equal in practice means within 1% of the epochs.",
    ),
    *(
        Claim(
            f"tradeoff-{panel}",
            "beta-tradeoff",
            FIGURE_2,
            _TRADEOFF_WORDS[panel],
            "better",
            verdicts.all_over("beta-tradeoff", "β=1", equal_epsilon, panel),
            note="Compared at equal ε: both curves averaged over the budgets that both pass through.",
        )
        for panel in ("svhn", "cifar10", "cifar100")
    ),
    Claim(
        "tradeoff-low",
        "beta-tradeoff",
        FIGURE_2,
        "On CIFAR-10 … β=0.65 and β=0.80 rapidly improve accuracy at low ε",
        "better",
        verdicts.all_over("beta-tradeoff", "β=1", verdicts.at_low_epsilon, "cifar10", "β=0.65", "β=0.8"),
        note="Low means the lowest third of the budgets that both curves pass through.",
    ),
    Claim(
        "joint-accuracy",
        "beta-joint",
        "Fig. joint ablation of β",
        "the fractional-memory variants with β<1 consistently outperform the β=1.00 baseline in terms of test accuracy",
        "better",
        verdicts.all_over("beta-joint", "β=1", trajectory),
    ),
    Claim(
        "joint-intermediate",
        "beta-joint",
        "Fig. joint ablation of β",
        "The β=0.65 setting … generally lags behind the intermediate β values",
        "better",
        verdicts.all_over("beta-joint", "β=0.65", trajectory, None, "β=0.95", "β=0.9", "β=0.8"),
    ),
    Claim(
        "joint-epsilon",
        "beta-joint",
        "Fig. joint ablation of β",
        "The largest privacy cost is obtained when β=1.00, "
        "while progressively smaller values of β yield lower accumulated privacy budgets",
        "exact",
        verdicts.epsilon_falls_with_beta,
    ),
    Claim(
        "window-none",
        "window",
        "Fig. memory depth K",
        "the no-memory configuration K=1 performs substantially worse than the memory-enhanced variants",
        "better",
        verdicts.all_over("window", "K=1", trajectory),
    ),
    Claim(
        "window-eight",
        "window",
        "Fig. memory depth K",
        "Among the evaluated memory depths, K=8 achieves the strongest overall accuracy profile",
        "better",
        verdicts.one_over("window", "K=8", trajectory),
    ),
    Claim(
        "insertion-epsilon",
        "insertion",
        "Fig. privacy-utility, memory insertion",
        "FO-DP-SGD achieves a substantially better privacy-utility tradeoff than both standard DP-SGD and the "
        "post-processing fractional-memory baseline",
        "better",
        verdicts.one_over("insertion", FO, equal_epsilon),
        note="Compared at equal ε: both curves averaged over the budgets that both pass through.",
    ),
    Claim(
        "insertion-post",
        "insertion",
        "Fig. mechanism-level versus post-processing",
        "Post-FM-DP-SGD improves over DP-SGD",
        "better",
        verdicts.one_over("insertion", "Post-FM-DP-SGD", trajectory, None, "DP-SGD"),
    ),
    Claim(
        "insertion-epochs",
        "insertion",
        "Fig. mechanism-level versus post-processing",
        "FO-DP-SGD achieves the highest accuracy throughout most of training",
        "better",
        verdicts.one_over("insertion", FO, trajectory),
    ),
    Claim(
        "insertion-filter",
        "fair",
        "Mechanism-level privacy-utility advantage",
        "the improvement is not merely due to applying a smoothing filter to already privatized gradients",
        "better",
        verdicts.not_a_filter,
        note="The exact twin of FO-DP-SGD is such a filter. The claim is refuted if, in every paired run, the twin is "
        "within one percentage point; accuracies alone cannot confirm it.",
    ),
    Claim(
        "memory-any",
        "memory-design",
        "Fig. query-level memory design",
        "Uniform and exponential memory improve over the current-only DP-SGD variant",
        "better",
        verdicts.all_over("memory-design", "current only", final, None, "uniform", "exponential"),
    ),
    Claim(
        "memory-fo",
        "memory-design",
        "Fig. query-level memory design",
        "FO-DP-SGD achieves the highest final … accuracy",
        "better",
        verdicts.one_over("memory-design", FO, final),
    ),
    Claim(
        "memory-fo-best",
        "memory-design",
        "Fig. query-level memory design",
        "FO-DP-SGD achieves the highest … best accuracy",
        "better",
        verdicts.one_over("memory-design", FO, best),
    ),
    *(
        Claim(
            f"clipping-{sigma}",
            "clipping",
            f"Fig. varying clipping norms, σ={sigma}",
            "FO-DP-SGD consistently achieves the strongest accuracy trajectory across all clipping values",
            "one seed",
            verdicts.clipping(sigma),
        )
        for sigma in ("1.5", "2")
    ),
    Claim(
        "runtime-overhead",
        "runtime",
        "Tables runtime",
        "requires only 1.02× the runtime of the no-memory FO-DP-SGD reference",
        "runtime",
        verdicts.small_overhead,
        "1.02×",
    ),
    Claim(
        "runtime-faster",
        "runtime",
        "Tables runtime",
        "substantially faster than DP-Adam, DP-SAM, and DP-SAT",
        "runtime",
        verdicts.faster,
        "1.29×, 1.57×, 1.50× against 1.02×",
    ),
    Claim(
        "runtime-comparable",
        "runtime",
        "Tables runtime",
        "DP-Adam-AC is close to FO-DP-SGD in runtime",
        "runtime",
        verdicts.comparable,
        "1.03× against 1.02×",
    ),
    Claim(
        "fixed-budgets",
        "fair",
        "Conclusion",
        "it achieved stronger accuracy under fixed privacy budgets",
        "better",
        verdicts.fixed_budgets,
        note="From the fair comparison: equal ε, every method tuned under one search budget.",
    ),
)


def judge_all(results: Results) -> dict[str, Verdict]:
    """A verdict for every claim. Short runs decide nothing."""
    if results.quick:
        return {c.id: undecided("these are the short runs of --quick, whose numbers mean nothing") for c in CLAIMS}
    return {claim.id: claim.judge(results) for claim in CLAIMS}
