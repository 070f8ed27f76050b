"""Which code a recorded number came from, told by what the code does: a fingerprint of a tiny seeded run.

Comments, refactoring and speed leave it as it is; a change of a method, its defaults, the mechanism, the noise, the
masks, the clipping or the initial weights changes it. Each method has its own, so that mending one method does not
outdate the records of the others; so has each choice that is a word (a shape, a clipping, an automatic rate).
"""

import hashlib
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fodp.data import CARDS, Splits
from fodp.data.models import build
from fodp_lab.paper.spec import NON_PRIVATE, RunSpec

_STEPS = 12  # more than the memory's window
_MORE_STEPS = 80  # where something was chosen: parts of the library may wait for fifty steps
_NARROW = 2.0  # so that a shape acts on the few inputs of the tiny model
# The rates that methods had when the first records were made; since then they choose their own.
_RATE = 0.1
_RATES = {"dp-adam": 0.01, "dp-adambc": 0.003, "dp-adamw": 0.01, "adp-adamw": 0.01, "dp-adam-ac": 0.01}


def code_of(spec: RunSpec) -> str:
    """The fingerprint of the code behind a run: its method, with those parameters that are words and choose code."""
    return code_version(
        spec.method, tuple((name, value) for name, value in spec.params.items() if isinstance(value, str))
    )


@cache
def code_version(method: str, choices: tuple[tuple[str, str], ...] = ()) -> str:
    """The fingerprint of a method with its defaults but for the choices, and for the learning rate, fixed here."""
    from fodp_lab.paper import twin  # noqa: F401  registers its method
    from fodp_lab.paper.execute import make_trainer

    method = "dp-sgd" if method == NON_PRIVATE else method  # the same lots, data and model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        initial = torch.cat([p.detach().flatten() for p in build("mlp", CARDS["digits"]).parameters()])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        params: dict[str, Any] = {"lr": _RATES.get(method, _RATE), **dict(choices)}
        if params.get("shape", "none") != "none":
            params["width"] = _NARROW
        steps = _MORE_STEPS if choices else _STEPS
        spec = RunSpec(
            dataset="made up", method=method, params=params, plan_steps=steps, steps=steps, sampling_rate=0.5,
            lot_size=12.0, accountant="rdp",
        )  # fmt: skip
        make_trainer(spec, _made_up(), model, []).fit()
    # Six digits of float64 results: rounding of another order or machine does not reach them.
    weights = [f"{value:.6g}" for p in model.parameters() for value in p.flatten().tolist()]
    seen = "\n".join([method, f"{initial.norm():.5g}", _cards(), *weights])
    return hashlib.sha256(seen.encode()).hexdigest()[:12]


def _cards() -> str:
    """The public numbers of all data sets. Schemas of tables came later: records from before them stay known."""
    return repr(sorted(CARDS.items())).replace(", schema=None", "")


def _made_up() -> Splits:
    inputs = torch.arange(150, dtype=torch.float64).view(30, 5).mul(0.7).sin()
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())
    # The same rows with memory of their own: these are made up, and scores on the training data are refused.
    public = TensorDataset(*(column.clone() for column in data.tensors))
    return Splits(CARDS["digits"], data, public, public)
