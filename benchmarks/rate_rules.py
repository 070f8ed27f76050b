"""Rules that move the rate of lr="auto" while training, against leaving it alone: validation accuracy at equal ε.

    python benchmarks/rate_rules.py

The paper's MLP, dp-sgd, shape fan-in, 1,000 steps, q=.04, L=200, C=1, δ=1e-5; scored on train[6000:], never on test
data. All rules stay within a factor of 4 of auto. A few seconds a run on one thread; 42 runs by default.

* auto, twice auto: fixed. The second shows what there is to gain, and to lose, on each data set.
* transcript: rate_rule="transcript" of the library, an agreement by parameter (below) that is heard after a quarter of
  the run and only beyond two standard deviations, auto·2^((z - 2)/3).
* distance: noise-aware distance over gradients. The rate is the largest distance from the start over √Σ|g|², both with
  the known squares of the noise taken off.
* agreement, whole or by parameter: does a release agree with the way that the last tenth of the run went? The sum of
  the products, in standard deviations of their known noise, is z; the rate is auto·2^(z/3) from the first step on.
  "Whole" takes the product of whole vectors, in which the largest layer's noise counts most; "by parameter" lets each
  parameter vote with its own.
* probes: every 25th step releases, from its lot and beside its gradient, how much larger the losses are at the start of
  the last 25 steps and at twice their way, and moves the rate towards the minimum of a parabola (after HyFreeDP). The
  releases share the step's multiplier z=(Σ zᵢ⁻²)^(-½), so the gradient of that step gets more noise. A simulation: the
  noise has the scale that the split asks for, but is drawn here, beside the run's books.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fodp.accounting import joint
from fodp.cli._malloc import keep_freed_memory
from fodp.data.models import cross_entropy
from fodp.trainer import Trainer
from fodp_lab.paper import models
from fodp_lab.paper.execute import Curve, _scored, make_trainer, splits_for
from fodp_lab.paper.spec import RunSpec

SETTINGS = {"svhn-8": ("svhn", 8.0), "cifar10-8": ("cifar10", 8.0), "cifar10-2": ("cifar10", 2.0)}
OTHERS = {"cifar100-8": ("cifar100", 8.0), "svhn-3": ("svhn", 3.0)}  # nothing was chosen on these
STEPS = 1000
WIDEST = 4.0  # how far a rule may go from auto, both ways


class Rule:
    """The rate auto, times a constant. Called before each update, when the release is in `.grad`, divided by L."""

    factor = 1.0

    def __init__(self, trainer: Trainer):
        self.trainer, self.auto = trainer, trainer.learning_rate
        self.parameters = trainer.source.engine.layout.parameters
        plan = trainer.plan
        self.std = plan.noise_multiplier * plan.clip_norm / plan.lot_size
        self.factors = [math.sqrt(trainer.session.noise_share(p)) for p in self.parameters]  # noise has std·factor
        self.start = self.points()
        self.taken: list[float] = []
        trainer.optimizer.register_step_pre_hook(lambda *_: self.set())

    def points(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def releases(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def wanted(self) -> float:
        """The rate of the step, over auto."""
        return self.factor

    def set(self) -> None:
        """Note the rate of the step, and set it."""
        self.taken.append(min(max(self.wanted(), 1 / WIDEST), WIDEST))
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.auto * self.taken[-1]


class Twice(Rule):
    factor = 2.0


class Library(Rule):
    """What the plan's own rate_rule does."""

    def set(self) -> None:
        self.taken.append(self.trainer.optimizer.param_groups[0]["lr"] / self.auto)


class Distance(Rule):
    """max distance / √Σ|g|² without their noise, in units in which every parameter has the same noise."""

    wait = STEPS // 20  # before that both are noise

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self.size = sum(p.numel() for p in self.parameters)
        self.distance = self.squares = self.walked = 0.0

    def wanted(self) -> float:
        def square(tensors: list[Tensor]) -> float:
            return sum(float((t / b).square().sum()) for t, b in zip(tensors, self.factors, strict=True))

        if self.taken:
            self.walked += (self.auto * self.taken[-1] * self.std) ** 2 * self.size
        moved = square([p - q for p, q in zip(self.points(), self.start, strict=True)]) - self.walked
        self.distance = max(self.distance, math.sqrt(max(0.0, moved)))
        self.squares += square(self.releases()) - self.std**2 * self.size
        if len(self.taken) < self.wait or self.squares <= 0:
            return 1.0
        return self.distance / math.sqrt(self.squares) / self.auto


class Agreement(Rule):
    """auto·2^(z/3), z the agreement of releases with the recent way in standard deviations of its known noise.

    A release's noise is independent of the way before it. So without a signal the votes of a step have variance 1
    each, given all before, and z is a martingale's sum over its deviation: mean 0, variance 1, whatever was released.
    """

    by_parameter = False
    memory = 1 - 10 / STEPS  # what is left of a vote, and of a way, after a step

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self.last, self.way = self.start, [torch.zeros_like(p) for p in self.start]
        self.votes = self.variance = 0.0

    def wanted(self) -> float:
        now = self.points()
        for way, new, old in zip(self.way, now, self.last, strict=True):
            way.mul_(self.memory).add_(new - old)
        self.last = now
        if len(self.taken) == 0:
            return 1.0
        products, deviations = [], []
        for release, way, b in zip(self.releases(), self.way, self.factors, strict=True):
            products.append(-float((release * way).sum()) / b**2)
            deviations.append(self.std * float(way.norm()) / b)
        if self.by_parameter:
            vote = sum(p / d for p, d in zip(products, deviations, strict=True)) / math.sqrt(len(products))
        else:
            vote = sum(products) / math.hypot(*deviations)
        self.votes = self.memory * self.votes + vote
        self.variance = self.memory**2 * self.variance + 1
        return 2 ** (self.votes / math.sqrt(self.variance) / 3)


class AgreementByParameter(Agreement):
    by_parameter = True


class Probes(Rule):
    """Every so many steps a parabola through three losses along the way of the last ones."""

    every = 25
    more_noise = 1.15  # in the gradient of a step with probes
    clip = 0.5  # of an example's difference between two losses
    most = 1.25  # the rate changes by, at a time

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        plan, self.anchor = trainer.plan, self.start
        z = plan.noise_multiplier
        self.probe_noise = z / math.sqrt(1 - self.more_noise**-2)
        assert math.isclose(joint(self.more_noise * z, self.probe_noise), z), "the pair is the event of the plan"
        self.draws = torch.Generator().manual_seed(10**6 + (plan.seed or 0))
        self.now = 1.0

    def wanted(self) -> float:
        if self.trainer.step % self.every == 0:
            self._disturb()
            self._move(*self._probe())
            self.anchor = self.points()
        return self.now

    def _disturb(self) -> None:
        """The rest of the noise that the gradient's share of this step's multiplier asks for."""
        extra = self.std * math.sqrt(self.more_noise**2 - 1)
        for release, b in zip(self.releases(), self.factors, strict=True):
            release.add_(torch.randn(release.shape, generator=self.draws), alpha=extra * b)

    def _probe(self) -> tuple[float, float]:
        """Released: how much larger the mean losses are at the way's start, and at twice the way, than here."""
        here, lot = self.points(), self.trainer.source.asked
        assert lot is not None
        batch = self.trainer.source.fetcher.fetch(lot.indices)

        def losses(way: float) -> Tensor:
            with torch.no_grad():
                for p, a, b in zip(self.parameters, self.anchor, here, strict=True):
                    p.copy_(b if way == 1 else a + way * (b - a))
                return cross_entropy(self.trainer.model, batch)

        at_start, beyond, present = losses(0.0), losses(2.0), losses(1.0)
        differences = torch.stack([at_start - present, beyond - present]).clamp(-self.clip, self.clip).sum(1)
        std = self.probe_noise * self.clip * math.sqrt(2)  # one example moves the pair by clip·√2 at most
        noised = differences + std * torch.randn(2, generator=self.draws)
        first, second = (noised / self.trainer.plan.lot_size).tolist()
        return first, second

    def _move(self, at_start: float, beyond: float) -> None:
        curvature = at_start + beyond
        best = 1 + (at_start - beyond) / (2 * curvature) if curvature > 0 else math.copysign(10, at_start - beyond)
        factor = min(max(best, 1 / self.most), self.most)
        self.now = min(max(self.now * factor, 1 / WIDEST), WIDEST)


RULES: dict[str, Callable[[Trainer], Rule]] = {
    "auto": Rule,
    "twice auto": Twice,
    "transcript": Library,
    "distance": Distance,
    "agreement, whole": Agreement,
    "agreement, by parameter": AgreementByParameter,
    "probes": Probes,
}


def trained(rule: str, dataset: str, epsilon: float, seed: int) -> dict[str, Any]:
    """One run: final accuracy on validation data, and the rates over auto at some steps."""
    params = dict(lr="auto", shape="fan-in", rate_rule="transcript" if rule == "transcript" else "none")
    spec = RunSpec(
        dataset=dataset, method="dp-sgd", params=params, seed=seed, plan_steps=STEPS,
        steps=STEPS, target_epsilon=epsilon, accountant="pld", scored_on="validation", score_every=STEPS,
    )  # fmt: skip
    splits = splits_for(dataset, spec.model)
    torch.manual_seed(seed)
    model = models.make(spec.model, splits.card)
    curve = Curve(model, _scored(spec, splits), spec.score_every)
    trainer = make_trainer(spec, splits, model, [curve])
    moved = RULES[rule](trainer)
    outcome = trainer.fit()
    assert outcome.epsilon <= epsilon
    rates = [statistics.geometric_mean(moved.taken[at : at + STEPS // 4]) for at in range(0, STEPS, STEPS // 4)]
    return {"accuracy": curve.accuracy[-1], "rates": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES), metavar="RULE")
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=[*SETTINGS, *OTHERS], metavar="SETTING"
    )
    options = parser.parse_args()
    settings = [{**SETTINGS, **OTHERS}[name] for name in options.settings]
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"Validation accuracy in percent, mean of seeds {', '.join(map(str, options.seeds))}, and in brackets each; ")
    print("then the mean rate over auto in each quarter of the run.\n")
    print("| rule | " + " | ".join(f"{data} ε={epsilon:g}" for data, epsilon in settings) + " |")
    print("| --- |" + " --- |" * len(settings), flush=True)
    for rule in options.rules:
        cells = []
        for data, epsilon in settings:
            runs = [trained(rule, data, epsilon, seed) for seed in options.seeds]
            each = [100 * run["accuracy"] for run in runs]
            rates = [statistics.geometric_mean(column) for column in zip(*(run["rates"] for run in runs), strict=True)]
            shown = f"**{statistics.mean(each):.1f}** ({', '.join(f'{score:.1f}' for score in each)})"
            cells.append(f"{shown}; " + " ".join(f"{rate:.2f}" for rate in rates))
        print(f"| {rule} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
