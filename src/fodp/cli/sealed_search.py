"""A sealed search from its first draw to its winner: paid for before the first run, resumable, silent."""

import argparse
import json
import sys
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import fodp
from fodp.cli.job import Job
from fodp.cli.shared import open_ledger
from fodp.errors import LedgerError, PrivacyError

if TYPE_CHECKING:
    from fodp.plan import Plan
    from fodp.runs.folder import RunFolder
    from fodp.tuning.sealed import Sealed, State
    from fodp.tuning.search import Search
    from fodp.workers import Pool

_OWN_LEDGER = "data"  # the name of the data in the folder's own ledger


@dataclass(frozen=True)
class Begun:
    """A search that is paid for: what it works on, what it will do, and what is kept sealed of it."""

    job: Job
    folder: "RunFolder"
    search: "Search"
    sealed: "Sealed"
    state: "State"


def begin(options: argparse.Namespace, job: Job, folder: "RunFolder", search: "Search") -> Begun:
    """Draw how many runs, write that down sealed, and pay for all of it; or take up what was begun."""
    from fodp.tuning.sealed import Sealed, State
    from fodp.tuning.search import statement

    sealed = Sealed(folder.path)
    if options.resume:
        folder.take()
        state = sealed.read()
        if max(state.draws, default=0) >= len(search.candidates) or _plans(search) != job.config.get("plans"):
            raise LedgerError(
                f"the search in {folder.path} is not the one that began: restore a copy of its files, and use the same "
                "packages"
            )
        _charge(options, job, folder, search, state)
        return Begun(job, folder, search, sealed, state)
    job.rehearse(search.candidates[0])
    folder.create()
    state = State(search.draw())
    try:
        sealed.begin(state)
        more = {"plans": _plans(search), "run": state.selection, "fodp": fodp.__version__}
        stored = json.dumps({**job.config, **more, **job.notes(job.model())}, indent=1)
        folder.write(folder.config, stored)
        job = replace(job, config=json.loads(stored))
        _charge(options, job, folder, search, state)
    except PrivacyError:  # refused: nothing was charged, and nothing is left to be resumed
        sealed.remove()
        folder.config.unlink(missing_ok=True)
        raise
    folder.write(folder.statement, statement(search) + "\n")
    return Begun(job, folder, search, sealed, state)


def _plans(search: "Search") -> list[Any]:
    return json.loads(json.dumps([plan.to_dict() for plan in (*search.candidates, *search.final)]))


def _charge(options: argparse.Namespace, job: Job, folder: "RunFolder", search: "Search", state: "State") -> None:
    """The whole price, before the first run. What is in the ledger already is not charged again."""
    from fodp.state.ledgers import fingerprint_of, open_account

    config, private = job.config, job.splits.train
    ledger = open_ledger(folder.ledger_of(config), config, options, own_name=_OWN_LEDGER)
    account = None
    if search.final:  # held first, so that either both fit or nothing is charged
        final = search.final[search.dearest_final]
        account = open_account(ledger, state.final_run, final, final.steps, private)
    try:
        ledger.charge_selection(
            search.events,
            search.repetitions,
            unit=search.candidates[0].unit,
            name=state.selection,
            fingerprint=fingerprint_of(private),
        )
    except PrivacyError:
        if account is not None and ledger.budget_of(state.final_run) is not None and not account.charged:
            ledger.release(state.final_run)
        raise
    if account is not None:
        steps = search.final[search.dearest_final].steps
        if not account.covers(steps - 1):
            raise LedgerError(
                "the ledger did not grant the final run: what it held was given to others; nothing was trained"
            )
        account.settle(steps)
    ledger.close()


def make_runs(begun: Begun, pool: "Pool", *, quiet: bool) -> None:
    """Make the runs that are missing. Neither how many there are nor how many are done is shown."""
    from fodp.cli.sealed_run import sealed_run

    if not quiet:
        print("the search has begun; nothing of it is shown until it ends, also not how far it is", file=sys.stderr)
    search, sealed, state = begun.search, begun.sealed, begun.state
    part = None if search.fraction is None else (search.fraction, state.subsample_key)
    text = json.dumps(begun.job.config)
    done = set(state.done)
    missing = [place for place in range(len(state.draws)) if place not in done]
    under_way: dict[Future[Any], int] = {}
    while missing or under_way:
        while missing and len(under_way) < 2 * pool.jobs:
            place = missing.pop(0)
            plan = search.candidates[state.draws[place]].to_dict()
            under_way[pool.submit(sealed_run, text, plan, part)] = place
        for future in wait(under_way, return_when=FIRST_COMPLETED)[0]:
            sealed.take_in(state, under_way.pop(future), _result_of(future))


def _result_of(future: Future[Any]) -> dict[str, Any]:
    """What a run came to. Of what broke it only the kind is said: the rest might be about the data."""
    try:
        result: dict[str, Any] = future.result()
    except PrivacyError:
        raise
    except Exception as error:
        raise PrivacyError(
            f"a run of the search broke off ({type(error).__name__}): try one candidate with `fodp train` and look "
            "there; the search can be resumed, and stays charged"
        ) from None
    return result


def conclude(begun: Begun, pool: "Pool") -> dict[str, Any]:
    """Let the winner out, and nothing else."""
    from safetensors.torch import load

    from fodp.cli.sealed_run import scored_on, sealed_run
    from fodp.runs.export import write_weights
    from fodp.runs.exported import prediction_notes
    from fodp.tuning.search import grid, statement

    search, sealed, state, folder = begun.search, begun.sealed, begun.state, begun.folder
    config, splits = begun.job.config, begun.job.splits
    result: dict[str, Any] = {"winner": None, "score": None, "model": None, "noise_multiplier": None}
    if state.best is not None:
        winner = state.draws[state.best["place"]]
        plan = search.final[winner] if search.final else search.candidates[winner]
        if search.final and state.final is None:  # kept sealed before it is shown: a second one was not paid for
            sealed.keep_final(state, _result_of(pool.submit(sealed_run, json.dumps(config), plan.to_dict(), None)))
        score, weights = (state.final or state.best)["score"], sealed.weights(state)
        result |= {
            "winner": grid(config["vary"])[winner],
            "score": score,
        }  # shape=none is in no plan
        result["noise_multiplier"] = plan.noise_multiplier
        if weights:
            file = folder.path / "model.safetensors"
            notes = prediction_notes(config["model"], config["model_code"], config["card"], file.name)
            write_weights(load(weights), _card(search, plan, statement(search)) | notes, file)
            result["model"] = str(file)
    result |= {
        "score_is": ("minus the mean squared error" if splits.card.is_regression else "accuracy")
        + f" on the public {scored_on(splits)[0]} split",
        "dataset": config["dataset"],
        "method": config["method"],
        "epsilon": search.epsilon,
        "delta": search.delta,
        "search_epsilon": search.search_epsilon,
        "mean_runs": search.repetitions.mean,
        "distribution": config["distribution"],
        "candidates": len(search.candidates),
        "out": str(folder.path),
    }
    folder.write(folder.result, json.dumps(result, indent=1) + "\n")
    sealed.remove()
    return result


def _card(search: "Search", plan: "Plan", text: str) -> dict[str, Any]:
    return {
        "epsilon": search.epsilon,
        "delta": search.delta,
        "accountant": "rdp",
        "method": plan.method,
        "params": dict(plan.params),
        "sampling_rate": plan.sampling_rate,
        "steps": plan.steps,
        "clip_norm": plan.clip_norm,
        "noise_multiplier": plan.noise_multiplier,
        "unit": plan.unit_in_words(),
        "randomness": "secure",
        "statement": text,
    }
