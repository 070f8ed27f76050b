"""Accuracy against ε, and per epoch, from a run's metrics file."""

import csv
from pathlib import Path

from fodp.support.extras import pyplot
from fodp.support.files import atomically


def plot_accuracy(metrics: Path, out: Path, title: str) -> None:
    """Draw the public scores of a run; nothing is drawn if there are none."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("accuracy")]
    if not rows:
        return
    plt = pyplot()
    epsilons, scores = [float(r["epsilon"]) for r in rows], [float(r["accuracy"]) for r in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    left.plot(epsilons, scores, marker=".", color="#2b6cb0")
    left.set(xlabel="ε of the steps so far", ylabel="accuracy on public data")
    right.plot([int(r["epoch"]) for r in rows], scores, marker=".", color="#2b6cb0")
    right.set(xlabel="epoch")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    with atomically(out) as part:  # readable by its owner only, like all files of a run
        figure.savefig(part, dpi=150, format="png")
    plt.close(figure)
