"""`fodp tune`: a sealed search for parameters, paid for before it begins, of which only the winner leaves."""

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fodp.cli.config import completed, defaults, given, refuse_otherwise, setting
from fodp.cli.job import Job
from fodp.cli.options import CONFIGURATION, INPUTS, LEDGER, add, flag
from fodp.cli.shared import with_ledger
from fodp.errors import ConfigurationError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.data import Splits
    from fodp.plan import Plan
    from fodp.runs.folder import RunFolder
    from fodp.tuning.search import Search

EPILOG = """examples:
  fodp tune --dataset digits --method dp-sgd --target-epsilon 4 --vary lr=0.1,0.2,0.4 --runs 5 --out runs/search
  fodp tune --resume --out runs/search
  fodp tune --data patients.csv --schema schema.toml --target disease --test-data public.csv --target-epsilon 3 \\
            --vary lr=0.1,0.5,2 --runs 10 --ledger patients.sqlite --dataset-name patients --out runs/search

--target-epsilon is that of the whole search. How many runs it makes is drawn at random and stays secret, and so does
everything about them but the best one: docs/tuning.md."""

DEFAULTS: dict[str, Any] = defaults("runs", "distribution")
_SEARCH_SHARE = 0.5  # of the target, for a search on a part of the data
_FILES = ("dataset", "test_data", "owners", "public_sample")  # for which workers may look from elsewhere


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp tune`."""
    names = f"vary runs distribution subsample search_epsilon {INPUTS} {LEDGER} threads jobs ray out resume json quiet"
    add(parser, f"{CONFIGURATION} {names}", required="out", told={"out": "folder of the search"})


def run(options: argparse.Namespace) -> int:
    """Search, and say what won and what the whole cost."""
    from fodp.cli.sealed_search import begin, conclude, make_runs
    from fodp.runs.folder import RunFolder
    from fodp.workers import open_pool

    if options.jobs is not None:
        checks.whole("--jobs", options.jobs, maximum=4096)
    folder = RunFolder(options.out)
    config = _stored_config(options, folder) if options.resume else _new_config(options)
    job = Job.of(config, data_dir=config.get("data_dir"), features_cache=config.get("features_cache"))
    _refuse_without_public_data(job.splits)
    search = _search(job)
    job.refuse_idle_sample((*search.candidates, *search.final))
    pool = open_pool(options.jobs, options.ray)
    done = False
    try:
        begun = begin(options, job, folder, search)
        make_runs(begun, pool, quiet=bool(options.quiet))
        result = conclude(begun, pool)
        done = True
    finally:
        pool.close(at_once=not done)
        folder.leave()
    _tell(options, folder, search, result)
    return 0


def _new_config(options: argparse.Namespace) -> dict[str, Any]:
    said = given(options)
    config = completed(said, DEFAULTS)
    for name, why in (
        ("noise_multiplier", "a search calibrates the noise so that all of it costs --target-epsilon"),
        ("accountant", "the best of several runs is priced by Rényi divergences"),
    ):
        if name in said:
            raise ConfigurationError(f"{flag(name)} is not for a search: {why}; leave it out")
    if config.get("target_epsilon") is None:
        raise ConfigurationError("how private? add --target-epsilon EPS, which is that of the whole search")
    config["vary"] = _varied(said)
    # What is tried stands for itself, also where the recipe has a value.
    if "set" in config:
        config["set"] = {name: value for name, value in config["set"].items() if name not in config["vary"]}
    config |= _places(options)
    for name in _FILES:
        if name in config and os.path.isfile(str(config[name])):
            config[name] = os.path.abspath(config[name])
    if "search_epsilon" in config and "subsample" not in config:
        raise ConfigurationError(
            "--search-epsilon divides the target between a search and a final run: add --subsample"
        )
    if "subsample" in config and "records_per_person" in config:
        raise ConfigurationError("--subsample draws records, and --records-per-person protects people: leave one out")
    return with_ledger(config, options)


def _varied(said: dict[str, Any]) -> dict[str, list[Any]]:
    """{parameter: values}, from texts like lr=0.1,0.2."""
    varied: dict[str, list[Any]] = {}
    for item in said.get("vary", ()):
        name, equals, texts = item.partition("=")
        name = name.strip()
        if not equals or not name or not all(text.strip() for text in texts.split(",")):
            raise ConfigurationError(f"--vary takes NAME=VALUE,VALUE, for example --vary lr=0.1,0.2,0.4; got {item!r}")
        if name in varied or name in said.get("set", {}) or (name in ("lr", "shape") and name in said):
            raise ConfigurationError(f"{name} is given twice: vary it, or set it")
        varied[name] = [setting(f"{name}={text.strip()}")[1] for text in texts.split(",")]
    return varied


def _stored_config(options: argparse.Namespace, folder: "RunFolder") -> dict[str, Any]:
    from fodp.tuning.sealed import Sealed

    stored = folder.read_config()
    if "vary" not in stored or not isinstance(stored["vary"], dict):
        raise ConfigurationError(f"{folder.path} does not hold a search: resume a run with `fodp train --resume`")
    if folder.result.exists():
        Sealed(folder.path).remove()  # a kill may have come between the two
        raise ConfigurationError(f"the search in {folder.path} has ended: its result is {folder.result}")
    said = given(options)
    if "vary" in said:
        said["vary"] = _varied({"vary": said["vary"]})
    refuse_otherwise(stored, said, folder, "search")
    if options.ledger is not None:
        stored["ledger"] = options.ledger  # it may have moved; a charge that is not in there is made
    return stored | _places(options)


def _places(options: argparse.Namespace) -> dict[str, str]:
    """Folders that workers look into, perhaps from elsewhere."""
    said = {name: getattr(options, name) for name in ("data_dir", "features_cache")}
    return {name: os.path.abspath(folder) for name, folder in said.items() if folder is not None}


def _refuse_without_public_data(splits: "Splits") -> None:
    from fodp.cli.sealed_run import scored_on

    if not len(scored_on(splits)[1]):
        raise ConfigurationError(
            "a search compares runs by a score on public data, and there is none: name some with --test-data (a score "
            "on private data would have to be paid for)"
        )


def _search(job: Job) -> "Search":
    """The candidates with their noise, from public numbers alone."""
    from fodp.accounting.budget import Repetitions
    from fodp.tuning.search import SHAPES, calibrated, grid

    config = job.config
    checks.one_of("--distribution", config["distribution"], tuple(SHAPES))
    if not checks.number("--runs", config["runs"]) >= 1:
        raise ConfigurationError(f"--runs must be at least 1, got {config['runs']:g}")
    repetitions = Repetitions(config["runs"], SHAPES[config["distribution"]])
    target = checks.positive("--target-epsilon", config["target_epsilon"])
    plans = [_candidate(job, values) for values in grid(config["vary"])]
    fraction = config.get("subsample")
    if fraction is None:
        return calibrated(plans, repetitions, target)
    checks.open_fraction("--subsample", fraction)
    share = config.get("search_epsilon", _SEARCH_SHARE * target)
    if not 0 < checks.number("--search-epsilon", share) < target:
        raise ConfigurationError(f"--search-epsilon must lie between 0 and the target {target:g}, got {share:g}")
    small = [replace(plan, lot_size=max(1.0, round(plan.lot_size * fraction))) for plan in plans]
    return calibrated(small, repetitions, target, fraction=fraction, final=plans, search_target=share)


def _candidate(job: Job, values: dict[str, Any]) -> "Plan":
    tried = {**job.config, "set": {**job.config.get("set", {}), **values}, "noise_multiplier": 10.0}
    plan = replace(job, config=tried).plan()
    if not plan.algorithm.candidates(plan):
        return plan
    # What is left to calibration (bands of fo-noise) is chosen for half of the target: about what one run costs alone.
    alone = {**tried, "noise_multiplier": None, "target_epsilon": job.config["target_epsilon"] / 2}
    return replace(replace(job, config=alone).plan(), noise_multiplier=plan.noise_multiplier)


def _tell(options: argparse.Namespace, folder: "RunFolder", search: "Search", result: dict[str, Any]) -> None:
    from fodp.accounting import rounded_up
    from fodp.tuning.search import statement

    text = sys.stderr if options.json else sys.stdout
    if result["winner"] is None:
        print("nothing came out: no run was drawn, or all of them diverged; the charge stays", file=text)
    else:
        chosen = ", ".join(f"{name}={value}" for name, value in result["winner"].items())
        score = "it diverged" if result["score"] is None else f"{abs(result['score']):.4f}"
        print(f"best: {chosen}; {score} ({result['score_is'].removeprefix('minus ')})", file=text)
    spent = f"epsilon {rounded_up(search.epsilon)} at delta {rounded_up(search.delta, 6)} for the whole search"
    print(f"{spent}\n\n{statement(search)}\n\nfolder: {folder.path}", file=text)
    if options.json:
        print(json.dumps(result))
