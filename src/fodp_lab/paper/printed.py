"""The numbers that the paper prints, by the labels of the catalog."""

from fodp_lab.paper.catalog import DP_SGD, FO

# Table "Final accuracy comparison over five independent random seeds": mean, standard deviation, 95% interval.
FINAL: dict[str, tuple[float, float, float, float]] = {
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
SECONDS: dict[str, float] = {
    DP_SGD: 59.1,
    "DP-Adam": 76.1,
    "DP-AdamW": 65.7,
    "DP-IS": 65.6,
    "DP-SAM": 92.6,
    "DP-SAT": 88.6,
    "DP-Adam-AC": 60.7,
    FO: 60.1,
}
RELATIVE: dict[str, float] = {
    DP_SGD: 1.00,
    "DP-Adam": 1.29,
    "DP-AdamW": 1.11,
    "DP-IS": 1.11,
    "DP-SAM": 1.57,
    "DP-SAT": 1.50,
    "DP-Adam-AC": 1.03,
    FO: 1.02,
}
