"""What stands in the way of private training of a model, and what to do about it."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fodp.errors import ConfigurationError


@dataclass(frozen=True)
class Issue:
    """One thing found in a model; an `error` stops private training, a `note` only costs speed."""

    level: Literal["error", "note"]
    where: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.problem}; {self.advice}"


def seen_from_outside(model: nn.Module) -> list[Issue]:
    """What can be told of a model without running it: errors and notes."""
    findings = [found for name, module in model.named_modules() for found in _look_at(name or "model", module)]
    if _is_divided(model):
        problem = "divided among processes (fully_shard, or DTensor parameters)"
        advice = "train it unsharded, in one process or several: a sharded source comes back in the next release"
        findings.append(Issue("error", "model", problem, advice))
    if not any(p.requires_grad for p in model.parameters()):
        problem = "no parameter is trainable"
        advice = "set requires_grad=True on what should be trained, of a frozen layer layer.requires_grad_(True)"
        findings.append(Issue("error", "model", problem, advice))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            advice = "run the model once on dummy input before training"
            findings.append(Issue("error", name, "a lazy parameter without a shape", advice))
        elif parameter.is_complex():
            advice = "use two real parameters, for the real and the imaginary part"
            findings.append(Issue("error", name, "a complex parameter", advice))
        elif parameter.device.type == "mps":
            advice = "train on the CPU or on CUDA"
            findings.append(Issue("error", name, "on a device without float64, in which norms are summed", advice))
        elif parameter.is_meta or parameter.numel() == 0:
            advice = "build the model with real weights, and layers of at least one unit"
            findings.append(Issue("error", name, "a parameter without numbers", advice))
        elif parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            advice = "norms, noise and releases are float32 all the same"
            findings.append(Issue("note", name, f"a {parameter.dtype} parameter", advice))
    return findings


def summed_up(findings: list[Issue]) -> list[Issue]:
    """The same in many places once, with the first place, how many more there are, and the last."""
    kinds: dict[tuple[str, str, str], list[Issue]] = {}
    for finding in findings:
        kinds.setdefault((finding.level, finding.problem, finding.advice), []).append(finding)
    return [
        replace(first, advice=f"{first.advice} (and {len(rest)} more, the last at {rest[-1].where})") if rest else first
        for first, *rest in kinds.values()
    ]


def refuse_errors(model: nn.Module) -> None:
    """Raise an error that names everything that stands in the way, the same in many layers once."""
    errors = [finding for finding in seen_from_outside(model) if finding.level == "error"]
    if errors:
        lines = " | ".join(map(str, summed_up(errors)))
        layers = any(f.level == "error" for name, module in model.named_modules() for f in _look_at(name, module))
        fix = ". fodp.fix(model) replaces such layers" if layers else ""
        raise ConfigurationError(f"this model cannot be trained privately: {lines}{fix}")


def _is_divided(model: nn.Module) -> bool:
    """Whether parameters are in parts on several processes. After a forward pass FSDP2 leaves some whole for a while,
    but its modules stay what they are."""
    kinds = [kind for thing in (*model.modules(), *model.parameters()) for kind in type(thing).__mro__]
    return any(kind.__name__ in ("FSDPModule", "DTensor") for kind in kinds)


def _look_at(name: str, module: nn.Module) -> list[Issue]:
    found: list[Issue] = []
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
        advice = "use GroupNorm or LayerNorm, or freeze it in evaluation mode (layer.eval())"
        found.append(Issue("error", name, f"{kind} in training mode mixes the examples of a lot", advice))
    elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        advice = "use track_running_stats=False"
        found.append(Issue("error", name, f"{kind} stores un-noised statistics of private data", advice))
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    if compiled and any(parameter.requires_grad for parameter in module.parameters()):
        advice = "train the module as it is written (model._orig_mod) and compile frozen parts, by part.compile()"
        found.append(Issue("note", name, "compiled, and traced anew by every recorded pass", advice))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            advice = "drop max_norm"
            found.append(Issue("error", name, "max_norm rewrites the table outside the private release", advice))
        if module.scale_grad_by_freq:
            advice = "drop scale_grad_by_freq"
            found.append(Issue("error", name, "scale_grad_by_freq mixes the examples of a lot", advice))
    return found
