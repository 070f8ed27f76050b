"""What a run leaves in writing: its configuration, its result, a picture, and the words on the terminal."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fodp
from fodp.accounting import rounded_up

if TYPE_CHECKING:
    from fodp.cli.job import Job
    from fodp.ledger import Ledger
    from fodp.plan import Plan
    from fodp.runs.folder import RunFolder
    from fodp.trainer import Result, Trainer

NOTHING_CHARGED = "nothing was charged"
MUCH_MEMORY = 2e9  # bytes of earlier noise that are told of


def remarks(plan: "Plan", config: dict[str, Any], size: int) -> Iterator[str]:
    """Sentences about what is allowed and hardly meant; `size` is the number of trained numbers."""
    from fodp.plan import odd_delta, odd_strength

    yield from odd_delta(plan)
    yield from odd_strength(plan, config.get("target_epsilon"))
    earlier = len(plan.algorithm.strategy()) - 1
    if 4 * earlier * size > MUCH_MEMORY:
        yield (
            f"noise is correlated over {earlier + 1} steps, and that of earlier ones takes "
            f"{4e-9 * earlier * size:.1f} GB of memory. Less: --method fo-noise --shape fan-in --set order=None "
            "--set average=ema --set bands=4, or --method dp-sgd"
        )


def write_beginning(folder: "RunFolder", job: "Job", trainer: "Trainer") -> None:
    """The statement and the configuration, from which the run is resumed."""
    plan = trainer.plan
    stored = {
        **job.config,
        "delta": plan.delta,
        "plan": plan.to_dict(),
        "run": trainer.run_id,
        "fodp": fodp.__version__,
        "described": plan.described().sentences(),
        **job.notes(trainer.model),
    }
    folder.write(folder.statement, trainer.statement() + "\n")
    folder.write(folder.config, json.dumps(stored, indent=1))


def result_of(
    config: dict[str, Any], trainer: "Trainer", outcome: "Result", seconds: float, folder: "RunFolder"
) -> dict[str, Any]:
    """The result, as result.json and --json have it: a closed list of public facts."""
    plan, scores = trainer.plan, trainer.metrics
    return {
        "dataset": config["dataset"],
        "model": config["model"],
        "method": plan.method,
        "params": dict(plan.params),
        "lr": trainer.learning_rate,
        "reason": outcome.reason,
        "steps": outcome.steps,
        "lost_steps": outcome.lost_steps,
        "final_accuracy": scores.get("accuracy"),
        "best_accuracy": scores.get("best_accuracy"),
        "final_loss": scores.get("loss"),
        "epsilon": outcome.epsilon,
        "delta": outcome.delta,
        "noise_multiplier": plan.noise_multiplier,
        "accountant": plan.accountant,
        "randomness": "secure" if plan.seed is None else "seeded",
        **({"unit": plan.unit_in_words()} if plan.unit == "person" else {}),
        "dataset_name": config.get("dataset_name"),
        "budget_left": _share_left(trainer.ledger),
        # How long it took tells how large the lots were, and so the data: for research only.
        "seconds": None if plan.seed is None else round(seconds, 3),
        "out": str(folder.path),
    }


def _share_left(ledger: "Ledger | None") -> float | None:
    """The share of the data's budget that is left; None without a budget."""
    if ledger is None or ledger.dataset is None or ledger.budget(ledger.dataset) is None:
        return None
    return ledger.left(ledger.dataset)


def conclude(options: argparse.Namespace, folder: "RunFolder", trainer: "Trainer", result: dict[str, Any]) -> None:
    """Write and print what came out; all of it states one ε."""
    text = sys.stderr if options.json else sys.stdout
    if result["reason"] == "interrupted":
        print(_interrupted(result, trainer.plan, folder), file=text)
        return
    folder.write(folder.result, json.dumps(result, indent=1) + "\n")
    _draw(folder, result)
    for line in (*_told(result, trainer.plan), f"\n{trainer.statement()}\n\nrun folder: {folder.path}"):
        print(line, file=text)
    if options.json:
        print(json.dumps(result))


def _interrupted(result: dict[str, Any], plan: "Plan", folder: "RunFolder") -> str:
    resume = f"fodp train --resume --out {folder.path}"
    if not result["steps"]:
        return f"stopped before the first step: {NOTHING_CHARGED}; begin again with: {resume}"
    return (
        f"stopped after step {result['steps']} of {plan.steps}; if it ends here, after what was seen, its epsilon is "
        f"{rounded_up(result['epsilon'])}; go on with: {resume}"
    )


def _draw(folder: "RunFolder", result: dict[str, Any]) -> None:
    from fodp.cli.plot import plot_accuracy
    from fodp.support.extras import MissingExtra

    try:
        plot_accuracy(folder.metrics, folder.plot, f"{result['method']} on {result['dataset']}, δ={result['delta']:g}")
    except OSError as error:
        print(f"no picture: {folder.plot} could not be written ({error.strerror})", file=sys.stderr)
    except MissingExtra as error:
        print(f"no picture was drawn: {error}", file=sys.stderr)


_ENDS = {
    "stopped early": "stopped early at step {steps} of {planned}, because of public scores: the epsilon is still that "
    "of all planned steps, since where a run stops tells something too",
    "target reached": "stopped at step {steps} of {planned}: one more would exceed the target",
    "budget spent": "stopped at step {steps} of {planned}: other runs took the rest of the budget",
}


def _told(result: dict[str, Any], plan: "Plan") -> Iterator[str]:
    """What came out, line by line."""
    if result["final_accuracy"] is not None:
        yield f"accuracy {result['final_accuracy']:.4f} on the public test split"
    elif result["final_loss"] is not None:
        yield f"mean squared error {result['final_loss']:.4f} on the public test split, target in [-1, 1]"
    else:
        yield "no accuracy: there is no public test data to score on"
    if plan.options.rate.is_automatic:
        then = ", then by what was released" if result["params"].get("rate_rule", "none") != "none" else ""
        yield f"learning rate {result['lr']:.4g}, chosen from public numbers only (lr=auto){then}"
    yield f"epsilon {rounded_up(result['epsilon'])} at delta {rounded_up(result['delta'], 6)}"
    if result["reason"] in _ENDS:
        yield _ENDS[result["reason"]].format(steps=result["steps"], planned=plan.steps)
    if result["budget_left"] is not None:
        yield f"{result['budget_left']:.1%} of the budget of {result['dataset_name']} is left"
    if result["lost_steps"]:
        yield f"{result['lost_steps']} steps were lost to a crash but stay charged"
