"""Layer rules: from a layer's input and the gradient of its output to uses of its parameters.

One short function per layer type. Where a layer has none, the functions that it calls are watched (`functions.py`).
Subclasses of these types may compute something else, so rules match the exact type.
`register_rule` adds rules for layers of one's own (docs/layers.md).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fodp.clipping.layers.convolutions import Convolution
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.uses import Dense, Outer, Product, Use
from fodp.errors import ConfigurationError
from fodp.support.checks import shown

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Use]]


def linear(layer: nn.Linear, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """y = W·a + b, at one or many positions per example."""
    if inputs.dim() == 2:
        return {"weight": Product(inputs, back), "bias": Dense(back)}
    inputs, back = (t.reshape(t.shape[0], 1, -1, t.shape[-1]) for t in (inputs, back))
    return {"weight": Outer(inputs, back), "bias": Dense(back.sum((1, 2)))}


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """A convolution is a Linear over patches; Conv1d is Conv2d on images of height one."""
    inputs = F.pad(inputs, _padding(layer), "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    if len(layer.kernel_size) == 1:
        inputs, back = inputs.unsqueeze(2), back.unsqueeze(2)
    kernel, stride, dilation = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    weight = Convolution(inputs, back, layer.groups, kernel, stride, dilation)
    return {"weight": weight, "bias": Dense(back.flatten(2).sum(2))}


def transposed_convolution(layer: Any, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """A convolution run backwards: what it makes is the image, and what it is given is the gradient of the outputs.

    Each input x_s adds W·x_s to the patch of the output that begins at stride·s. So ∂/∂W = Σ_s x_s ⊗ patch_s of the
    output's gradient: the outer products of a convolution of `back` to `inputs`.
    """
    spread = zip(inputs.shape[2:], layer.stride, layer.kernel_size, layer.dilation, strict=True)
    sizes = [(count - 1) * step + hole * (reach - 1) + 1 for count, step, reach, hole in spread]
    image = F.pad(back, [side for amount in reversed(layer.padding) for side in (amount, amount)])
    inside: list[Any] = [slice(size) for size in sizes]
    image = image[(..., *inside)]  # without the rest that output_padding adds
    if len(layer.kernel_size) == 1:
        image, inputs = image.unsqueeze(2), inputs.unsqueeze(2)
    kernel, stride, dilation = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    weight = Convolution(image, inputs, layer.groups, kernel, stride, dilation)
    return {"weight": weight, "bias": Dense(back.flatten(2).sum(2))}


def embedding(layer: nn.Embedding, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """Rows of a table; the padding row gets no gradient."""
    indices = inputs.reshape(inputs.shape[0], -1)
    back = back.reshape(*indices.shape, back.shape[-1])
    if layer.padding_idx is not None:
        back = back.masked_fill((indices == layer.padding_idx).unsqueeze(-1), 0)
    return {"weight": Rows(indices, back, layer.num_embeddings)}


def layer_norm(layer: nn.LayerNorm, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """Scale and shift of normalised inputs."""
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    between = tuple(range(1, inputs.dim() - len(layer.normalized_shape)))
    return {"weight": Dense(_sum(back * normal, between)), "bias": Dense(_sum(back, between))}


def group_norm(layer: nn.GroupNorm, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """Scale and shift per channel."""
    normal = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    positions = tuple(range(2, inputs.dim()))
    return {"weight": Dense(_sum(back * normal, positions)), "bias": Dense(_sum(back, positions))}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,  # type: ignore[dict-item]  # each rule takes its own layer type
    nn.Conv1d: convolution,  # type: ignore[dict-item]
    nn.Conv2d: convolution,  # type: ignore[dict-item]
    nn.Conv3d: convolution,  # type: ignore[dict-item]
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
    nn.Embedding: embedding,  # type: ignore[dict-item]
    nn.LayerNorm: layer_norm,  # type: ignore[dict-item]
    nn.GroupNorm: group_norm,  # type: ignore[dict-item]
}

_OURS = frozenset(RULES)

# What a rule of one's own may give for a parameter: all per-example gradients in one tensor, or a use of it.
OwnRule = Callable[[Any, Tensor, Tensor], Mapping[str, Tensor | Use]]


def register_rule(layer_type: type[nn.Module], rule: OwnRule) -> OwnRule:
    """Teach the clipping engine the per-example gradients of a layer of your own.

    Guarantee: every engine compares the rules it uses with the one-example loop on its first batch. Where the two
    differ, `Trainer` warns and uses the loop, and `make_private` refuses.

    Args:
        layer_type: the class of the layer. The rule holds for exactly this class: a subclass may compute something else
            and needs a rule of its own.
        rule: `rule(layer, inputs, back)` gets the layer, its input and the gradient of its output, both with one row
            per example. It returns, by name, one gradient per example for each parameter that the layer itself holds: a
            tensor of shape [examples, *parameter.shape], or a use (`fodp.clipping.layers.uses`) that gives norms and
            sums without holding the gradients. A row may depend on the same row of `inputs` and `back` only.

    Returns:
        The rule.

    Raises:
        ConfigurationError: if `layer_type` is no class of layers, or has a rule of fodp already.

    Example:
        >>> import fodp, torch
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.factor = torch.nn.Parameter(torch.ones(features))
        ...     def forward(self, inputs):
        ...         return inputs * self.factor
        >>> _ = fodp.register_rule(Scale, lambda layer, inputs, back: {"factor": inputs * back})
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise ConfigurationError(f"a rule is registered for a class of layers (nn.Module), got {shown(layer_type)}")
    if layer_type in _OURS:
        raise ConfigurationError(f"{layer_type.__name__} has a rule already: derive a class of your own to change it")
    if not callable(rule):
        raise ConfigurationError(f"a rule is a function rule(layer, inputs, back), got {shown(rule)}")

    def checked(layer: nn.Module, inputs: Tensor, back: Tensor) -> dict[str, Use]:
        return _uses(layer, rule(layer, inputs, back), len(inputs))

    RULES[layer_type] = checked
    return rule


def is_own(layer: nn.Module) -> bool:
    """Whether the layer's rule is one that a user has registered."""
    return type(layer) in RULES and type(layer) not in _OURS


def has_registered() -> bool:
    """Whether any rule was registered by a user."""
    return len(RULES) > len(_OURS)


def _uses(layer: nn.Module, given: Mapping[str, Tensor | Use], rows: int) -> dict[str, Use]:
    """What a rule of the user's gave, as uses; a parameter left out, unknown or of another shape is refused."""
    own, kind = dict(layer.named_parameters(recurse=False)), type(layer).__name__
    if not isinstance(given, Mapping) or not {n for n, p in own.items() if p.requires_grad} <= given.keys() <= {*own}:
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ConfigurationError(
            f"the rule of {kind} must return the gradients of {', '.join(own)} by name, got {found or 'none'}"
        )
    for name, gradient in given.items():
        if isinstance(gradient, Tensor) and gradient.shape != (rows, *own[name].shape):
            raise ConfigurationError(
                f"the rule of {kind} must return one gradient of {name} per example, of shape "
                f"(examples, {', '.join(map(str, own[name].shape))}), got a tensor of {gradient.dim()} dimensions with "
                f"{', '.join(map(str, gradient.shape[1:])) or 'nothing'} after the first"
            )
    return {name: Dense(each) if isinstance(each, Tensor) else each for name, each in given.items()}


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """What the layer pads, in F.pad's order (last dimension first, both ends)."""
    if layer.padding == "valid":
        return [0, 0] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [hole * (reach - 1) for hole, reach in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    assert not isinstance(layer.padding, str)
    return [side for amount in reversed(layer.padding) for side in (amount, amount)]


def _pair(values: tuple[int, ...]) -> tuple[int, ...]:
    """Of one dimension, a row of height one."""
    return (1, *values) if len(values) == 1 else tuple(values)
