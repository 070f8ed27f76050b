"""A published model: what a file of `fodp export` holds beside the weights, and how to predict with it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fodp.data.arrays import normalise_
from fodp.data.cards import Card
from fodp.data.models import MODELS, build
from fodp.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class Exported:
    """A model with its public card: `predict`, `predict_proba` and `scores` take data as it was before training.

    That is a table (the path of a `.csv`, a DataFrame or a dictionary of columns; the target may be left out), or an
    array of examples with channels first. No error holds anything of the examples.
    """

    model: nn.Module
    data: Card
    privacy: dict[str, str]

    def scores(self, inputs: Any) -> Tensor:
        """The model's outputs, one row per example: a score per class, or a number between -1 and 1."""
        if self.data.schema is not None:
            from fodp.data.tables import encode_inputs

            prepared = encode_inputs(inputs, self.data)
        else:
            prepared = normalise_(_numbers(inputs, self.data), self.data)
        self.model.eval()
        with torch.inference_mode():
            return self.model(prepared)

    def predict(self, inputs: Any) -> list[Any]:
        """For each example the class (by its name, if classes have names) or the number, in the target's own unit."""
        scores = self.scores(inputs)
        if self.data.target_bounds is not None:
            low, high = self.data.target_bounds
            return [low + (value + 1) / 2 * (high - low) for value in scores.flatten().tolist()]
        names, classes = self.data.class_names, scores.argmax(dim=1).tolist()
        return classes if names is None else [names[number] for number in classes]

    def predict_proba(self, inputs: Any) -> Tensor:
        """For each example a probability per class, in the order of the classes; a regression has none."""
        if self.data.is_regression:
            raise ConfigurationError("the model predicts numbers, which have no probabilities: use predict")
        return self.scores(inputs).softmax(dim=1)


def _numbers(inputs: Any, data: Card) -> Tensor:
    """Examples as floats in the form of the data; what is in them is not told."""
    try:
        found = torch.tensor(np.asarray(inputs), dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"predict takes an array of numbers of shape (n, {', '.join(map(str, data.shape))}); these examples are no "
            "such array: their lengths differ, or one holds something else than numbers"
        ) from None
    if tuple(found.shape[1:]) not in (tuple(data.shape), (data.features,)):
        raise DataError(
            f"predict takes examples of shape ({', '.join(map(str, data.shape))}), with a dimension for their number "
            f"in front; got an array of {found.dim()} dimensions that does not fit. After --features "
            "they are features, not records"
        )
    return found.reshape(-1, *data.shape)


def load_exported(file: str | Path, model: Callable[..., nn.Module] | str | None = None) -> Exported:
    """Read a file of `fodp export`, ready to predict. No code of the file is run.

    Args:
        file: the exported file.
        model: your own function that built the model, or its "module:function"; None for models of fodp. The function
            is called with `classes` and `shape` as far as it accepts them.

    Returns:
        The model with `predict` and `predict_proba`, and the public card of the data.

    Raises:
        DataError: if the file cannot be read, or holds the weights of another model.
    """
    try:
        with safe_open(file, "pt") as opened:
            card: dict[str, str] = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        data = Card(**json.loads(card["data"]))
        name = card["model"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} cannot be read as a file of `fodp export` ({error}): export the run again") from None
    if name not in MODELS and model is None:
        raise DataError(f"{file} holds a model of {name}: import that function and give it as model=")
    built = build(name if model is None else model, data)
    try:
        built.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(f"the weights in {file} are of another model ({str(error).splitlines()[0]})") from None
    return Exported(built, data, {key: value for key, value in card.items() if key not in ("data", "loader")})


def prediction_notes(model: Any, code: Any, card: Any, file: str) -> dict[str, str]:
    """What predicting takes, as texts for a file's metadata: the model, the public card of its data, how to load it."""
    data = Card(**card)
    return {"model": str(model), "data": json.dumps(asdict(data)), "loader": _loader(str(code), data, file)}


def _loader(code: str, data: Card, file: str) -> str:
    """Python that loads the model and predicts: with PyTorch and safetensors alone, unless the data is a table."""
    if data.schema is not None:
        return (
            f"import fodp\nexported = fodp.load_exported({file!r})\npredict = exported.predict  # of a .csv or frame\n"
        )
    sides = ", ".join(["-1", *["1"] * (len(data.shape) - 1)])
    mean, std = (f"torch.tensor({list(constants)}).view({sides})" for constants in (data.mean, data.std))
    return (
        "import torch\nfrom safetensors.torch import load_file\nfrom torch import nn\n"
        f"{code}\n"
        f"model.load_state_dict(load_file({file!r}))\n"
        f"predict = lambda examples: model.eval()((examples.float() / {data.scale} - {mean}) / {std})"
        f"  # of shape (n, {', '.join(map(str, data.shape))})\n"
    )
