"""Data with owners for the tests of plans whose unit is a person."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp

WIDTH, CLIP = 6, 1.0
SIZES = (1, 3, 2, 7, 1, 4, 2, 5, 1, 3)  # records of each person
NAMES = [f"person {i}" for i, size in enumerate(SIZES) for _ in range(size)]
ORDER = torch.randperm(len(NAMES), generator=torch.Generator().manual_seed(5)).tolist()
OWNERS = [NAMES[i] for i in ORDER]  # the records of one are not side by side


def people_plan(**changes: Any) -> fodp.Plan:
    numbers: dict[str, Any] = dict(
        sampling_rate=0.6, steps=3, lot_size=6.0, clip_norm=CLIP, noise_multiplier=1e-6, delta=1e-5, method="dp-sgd",
        accountant="rdp", unit="person", records_per_person=3,
    )  # fmt: skip
    return fodp.Plan(**{**numbers, **changes})


def records(dtype: torch.dtype = torch.float32) -> TensorDataset:
    inputs = torch.randn(len(OWNERS), WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs.to(dtype), (inputs[:, 0] > 0).long())


def network(*extra: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), *extra, nn.Linear(8, 2))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def without(name: str) -> tuple[TensorDataset, list[str]]:
    """The data and its owners, without one person."""
    keep = [i for i, owner in enumerate(OWNERS) if owner != name]
    return TensorDataset(*(column[keep] for column in records().tensors)), [OWNERS[i] for i in keep]
