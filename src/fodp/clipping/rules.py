"""Layer rules: from a layer's input and the gradient of its output to uses of its parameters.

One short function per layer type. Layers without a rule go through `fallback.py`.
Subclasses of these types may compute something else, so rules match the exact type.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from fodp.clipping.convolutions import Convolution
from fodp.clipping.tables import Rows
from fodp.clipping.uses import Dense, Outer, Product, Use

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Use]]


def linear(layer: nn.Linear, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """y = W·a + b, at one or many positions per example."""
    if inputs.dim() == 2:
        return {"weight": Product(inputs, back), "bias": Dense(back)}
    inputs, back = (t.reshape(t.shape[0], 1, -1, t.shape[-1]) for t in (inputs, back))
    return {"weight": Outer(inputs, back), "bias": Dense(back.sum((1, 2)))}


def convolution(layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, back: Tensor) -> dict[str, Use]:
    """A convolution is a Linear over patches; Conv1d is Conv2d on images of height one."""
    inputs = F.pad(inputs, _padding(layer), "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    if isinstance(layer, nn.Conv1d):
        inputs, back = inputs.unsqueeze(2), back.unsqueeze(2)
    kernel, stride, dilation = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    weight = Convolution(inputs, back, layer.groups, kernel, stride, dilation)
    return {"weight": weight, "bias": Dense(back.sum((2, 3)))}


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
    nn.Embedding: embedding,  # type: ignore[dict-item]
    nn.LayerNorm: layer_norm,  # type: ignore[dict-item]
    nn.GroupNorm: group_norm,  # type: ignore[dict-item]
}


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """What the layer pads, in F.pad's order (last dimension first, both ends)."""
    if layer.padding == "valid":
        return [0, 0] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [hole * (reach - 1) for hole, reach in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    assert not isinstance(layer.padding, str)
    return [side for amount in reversed(layer.padding) for side in (amount, amount)]


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return (1, values[0]) if len(values) == 1 else (values[0], values[1])
