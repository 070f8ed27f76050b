"""What will happen to a model in private training, and what can be done for it: `fodp.check` and `fodp.fix`."""

import warnings

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fodp.clipping.batches import Batch
from fodp.clipping.engine import Engine, LossFunction
from fodp.clipping.findings import Issue, seen_from_outside, summed_up
from fodp.errors import ConfigurationError
from fodp.support import checks

_PATHS = {
    "layers": ("gradients come from layer rules", "nothing is faster"),
    "functions": ("gradients come from rules for functions", "nearly as fast as layer rules"),
    "unknown": ("this batch does not show how gradients are computed", "give two or more examples with a gradient"),
    "loop": ("gradients are computed one example at a time", "slow, and no layer can mix them"),
}


def check(model: nn.Module, loss_fn: LossFunction | None = None, batch: Batch | None = None) -> list[Issue]:
    """List what prevents private training of a model, and what is good to know. The model is not changed.

    Args:
        model: the model to train. Without a batch it is only looked at from outside.
        loss_fn: the loss, `loss_fn(model, batch)`, one number per example. With it and a batch the model is run, as on
            the first batch of a training, and a note says how its gradients will be computed, and why not faster.
        batch: two or more made-up or public examples, as `loss_fn` takes them.

    Returns:
        Issues of the level "error" (training would be refused) or "note". An empty list is good. Issues that many
        modules share are one.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Linear(3, 1)
        >>> fodp.check(model)
        []
        >>> print(*fodp.check(model, lambda model, x: model(x).squeeze(1), torch.randn(4, 3)))
        note: model: gradients come from layer rules; nothing is faster
    """
    findings = summed_up(seen_from_outside(model))
    if loss_fn is None or any(finding.level == "error" for finding in findings):
        return findings
    engine = Engine(model, loss_fn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with engine.exactly():
            engine.uses(batch)
    problem, advice = _PATHS[engine.path]
    reasons = [str(warning.message).partition(": ")[2] for warning in said if engine.path == "loop"][:1]
    return [*findings, Issue("note", "model", problem, "; ".join([advice, *reasons]))]


class Frozen(nn.Module):
    """A normalisation whose statistics stay as they are, also in training mode."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm.eval()

    def train(self, mode: bool = True) -> "Frozen":
        """Training mode is not for the normalisation."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """As in evaluation mode."""
        return self.norm(inputs)


def fix(model: nn.Module, *, norms: str = "group") -> list[str]:
    """Replace the layers of a model that cannot be trained privately, in place. Weights stay the same parameters.

    Args:
        model: the model; layers inside it are replaced, the model itself is not.
        norms: what BatchNorm becomes. "group": GroupNorm, whose statistics are each example's own; a pretrained model
            needs some training to adapt. "frozen": BatchNorm with the statistics it has: right for fine-tuning.

    Returns:
        One line for each layer that was replaced.

    Raises:
        ConfigurationError: if `norms` is another word.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8))
        >>> fodp.fix(model)
        ['1: BatchNorm1d became GroupNorm(1, 8)']
        >>> fodp.check(model)
        []
    """
    checks.one_of("norms", norms, ("group", "frozen"))
    changed = []
    for name, module in list(model.named_modules()):
        found = _replacement(module, norms)
        parent, _, key = name.rpartition(".")
        if found is not None and name and not isinstance(model.get_submodule(parent), Frozen):
            setattr(model.get_submodule(parent), key, found.train(module.training))
            changed.append(f"{name}: {type(module).__name__} became {_form(found)}")
        elif found is not None and not name:
            raise ConfigurationError(
                f"the model itself is a {type(module).__name__}, which cannot be replaced in place: put it into "
                "nn.Sequential"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            changed += [f"{name or 'model'}: {line}" for line in _tamed(module)]
    return changed


def _replacement(module: nn.Module, norms: str) -> nn.Module | None:
    """What stands for a normalisation that cannot be private; None: it can stay."""
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        fresh = type(module)(module.num_features, module.eps, affine=module.affine)
        return _with_weights(fresh, module)
    if not isinstance(module, _BatchNorm):
        return None
    if norms == "frozen" and module.track_running_stats:
        return Frozen(module)
    groups = 1 if isinstance(module, nn.BatchNorm1d) else _groups(module.num_features)
    return _with_weights(nn.GroupNorm(groups, module.num_features, module.eps, affine=module.affine), module)


def _groups(channels: int) -> int:
    """At most 32 groups, of four channels or more."""
    fitting = [groups for groups in range(1, 33) if channels % groups == 0 and channels // groups >= 4]
    return max(fitting, default=1)


def _with_weights(fresh: nn.Module, old: nn.Module) -> nn.Module:
    """With the very parameters that the old one had."""
    for name, parameter in old.named_parameters(recurse=False):
        setattr(fresh, name, parameter)
    device = next((p.device for p in old.parameters()), torch.device("cpu"))
    return fresh.to(device)


def _tamed(table: nn.Embedding | nn.EmbeddingBag) -> list[str]:
    done = []
    if table.max_norm is not None:
        table.max_norm = None
        done.append("max_norm was dropped")
    if table.scale_grad_by_freq:
        table.scale_grad_by_freq = False
        done.append("scale_grad_by_freq was dropped")
    return done


def _form(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"GroupNorm({module.num_groups}, {module.num_channels})"
    return "one with frozen statistics" if isinstance(module, Frozen) else f"{type(module).__name__} without statistics"
