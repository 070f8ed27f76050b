"""What `train` and `audit` share: the options that say which run, and the data and the plan they stand for."""

import argparse
import ast
import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.accounting.sizes import completed as completed_sizes
from fodp.accounting.sizes import steps_of, usual_delta
from fodp.cli import features
from fodp.data.cards import default_rate
from fodp.data.more_cards import known_cards
from fodp.data.schema import read_schema
from fodp.errors import ConfigurationError, LedgerError
from fodp.support import checks
from fodp.support.imports import import_modules

if TYPE_CHECKING:
    from fodp.data import Card, Splits
    from fodp.plan import Plan

DEFAULTS: dict[str, Any] = dict(dataset="digits", model="mlp", clip_norm=1.0, accountant="pld")

_NUMBERS = ("sampling_rate", "steps", "delta")
_TABLES = (".csv", ".tsv")
_OF_THE_COMMAND = ("command", "run", "out", "json", "quiet", "data_dir", "threads", "features_cache")


def add_options(parser: argparse.ArgumentParser, *, epochs: float) -> None:
    """The options. None has a default here, so that what the user said can be told from what was left open."""
    add = parser.add_argument
    add("--dataset", metavar="NAME", help=f"digits (default), {', '.join([*known_cards()][1:])}")
    add("--model", metavar="NAME", help="mlp (default), cnn, logistic, or module:function of your own")
    add(
        "--method",
        metavar="NAME",
        help="private optimizer (`fodp methods`); default: a recipe without tuning",
    )
    add("--set", action="append", metavar="NAME=VALUE", help="a parameter of the method; may be repeated")
    add_import(parser)
    add("--lr", type=_rate, help="learning rate; default auto: from public numbers, without tuning")
    add("--shape", metavar="SHAPE", help="of the query: none, fan-in, kronecker, transcript or numbers (0.5,1,1)")
    add("--epochs", type=float, help=f"passes over the data, default {epochs:g}; steps = round(epochs / q)")
    add("--target-epsilon", type=float, metavar="EPS", help="calibrate the noise to this epsilon, never above")
    add("--noise-multiplier", type=float, metavar="SIGMA", help="the noise itself")
    add("--delta", type=float, help="default 1e-5, or a tenth of one over the public size if that is smaller")
    add("--clip-norm", type=float, metavar="C", help="default 1")
    add("--sampling-rate", type=float, metavar="Q", help="default: from the data set's public card")
    add("--batch", type=float, metavar="B", help="records a lot, about: sampling rate B/N and lot size B")
    add("--lot-size", type=float, metavar="L", help="public divisor, default: q times the public size")
    add("--accountant", metavar="NAME", help="pld (default), rdp, rdp-classic")
    add(
        "--exact-noise",
        action="store_true",
        default=None,
        help="nothing leaks through the low bits of the noise, which takes longer",
    )
    add("--data-dir", metavar="DIR", help="folder with data sets (default: the variable FODP_DATA)")
    own = parser.add_argument_group("your own data (docs/your-data.md)")
    own.add_argument("--data", metavar="FILE", help="an .npz of images or features, or a table (.csv, .tsv)")
    own.add_argument("--target", metavar="COLUMN", help="of a table: the column to predict")
    own.add_argument("--schema", metavar="FILE", help="of a table: its public bounds and values (.toml, .json)")
    own.add_argument("--test-data", metavar="FILE", help="a public table to score on (default: no scores)")
    own.add_argument(
        "--shared-rows-are-public",
        action="store_true",
        default=None,
        help="rows of the public data that are in the private data too are public all the same",
    )
    own.add_argument("--assume-size", "--public-size", type=int, metavar="N", help="public size of the data")
    own.add_argument("--classes", type=int, metavar="N", help="of an .npz: public number of classes")
    features.add_options(parser)
    people = parser.add_argument_group("people with several records (docs/people.md)")
    people.add_argument(
        "--records-per-person", type=int, metavar="M", help="protect people; use M records of each a step"
    )
    people.add_argument(
        "--owners", metavar="FILE|COLUMN", help="whose each record is: a .npy or text file; of a table a column"
    )
    people.add_argument("--person-gradient", metavar="HOW", help="mean (default) or sum of a person's records")
    people.add_argument("--assume-people", type=int, metavar="N", help="public number of people")
    add("--threads", type=int, metavar="N", help="threads of PyTorch")


def _rate(text: str) -> float | str:
    return text if text == "auto" else float(text)


_rate.__name__ = "rate (a number or auto)"  # as argparse names what it could not read


def add_import(parser: argparse.ArgumentParser) -> None:
    """The option by which a command knows methods of the user's own; `main` follows it before the command runs."""
    parser.add_argument(
        "--import", action="append", metavar="MODULE", help="your own module, for methods and layer rules it registers"
    )


def given(options: argparse.Namespace, apart: Collection[str]) -> dict[str, Any]:
    """What the user said about the run, without what is about this command alone; `apart` are more such options."""
    said = {k: v for k, v in vars(options).items() if v is not None and k not in _OF_THE_COMMAND and k not in apart}
    if "set" in said:
        said["set"] = dict(setting(item) for item in said["set"])
    if "schema" in said:  # a run keeps what the file said when it began
        said["schema"] = read_schema(said["schema"]).to_dict()
    if "data" in said:
        if "dataset" in said:
            raise ConfigurationError("--dataset names a data set of fodp, --data a file of your own: give one of them")
        said["dataset"] = said.pop("data")
    return said


def completed(said: dict[str, Any], defaults: dict[str, Any], preset: dict[str, Any] | None = None) -> dict[str, Any]:
    """Defaults, then the preset, then what was said; without a word about the method the recommended recipe."""
    from fodp.methods import recipe

    config = {**defaults, **(preset or {}), **said}
    if "method" in config:
        return config
    exact = bool(config.get("exact_noise"))
    method, params = recipe.completed(None, said_params(config), exact_noise=exact)
    return {**config, "method": method, "set": {name: value for name, value in params.items() if name not in said}}


def public_plan(options: argparse.Namespace, **noise: Any) -> "Plan":
    """The plan of a method from public numbers alone, for its events; sums and lots do not enter them."""
    from fodp.plan import Plan

    params = dict(setting(item) for item in options.set or ())
    words: dict[str, Any] = dict(method=options.method, params=params, accountant=getattr(options, "accountant", "pld"))
    make = Plan.calibrated if "target_epsilon" in noise else Plan
    return make(**public_numbers(options), **words, **noise)


def public_numbers(options: argparse.Namespace) -> dict[str, Any]:
    """Sampling rate, steps and δ of the options, or what follows from --public-size, --batch and --epochs."""
    said = {name: getattr(options, name, None) for name in ("public_size", "batch", "epochs", *_NUMBERS)}
    return completed_sizes({"lot_size": None if said["batch"] else 1.0, **said, "delta": said["delta"] or _delta(said)})


def _delta(said: dict[str, Any]) -> float:
    return 1e-5 if said["public_size"] is None else usual_delta(checks.whole("--public-size", said["public_size"]))


def use_threads(options: argparse.Namespace) -> None:
    """Give PyTorch the threads that were asked for."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(checks.whole("--threads", options.threads, maximum=4096))


def setting(item: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python reads it, else as text."""
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--set takes NAME=VALUE, for example --set beta=0.9; got {item!r}")
    try:
        return name.strip(), ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return name.strip(), text


def load_data(config: dict[str, Any], options: argparse.Namespace) -> "Splits":
    """The data, and whose it is where people are protected. What is public of it is compared with the private."""
    from fodp.identity.private_data import refuse_private_file

    for option in ("test_data", "public_sample"):
        if option in config:
            refuse_private_file(f"--{option.replace('_', '-')}", config[option], config["dataset"])
    splits = features.applied(config, options, _load_records(config, options))
    _compare(config, splits)
    if config.get("records_per_person") is None:
        for option in ("owners", "person_gradient", "assume_people"):
            if option in config:
                raise ConfigurationError(
                    f"--{option.replace('_', '-')} is about people with several records: add --records-per-person M, "
                    "how many of a person's records a step uses at most"
                )
        return replace(splits, owners=None)
    if "owners" in config and splits.owners is None:
        from fodp.data.arrays import read_owners

        splits = replace(splits, owners=read_owners(config["owners"], len(splits.train)))
    if splits.owners is None:
        raise ConfigurationError(
            "--records-per-person is about people: say whose each record is with --owners FILE (of a table: a column)"
        )
    return splits


def _compare(config: dict[str, Any], splits: "Splits") -> None:
    """Refuse public splits that are copies of the private one."""
    from fodp.identity.private_data import PrivateData, declare_public

    private = PrivateData(splits.train)
    test = f"--test-data {config['test_data']}" if "test_data" in config else f"the test split of {config['dataset']}"
    for door, public in ((test, splits.test), (f"the validation split of {config['dataset']}", splits.validation)):
        private.refuse(door, declare_public(public) if config.get("shared_rows_are_public") else public)


def _load_records(config: dict[str, Any], options: argparse.Namespace) -> "Splits":
    """The data; a method that scores its proposals gets a public held-out part of it."""
    from fodp.data import load
    from fodp.data.loading import refuse_other_kind
    from fodp.data.models import wants_flat
    from fodp.methods import find

    import_modules(config.get("import", ()))  # those of a run that is resumed or audited
    method = find(config["method"])
    if str(config["dataset"]).endswith(_TABLES):
        if method.has_acceptance_test:
            raise _no_held_out_part(config)
        return _load_table(config)
    for option in ("target", "schema", "test_data"):
        if option in config:
            refuse_other_kind(Path(config["dataset"]))
            raise ConfigurationError(f"--{option.replace('_', '-')} is for a table: --data FILE.csv")
    words: dict[str, Any] = dict(
        assume_size=config.get("assume_size"),
        classes=config.get("classes"),
        flatten=wants_flat(config["model"]) and "features" not in config,
        progress=not options.quiet,
    )
    splits = load(config["dataset"], options.data_dir, **words)
    if not method.has_acceptance_test or len(splits.validation):
        return splits
    if config["dataset"] not in known_cards():
        raise _no_held_out_part(config)
    # A sixth of the data is declared public and held out, and the public card says so.
    return load(config["dataset"], options.data_dir, train_size=splits.card.train_size * 5 // 6, **words)


def _no_held_out_part(config: dict[str, Any]) -> ConfigurationError:
    return ConfigurationError(
        f"{config['method']} scores proposals on a public held-out split, which your own data does not have: "
        "use another method, or fodp.Trainer with public_score"
    )


def _load_table(config: dict[str, Any]) -> "Splits":
    from fodp.data.tables import from_table, unused_columns

    path = config["dataset"]
    if "schema" not in config or "target" not in config:
        raise ConfigurationError(
            f"for the table {path} add --schema FILE, with the public bounds and values of its columns, and --target "
            "COLUMN: taken from the data they would reveal who is in it (docs/your-data.md)"
        )
    if "classes" in config:
        raise ConfigurationError("--classes is for an .npz; of a table the schema says the values of the target")
    schema = read_schema(config["schema"])
    splits = from_table(
        path,
        schema,
        config["target"],
        public_size=config.get("assume_size"),
        test=config.get("test_data"),
        owner=config.get("owners"),
    )
    unused = [name for name in unused_columns(path, schema) if name != config.get("owners")]
    if unused:
        print(f"columns that the schema does not name are not used: {', '.join(unused)}", file=sys.stderr)
    return splits


def public_sample(config: dict[str, Any], plan: "Plan", splits: "Splits") -> dict[str, Any]:
    """The Trainer's word for --public-sample: public records by which the shape kronecker measures layers."""
    if "public_sample" not in config:
        return {}
    from fodp.data.loading import public_records
    from fodp.data.models import wants_flat
    from fodp.identity.private_data import declare_public
    from fodp.options import Kronecker

    if not isinstance(plan.options.scaling, Kronecker):
        raise ConfigurationError("--public-sample is looked at by the shape kronecker alone: add --shape kronecker")
    found = public_records(Path(config["public_sample"]), splits.card, flatten=wants_flat(config["model"]))
    return dict(public_sample=declare_public(found) if config.get("shared_rows_are_public") else found)


def make_plan(config: dict[str, Any], splits: "Splits") -> "Plan":
    """The plan of a configuration: the stored one, or a new one, calibrated if it names a target and no noise."""
    from fodp.plan import Plan

    if "plan" in config:
        return _stored_plan(config)
    card = splits.card if config.get("records_per_person") is None else _card_of_people(config, splits.card)
    batch, size = config.get("batch"), card.train_size
    usual = card.sampling_rate if batch is None else checks.positive("--batch", batch) / size
    rate = checks.fraction("--sampling-rate", config.get("sampling_rate", usual))
    public: dict[str, Any] = dict(
        sampling_rate=rate,
        steps=steps_of(config["epochs"], rate, "--epochs"),
        lot_size=config.get("lot_size", max(1.0, round(rate * size)) if batch is None else batch),
        batch=batch,
        public_size=size,
        **_unit(config),
        clip_norm=config["clip_norm"],
        delta=config.get("delta"),
        method=config["method"],
        params=said_params(config),
        accountant=config["accountant"],
        seed=config.get("seed"),
        exact_noise=config.get("exact_noise", False),
    )
    if config.get("noise_multiplier") is None:
        return Plan.calibrated(target_epsilon=config["target_epsilon"], **public)
    plan = Plan(noise_multiplier=config["noise_multiplier"], **public)
    if not math.isfinite(plan.epsilon()):
        raise ConfigurationError(
            f"no finite epsilon holds for --noise-multiplier {plan.noise_multiplier:g}: use more noise"
        )
    return plan


def _unit(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("records_per_person") is None:
        return {}
    how = config.get("person_gradient", "mean")
    return dict(unit="person", records_per_person=config["records_per_person"], person_gradient=how)


def _card_of_people(config: dict[str, Any], card: "Card") -> "Card":
    """The public numbers with people in place of records: rates and lots are theirs."""
    if "assume_people" in config:
        people = checks.whole("--assume-people", config["assume_people"])
        return replace(card, train_size=people, sampling_rate=default_rate(people))
    if {"sampling_rate", "lot_size"} - config.keys():
        raise ConfigurationError(
            "--assume-people N says how many people there are, as a public number: counted from the data it would "
            "reveal who is in it (or give --sampling-rate and --lot-size, both of people)"
        )
    return card


def _stored_plan(config: dict[str, Any]) -> "Plan":
    """The plan that a run was started with: to calibrate again, with another accountant perhaps, might find another."""
    from fodp.plan import Plan

    try:
        plan = Plan(**config["plan"])
    except TypeError as error:
        raise LedgerError(f"the run's configuration holds no plan ({error}): restore a copy of it") from None
    numbers = {name: config[name] for name in plan.to_dict() if name in config}
    if numbers.get("noise_multiplier", 0) is None:
        del numbers["noise_multiplier"]
    for name, value in {**numbers, "steps": steps_of(config["epochs"], plan.sampling_rate, "--epochs")}.items():
        if value != getattr(plan, name):
            raise LedgerError(
                f"the run's configuration says {name} {checks.shown(value)}, its plan {getattr(plan, name)}: restore "
                "a copy of it"
            )
    params = said_params(config)
    said = replace(plan, params={**plan.params, **params})
    # None leaves some parameters to calibration, and the plan has what it chose.
    left = {name for choice in said.algorithm.candidates(said) for name in choice if params.get(name, "") is None}
    if replace(said, params={**said.params, **{name: plan.params[name] for name in left}}) != plan:
        raise LedgerError(
            f"the run's configuration says {checks.shown(params)}, its plan something else: restore a copy of it"
        )
    return plan


def said_params(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the method, of which the learning rate and the shape have options of their own."""
    params = config.get("set", {})
    if not isinstance(params, dict):
        raise LedgerError(f"the run's configuration says set {checks.shown(params)}: restore a copy of it")
    shape = {"shape": setting(f"shape={config['shape']}")[1]} if "shape" in config else {}
    return {**params, **shape, **({"lr": config["lr"]} if "lr" in config else {})}
