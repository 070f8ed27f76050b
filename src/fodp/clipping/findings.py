"""What stands in the way of private training of a model, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList

from fodp._checks import PrivacyError
from fodp.clipping.fallback import draws_randomness, is_unit
from fodp.clipping.rules import RULES


@dataclass(frozen=True)
class Finding:
    """One thing found in a model; an `error` stops private training, a `note` only costs speed."""

    level: Literal["error", "note"]
    where: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.problem}; {self.advice}"


def check(model: nn.Module) -> list[Finding]:
    """List what prevents private training of `model` (errors) or makes it slower (notes).

    An empty list is good. Reading changes nothing. What cannot be seen from outside, such as a
    forward function or a loss that mixes examples, is caught by the engine's self-check on the first lot.
    """
    inside = {part for unit in model.modules() if is_unit(unit) for part in unit.modules() if part is not unit}
    outside = [(name, module) for name, module in model.named_modules() if module not in inside]
    findings = [found for name, module in outside for found in _look_at(name or "model", module)]
    if not any(p.requires_grad for p in model.parameters()):
        problem, advice = "no parameter is trainable", "set requires_grad=True on what should be trained"
        findings.append(Finding("error", "model", problem, advice))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            advice = "run the model once on dummy input before training"
            findings.append(Finding("error", name, "a lazy parameter without a shape", advice))
        elif parameter.is_complex():
            advice = "use two real parameters, for the real and the imaginary part"
            findings.append(Finding("error", name, "a complex parameter", advice))
        elif parameter.device.type == "mps":
            advice = "train on the CPU or on CUDA"
            findings.append(Finding("error", name, "on a device without float64, in which norms are summed", advice))
        elif parameter.is_meta or parameter.numel() == 0:
            advice = "build the model with real weights, and layers of at least one unit"
            findings.append(Finding("error", name, "a parameter without numbers", advice))
        elif parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            advice = "norms, noise and releases are float32 all the same"
            findings.append(Finding("note", name, f"a {parameter.dtype} parameter", advice))
    return findings


def refuse_errors(model: nn.Module) -> None:
    """Raise a PrivacyError that names every error `check` finds."""
    errors = [str(f) for f in check(model) if f.level == "error"]
    if errors:
        raise PrivacyError("this model cannot be trained privately: " + " | ".join(errors))


def _look_at(name: str, module: nn.Module) -> list[Finding]:
    found: list[Finding] = []
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
        advice = "use GroupNorm or LayerNorm, or freeze it in evaluation mode (layer.eval())"
        found.append(Finding("error", name, f"{kind} in training mode mixes the examples of a lot", advice))
    elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        advice = "use track_running_stats=False"
        found.append(Finding("error", name, f"{kind} stores un-noised statistics of private data", advice))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            advice = "drop max_norm"
            found.append(Finding("error", name, "max_norm rewrites the table outside the private release", advice))
        if module.scale_grad_by_freq:
            advice = "drop scale_grad_by_freq"
            found.append(Finding("error", name, "scale_grad_by_freq mixes the examples of a lot", advice))
    trains = any(p.requires_grad for p in module.parameters(recurse=is_unit(module)))
    if trains and type(module) not in RULES:
        problem, advice = f"{kind} has no layer rule", "it falls back to vectorised per-example gradients"
        if isinstance(module, ParametrizationList):
            advice = "the whole model runs one example at a time; train without the parametrization"
        elif draws_randomness(module):
            advice = "with dropout inside it, the whole model runs one example at a time; set dropout to 0"
        elif isinstance(module, nn.RNNBase):
            advice = "it runs one example at a time"
        found.append(Finding("note", name, problem, advice))
    return found
