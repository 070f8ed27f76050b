"""`fodp tune`: a sealed search for parameters, paid for before it begins, of which only the winner leaves."""

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fodp.cli.job import DEFAULTS, add_options, completed, given, load_data, make_plan, setting
from fodp.cli.ledger import with_ledger
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

_DEFAULTS: dict[str, Any] = dict(DEFAULTS, epochs=40.0, runs=10.0, distribution="geometric")
_ANEW = ("resume", "jobs", "ray", "ledger", "no_budget", "allow_changed_data", "allow_other_name")
_SEARCH_SHARE = 0.5  # of the target, for a search on a part of the data


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp tune`."""
    add = parser.add_argument
    add_options(parser, epochs=_DEFAULTS["epochs"])
    add(
        "--vary", action="append", metavar="NAME=V,V", help="values of a parameter to try (lr=0.1,0.2); may be repeated"
    )
    add("--runs", type=float, metavar="MEAN", help="mean of the random number of runs, default 10")
    add("--distribution", metavar="NAME", help="of that number: geometric (default), logarithmic or poisson")
    add("--subsample", type=float, metavar="F", help="search on a random fraction of the data, then one run on all")
    add("--search-epsilon", type=float, metavar="EPS", help="with --subsample: of the search, default half the target")
    add("--microbatch", type=int, metavar="N", help="examples in flight at a time (default: by the model)")
    add("--ledger", metavar="FILE", help="privacy ledger of many runs, or postgresql://… (default: the folder's own)")
    add("--dataset-name", metavar="NAME", help="your name for the data; its runs in the ledger share one budget")
    add("--budget", metavar="EPS,DELTA", help="budget of the data over all runs, fixed by its first run")
    add("--no-budget", action="store_true", default=None, help="a new data set in --ledger, without a limit")
    add("--allow-changed-data", action="store_true", default=None, help="the data has changed on purpose")
    add("--allow-other-name", action="store_true", default=None, help="the ledger knows the data by two names")
    add("--jobs", type=int, metavar="N", help="processes, one thread each (default: the number of cores)")
    add("--ray", metavar="ADDRESS", help="run on this Ray cluster (HOST:PORT or auto), or on a local one (local)")
    add("--out", metavar="DIR", required=True, help="folder of the search")
    add("--resume", action="store_true", help="go on with the search in --out")
    add("--json", action="store_true", help="the last line on stdout is the result as JSON")
    add("--quiet", action="store_true", help="nothing on stderr while it runs")


def run(options: argparse.Namespace) -> int:
    """Search, and say what won and what the whole cost."""
    from fodp.cli.sealed_search import begin, conclude, make_runs
    from fodp.runs.folder import RunFolder
    from fodp.workers import open_pool

    if options.jobs is not None:
        checks.whole("--jobs", options.jobs, maximum=4096)
    folder = RunFolder(options.out)
    config = _stored_config(options, folder) if options.resume else _new_config(options)
    splits = load_data(config, argparse.Namespace(data_dir=config.get("data_dir"), quiet=True))
    _refuse_without_public_data(splits)
    search = _search(config, splits)
    pool = open_pool(options.jobs, options.ray)
    done = False
    try:
        sealed, state = begin(options, config, folder, search, splits)
        make_runs(pool, config, search, sealed, state, quiet=options.quiet)
        result = conclude(pool, config, folder, search, sealed, state, splits)
        done = True
    finally:
        pool.close(at_once=not done)
        folder.leave()
    _tell(options, folder, search, result)
    return 0


def _new_config(options: argparse.Namespace) -> dict[str, Any]:
    said = given(options, apart=_ANEW)
    config = completed(said, _DEFAULTS)
    for name, why in (
        ("noise_multiplier", "a search calibrates the noise so that all of it costs --target-epsilon"),
        ("accountant", "the best of several runs is priced by Rényi divergences"),
    ):
        if name in said:
            raise ConfigurationError(f"--{name.replace('_', '-')} is not for a search: {why}; leave it out")
    if config.get("target_epsilon") is None:
        raise ConfigurationError("how private? add --target-epsilon EPS, which is that of the whole search")
    config["vary"] = _varied(said)
    # What is tried stands for itself, also where the recipe has a value.
    if "set" in config:
        config["set"] = {name: value for name, value in config["set"].items() if name not in config["vary"]}
    if options.data_dir is not None:
        config["data_dir"] = os.path.abspath(options.data_dir)
    for name in ("dataset", "test_data", "owners"):  # workers may look from elsewhere
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
    for name, value in given(options, apart=(*_ANEW, "out")).items():
        if name == "vary":
            value = _varied({"vary": value})
        if stored.get(name) != value:
            raise ConfigurationError(
                f"the search in {folder.path} has --{name.replace('_', '-')} {checks.shown(stored.get(name))}, not "
                f"{checks.shown(value)}: leave the option out to resume, or search in another folder"
            )
    if options.ledger is not None:
        stored["ledger"] = options.ledger  # it may have moved; a charge that is not in there is made
    if options.data_dir is not None:
        stored["data_dir"] = os.path.abspath(options.data_dir)
    return stored


def _refuse_without_public_data(splits: "Splits") -> None:
    from fodp.cli.sealed_run import scored_on

    if not len(scored_on(splits)[1]):
        raise ConfigurationError(
            "a search compares runs by a score on public data, and there is none: name some with --test-data (a score "
            "on private data would have to be paid for)"
        )


def _search(config: dict[str, Any], splits: "Splits") -> "Search":
    """The candidates with their noise, from public numbers alone."""
    from fodp.accounting.budget import Repetitions
    from fodp.tuning.search import SHAPES, calibrated, grid

    checks.one_of("--distribution", config["distribution"], tuple(SHAPES))
    repetitions = Repetitions(checks.number("--runs", config["runs"]), SHAPES[config["distribution"]])
    target = checks.positive("--target-epsilon", config["target_epsilon"])
    plans = [_candidate(config, splits, values) for values in grid(config["vary"])]
    fraction = config.get("subsample")
    if fraction is None:
        return calibrated(plans, repetitions, target)
    checks.open_fraction("--subsample", fraction)
    share = config.get("search_epsilon", _SEARCH_SHARE * target)
    if not 0 < checks.number("--search-epsilon", share) < target:
        raise ConfigurationError(f"--search-epsilon must lie between 0 and the target {target:g}, got {share:g}")
    small = [replace(plan, lot_size=max(1.0, round(plan.lot_size * fraction))) for plan in plans]
    return calibrated(small, repetitions, target, fraction=fraction, final=plans, search_target=share)


def _candidate(config: dict[str, Any], splits: "Splits", values: dict[str, Any]) -> "Plan":
    parameters = {**config.get("set", {}), **values}
    mine = {**config, "set": parameters, "noise_multiplier": 10.0}
    plan = make_plan(mine, splits)
    if not plan.algorithm.candidates(plan):
        return plan
    # What is left to calibration (bands of fo-noise) is chosen for half of the target: about what one run costs alone.
    alone = make_plan({**mine, "noise_multiplier": None, "target_epsilon": config["target_epsilon"] / 2}, splits)
    return replace(alone, noise_multiplier=plan.noise_multiplier)


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
