"""The data of a configuration: read, divided among people, and compared with what is public."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli import features
from fodp.cli.options import flag
from fodp.data.more_cards import known_cards
from fodp.data.schema import read_schema
from fodp.errors import ConfigurationError
from fodp.support.imports import import_modules

if TYPE_CHECKING:
    from fodp.data import Splits

_TABLES = (".csv", ".tsv")


def load_data(config: dict[str, Any], data_dir: str | None, features_cache: str | None, *, quiet: bool) -> "Splits":
    """The data, and whose it is where people are protected. What is public of it is compared with the private."""
    from fodp.identity.private_data import refuse_private_file

    for option in ("test_data", "public_sample"):
        if option in config:
            refuse_private_file(flag(option), config[option], config["dataset"])
    splits = _load_records(config, data_dir, quiet=quiet)
    splits = features.applied(config, splits, features_cache, quiet=quiet)
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


def _load_records(config: dict[str, Any], data_dir: str | None, *, quiet: bool) -> "Splits":
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
        progress=not quiet,
    )
    splits = load(config["dataset"], data_dir, **words)
    if not method.has_acceptance_test or len(splits.validation):
        return splits
    if config["dataset"] not in known_cards():
        raise _no_held_out_part(config)
    # A sixth of the data is declared public and held out, and the public card says so.
    return load(config["dataset"], data_dir, train_size=splits.card.train_size * 5 // 6, **words)


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
