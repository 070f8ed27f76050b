"""Models, losses and the plainest reference for the tests of the clipping engine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

Make = Callable[[], nn.Module]


def probe(model: nn.Module, batch: Any) -> Tensor:
    """A loss that looks at every output, each with another weight: nothing cancels by symmetry."""
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    flat = model(inputs).flatten(1)
    losses = (flat.tanh() * torch.linspace(-1, 1.5, flat.shape[1], dtype=flat.dtype)).sum(1)
    return losses * batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else losses


def rows(batch: Any, index: Any) -> Any:
    """Some examples of a batch."""
    if isinstance(batch, Tensor):
        return batch[index]
    if isinstance(batch, dict):
        return {key: rows(value, index) for key, value in batch.items()}
    return type(batch)(rows(part, index) for part in batch)


def size_of(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients_by_hand(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any) -> Tensor:
    """Each example's gradient from itself alone, in float64: no part of fodp is used."""
    found = []
    for i in range(size_of(batch)):
        loss = loss_fn(model, rows(batch, slice(i, i + 1)))[0]
        parts = torch.autograd.grad(loss, trainable(model), allow_unused=True)
        pairs = zip(trainable(model), parts, strict=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in pairs]
        found.append(torch.cat([g.double().flatten() for g in dense]))
    return torch.stack(found)


def clipped(gradients: Tensor, clip_norm: float) -> Tensor:
    """Clip each row by hand; a row that is not finite counts as zero."""
    norms = gradients.norm(dim=1)
    gradients = torch.where(norms.isfinite()[:, None], gradients, torch.zeros(()).double())
    return gradients * (clip_norm / norms.clamp(min=clip_norm)).nan_to_num()[:, None]


# --- one layer each: name -> (layer, one example's input) ---------------------------------------


def conv2d(*args: Any, size: tuple[int, int] = (7, 6), **kwargs: Any) -> tuple[Make, Callable[[int], Tensor]]:
    return (lambda: nn.Conv2d(*args, **kwargs)), (lambda n: torch.randn(n, args[0], *size))


def conv1d(*args: Any, size: int = 9, **kwargs: Any) -> tuple[Make, Callable[[int], Tensor]]:
    return (lambda: nn.Conv1d(*args, **kwargs)), (lambda n: torch.randn(n, args[0], size))


def conv3d(*args: Any, size: tuple[int, int, int] = (4, 5, 3), **kwargs: Any) -> tuple[Make, Callable[[int], Tensor]]:
    return (lambda: nn.Conv3d(*args, **kwargs)), (lambda n: torch.randn(n, args[0], *size))


def layer(make: Make, *shape: int) -> tuple[Make, Callable[[int], Tensor]]:
    return make, (lambda n: torch.randn(n, *shape))


def tokens(make: Make, *shape: int, rows: int = 7) -> tuple[Make, Callable[[int], Tensor]]:
    return make, (lambda n: torch.randint(0, rows, (n, *shape)))


def with_random_affine(make: Make) -> Make:
    """Norm layers start at scale one and shift zero, which hides mistakes."""

    def made() -> nn.Module:
        module = make()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    return made


PADDING_MODES = ("zeros", "reflect", "replicate", "circular")

LAYERS: dict[str, tuple[Make, Callable[[int], Tensor]]] = {
    "linear": layer(lambda: nn.Linear(5, 4), 5),
    "linear-no-bias": layer(lambda: nn.Linear(5, 4, bias=False), 5),
    "linear-3d-direct": layer(lambda: nn.Linear(3, 4), 9, 3),
    "linear-3d-ghost": layer(lambda: nn.Linear(16, 12), 3, 16),
    "linear-3d-no-bias": layer(lambda: nn.Linear(5, 4, bias=False), 6, 5),
    "linear-3d-one-position": layer(lambda: nn.Linear(5, 4), 1, 5),
    "linear-4d": layer(lambda: nn.Linear(5, 4), 2, 3, 5),
    "linear-one-to-one": layer(lambda: nn.Linear(1, 1), 1),
    "conv2d": conv2d(3, 4, 3),
    "conv2d-no-bias": conv2d(3, 4, 3, bias=False),
    "conv2d-ghost": conv2d(8, 16, 3, size=(4, 4)),
    "conv2d-groups": conv2d(4, 6, 3, groups=2),
    "conv2d-groups-ghost": conv2d(16, 16, 3, groups=2, size=(4, 4)),
    "conv2d-depthwise": conv2d(4, 8, 3, groups=4),
    "conv2d-dilation": conv2d(2, 3, 2, dilation=(2, 3)),
    "conv2d-stride-rest": conv2d(2, 3, 3, stride=(3, 2), size=(8, 8)),
    "conv2d-stride-rest-padding": conv2d(2, 3, (2, 3), stride=(4, 3), padding=(1, 2), dilation=(2, 1), size=(9, 8)),
    "conv2d-one-position": conv2d(2, 3, (7, 6)),
    "conv2d-one-position-groups": conv2d(4, 6, (7, 6), groups=2),
    "conv2d-pointwise": conv2d(5, 4, 1),
    "conv2d-rectangular": conv2d(2, 3, (1, 4), padding=(0, 2)),
    "conv2d-valid": conv2d(2, 3, 3, padding="valid"),
    "conv2d-same-even-kernel": conv2d(2, 3, (2, 4), padding="same"),
    "conv2d-same-dilation": conv2d(2, 3, (2, 3), padding="same", dilation=(3, 1)),
    "conv1d": conv1d(3, 4, 3),
    "conv1d-no-bias": conv1d(3, 4, 3, bias=False),
    "conv1d-ghost": conv1d(12, 16, 3, size=5),
    "conv1d-groups": conv1d(4, 6, 3, groups=2),
    "conv1d-depthwise": conv1d(4, 4, 3, groups=4, padding=1),
    "conv1d-stride-dilation": conv1d(2, 3, 3, stride=3, dilation=2, padding=1, size=11),
    "conv1d-same": conv1d(2, 3, 4, padding="same"),
    "conv1d-one-position": conv1d(2, 3, 9),
    **{f"conv2d-{mode}": conv2d(2, 3, 3, padding=(2, 1), padding_mode=mode) for mode in PADDING_MODES},
    **{f"conv2d-same-{mode}": conv2d(2, 3, (2, 3), padding="same", padding_mode=mode) for mode in PADDING_MODES},
    **{f"conv1d-{mode}": conv1d(2, 3, 3, padding=2, stride=2, padding_mode=mode) for mode in PADDING_MODES},
    "conv3d": conv3d(2, 3, 2),
    "conv3d-no-bias": conv3d(2, 3, (2, 1, 3), bias=False),
    "conv3d-ghost": conv3d(4, 12, (2, 2, 2), size=(2, 3, 2)),
    "conv3d-groups": conv3d(4, 6, 2, groups=2),
    "conv3d-by-place": conv3d(16, 3, (2, 3, 2), dilation=(1, 2, 1)),
    "conv3d-stride-dilation": conv3d(2, 3, 2, stride=(2, 1, 2), dilation=(1, 2, 1), padding=(1, 0, 1)),
    "conv3d-one-position": conv3d(2, 3, (4, 5, 3)),
    **{f"conv3d-{mode}": conv3d(2, 3, (2, 3, 2), padding=1, padding_mode=mode) for mode in PADDING_MODES},
    "transposed-1d": layer(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1), 3, 5),
    "transposed": layer(lambda: nn.ConvTranspose2d(3, 4, 3), 3, 4, 5),
    "transposed-no-bias": layer(lambda: nn.ConvTranspose2d(3, 4, 2, bias=False), 3, 4, 5),
    "transposed-rest": layer(lambda: nn.ConvTranspose2d(3, 4, 3, stride=(2, 3), output_padding=1), 3, 4, 5),
    "transposed-rest-beyond-stride": layer(
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=1, dilation=3, output_padding=2), 3, 4, 5
    ),
    "transposed-groups": layer(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1, dilation=2), 4, 4, 5),
    "transposed-ghost": layer(lambda: nn.ConvTranspose2d(8, 8, 2), 8, 2, 2),
    "transposed-by-place": layer(lambda: nn.ConvTranspose2d(4, 16, 2, dilation=2), 4, 3, 4),
    "transposed-3d": layer(lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, padding=1), 2, 3, 2, 3),
    "embedding": tokens(lambda: nn.Embedding(7, 3), 5),
    "embedding-repeated": tokens(lambda: nn.Embedding(7, 3), 8, rows=2),
    "embedding-padding": tokens(lambda: nn.Embedding(7, 3, padding_idx=1), 6, rows=3),
    "embedding-negative-padding": tokens(lambda: nn.Embedding(7, 3, padding_idx=-6), 6, rows=3),
    "embedding-1d": tokens(lambda: nn.Embedding(7, 3)),
    "embedding-2d-positions": tokens(lambda: nn.Embedding(7, 3), 2, 4),
    "embedding-sparse": tokens(lambda: nn.Embedding(7, 3, sparse=True), 5),
    "layer-norm": layer(with_random_affine(lambda: nn.LayerNorm(6)), 6),
    "layer-norm-positions": layer(with_random_affine(lambda: nn.LayerNorm(6)), 4, 6),
    "layer-norm-two-dimensions": layer(with_random_affine(lambda: nn.LayerNorm((4, 6))), 4, 6),
    "layer-norm-inner": layer(with_random_affine(lambda: nn.LayerNorm((3, 4))), 2, 5, 3, 4),
    "layer-norm-no-bias": layer(with_random_affine(lambda: nn.LayerNorm(6, bias=False)), 4, 6),
    "group-norm": layer(with_random_affine(lambda: nn.GroupNorm(2, 6)), 6, 4, 3),
    "group-norm-1d": layer(with_random_affine(lambda: nn.GroupNorm(3, 6)), 6, 5),
    "group-norm-flat": layer(with_random_affine(lambda: nn.GroupNorm(2, 6)), 6),
}  # fmt: skip


# --- whole models --------------------------------------------------------------------------------


class Apply(nn.Module):
    """Sub-modules by name, and a forward function over them: one line per structure."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Scale(nn.Module):
    """A layer of its own kind, without a rule."""

    def __init__(self, *shape: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


class TwoOutputs(nn.Module):
    """The second output is made of the first."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x * self.scale
        return first, first.sin()


class Masked(nn.Module):
    """Takes an argument that is not per example: a mask of shape [T, T]."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("ts,bsd->btd", mask, x * self.scale).tanh()


class BranchOnData(nn.Module):
    """Looks at values in Python, which cannot be vectorised."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([r * self.scale if r.sum().item() > 0 else r - self.scale.square() for r in x])


class NoisyInside(nn.Module):
    """Draws its own randomness, which no second run repeats."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (torch.rand_like(x) if self.training else 1)


def tie(first: nn.Module, second: nn.Module) -> nn.Module:
    second.weight = first.weight
    return second


def freeze(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def in_place_residual(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += x
    h.relu_()
    return m.b(h)


def with_no_grad_call(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.a(x * 2)
    return m.a(x) - target


def sorted_by_length(m: Any, x: Tensor) -> Tensor:
    order = x.sum(1).argsort()
    return m.b(m.a(x[order]).tanh()[order.argsort()])


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), x.shape[1])
    return m.a(pack_padded_sequence(x, lengths, batch_first=True))[1][0][0]


def changed_later(m: Any, x: Tensor) -> Tensor:
    """Legal, because the frozen weight's gradient is not asked for; the recorded input is lost."""
    h = x * 1
    out = m.a(h)
    h.mul_(3)
    return out + h


def no_positions(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.b(m.positions)


def set_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 1] = m.t
    return h.tanh()


def attention(**kwargs: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(6, 2, **kwargs)


def structure(forward: Callable[..., Tensor], **parts: Callable[[], Any]) -> Make:
    return lambda: Apply(forward, **{name: part() for name, part in parts.items()})


def tied(forward: Callable[..., Tensor], first: Make, second: Make) -> Make:
    def made() -> nn.Module:
        a = first()
        return Apply(forward, a=a, b=tie(a, second()))

    return made


def linear(a: int = 6, b: int = 6, **kwargs: Any) -> Make:
    return lambda: nn.Linear(a, b, **kwargs)


def frozen(make: Make, *names: str) -> Make:
    return lambda: freeze(make(), *names)


def in_evaluation(make: Make) -> Make:
    return lambda: make().eval()


def with_statistics() -> nn.Module:
    norm = with_random_affine(lambda: nn.BatchNorm1d(6))().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def words(*shape: int, of: int = 7) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, of, (n, *shape))


def sequential(*makes: Make) -> Make:
    return lambda: nn.Sequential(*[make() for make in makes])


def weight_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))


Structures = dict[str, tuple[Make, Callable[[int], Tensor]]]

# The engine must take its fast path here.
FAST: Structures = {
    "mlp": (sequential(linear(6, 8), nn.Tanh, linear(8, 5), nn.ReLU, linear(5, 3)), floats(6)),
    "tied-linear": (tied(lambda m, x: m.b(m.a(x).tanh()), linear(), linear()), floats(6)),
    "tied-linear-positions": (tied(lambda m, x: m.b(m.a(x).tanh()), linear(), linear()), floats(4, 6)),
    "tied-embedding-linear": (
        tied(lambda m, x: m.b(m.a(x).tanh()), lambda: nn.Embedding(7, 5), linear(5, 7, bias=False)),
        words(4),
    ),
    "tied-embeddings": (
        tied(lambda m, x: m.a(x) * m.b(x.flip(1)), lambda: nn.Embedding(7, 5), lambda: nn.Embedding(7, 5)),
        words(4),
    ),
    "tied-convolutions-other-groups": (
        tied(
            lambda m, x: m.a(x).sum((2, 3)) + m.b(x[:, :2]).sin().sum((2, 3)),
            lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
            lambda: nn.Conv2d(2, 8, 3, bias=False),
        ),
        floats(4, 5, 5),
    ),
    "frozen-first": (structure(lambda m, x: m.b(m.a(x).tanh()), a=frozen(linear()), b=linear()), floats(6)),
    "frozen-last": (structure(lambda m, x: m.b(m.a(x).tanh()), a=linear(), b=frozen(linear())), floats(6)),
    "bias-only": (
        structure(lambda m, x: m.b(m.a(x).tanh()), a=frozen(linear(), "weight"), b=frozen(linear(), "weight")),
        floats(4, 6),
    ),
    "frozen-biases": (
        sequential(frozen(lambda: nn.Conv2d(2, 4, 3), "bias"), nn.Tanh, frozen(lambda: nn.GroupNorm(2, 4), "bias")),
        floats(2, 5, 5),
    ),
    "called-twice": (structure(lambda m, x: m.a(m.a(x).tanh()), a=linear()), floats(6)),
    "called-three-times-positions": (structure(lambda m, x: m.a(m.a(m.a(x).tanh()).sin()), a=linear()), floats(3, 6)),
    "convolution-called-twice": (
        structure(lambda m, x: m.a(m.a(x).tanh()), a=lambda: nn.Conv2d(3, 3, 3, padding=1)),
        floats(3, 5, 4),
    ),
    "norm-called-twice": (
        structure(lambda m, x: m.a(m.a(x).sin()), a=with_random_affine(lambda: nn.LayerNorm(6))),
        floats(3, 6),
    ),
    "also-called-without-gradient": (structure(with_no_grad_call, a=linear()), floats(6)),
    "keyword-call": (structure(lambda m, x: m.a(input=x), a=linear()), floats(6)),
    "positional-table": (
        structure(lambda m, x: m.a(x + m.table).tanh(), a=linear(), table=lambda: nn.Parameter(torch.randn(4, 6))),
        floats(4, 6),
    ),
    "scale-of-the-whole": (
        structure(lambda m, x: m.a(x) * m.s, a=linear(), s=lambda: nn.Parameter(torch.tensor(0.7))),
        floats(6),
    ),
    "parameter-as-input": (
        structure(
            lambda m, x: (m.a(m.q.expand(len(x), -1, -1)) * m.b(x)[:, None]).sum(1),
            a=linear(), b=linear(), q=lambda: nn.Parameter(torch.randn(1, 3, 6)),
        ),
        floats(6),
    ),
    "in-place-activation": (sequential(linear(6, 8), lambda: nn.ReLU(inplace=True), linear(8, 5)), floats(6)),
    "in-place-activation-positions": (
        sequential(linear(6, 8), lambda: nn.ReLU(inplace=True), linear(8, 5)), floats(4, 6)
    ),
    "in-place-activation-convolution": (
        sequential(
            lambda: nn.Conv1d(6, 8, 2, groups=2), lambda: nn.ReLU(inplace=True), lambda: nn.Conv1d(8, 5, 1),
            lambda: nn.LeakyReLU(inplace=True),
        ),
        floats(6, 4),
    ),
    "in-place-residual": (structure(in_place_residual, a=linear(), b=linear()), floats(6)),
    "residual": (structure(lambda m, x: m.b(x + m.a(x).tanh()) + x, a=linear(), b=linear()), floats(4, 6)),
    "unused-parameter": (structure(lambda m, x: m.a(x), a=linear(), b=linear()), floats(6)),
    "unused-call": (structure(lambda m, x: m.a(x) + 0 * m.b(x).detach(), a=linear(), b=linear()), floats(6)),
    "text-cnn": (
        structure(
            lambda m, x: m.c(m.b(m.a(x).transpose(1, 2)).relu().amax(2)),
            a=lambda: nn.Embedding(7, 5), b=lambda: nn.Conv1d(5, 6, 3), c=linear(6, 3),
        ),
        words(8),
    ),
    "channels-last": (
        structure(
            lambda m, x: m.b(m.a(x.contiguous(memory_format=torch.channels_last)).tanh()),
            a=lambda: nn.Conv2d(3, 4, 3), b=lambda: nn.Conv2d(4, 2, 2, stride=2),
        ),
        floats(3, 7, 7),
    ),
    "gru": (structure(lambda m, x: m.a(x)[0], a=lambda: nn.GRU(6, 4, batch_first=True)), floats(5, 6)),
    "gru-time-first": (
        structure(lambda m, x: m.b(m.a(x.transpose(0, 1))[1][0]), a=lambda: nn.GRU(6, 4), b=linear(4, 3)),
        floats(5, 6),
    ),
    "lstm-two-layers-both-ways": (
        structure(
            lambda m, x: torch.cat([m.a(x)[0].mean(1), m.a(x)[1][1].transpose(0, 1).flatten(1)], 1),
            a=lambda: nn.LSTM(6, 3, num_layers=2, bidirectional=True, batch_first=True),
        ),
        floats(4, 6),
    ),
    "lstm-time-first-with-state": (
        structure(
            lambda m, x: m.a(x.transpose(0, 1), (m.b(x[:, 0])[None], m.b(x[:, 1])[None]))[0].transpose(0, 1),
            a=lambda: nn.LSTM(6, 4), b=linear(6, 4),
        ),
        floats(5, 6),
    ),
    "gru-cell": (structure(lambda m, x: m.a(x[:, 1], m.a(x[:, 0])), a=lambda: nn.GRUCell(6, 4)), floats(2, 6)),
    "attention": (structure(lambda m, x: m.a(x, x, x)[0], a=lambda: attention(batch_first=True)), floats(4, 6)),
    "attention-time-first": (
        structure(lambda m, x: m.a(x.mT.permute(2, 0, 1), *[x.transpose(0, 1)] * 2)[0].transpose(0, 1), a=attention),
        floats(4, 6),
    ),
    "attention-weights-used": (
        structure(lambda m, x: m.a(x, x, x)[1], a=lambda: attention(batch_first=True)),
        floats(4, 6),
    ),
    "attention-masks": (
        structure(
            lambda m, x: m.a(
                x, x, x, attn_mask=torch.ones(4, 4).triu(1).bool(), key_padding_mask=(x[:, :, 0] > 2).bool()
            )[0],
            a=lambda: attention(batch_first=True),
        ),
        floats(4, 6),
    ),
    "attention-time-first-masks": (
        structure(
            lambda m, x: m.a(
                *[x.transpose(0, 1)] * 3, attn_mask=torch.zeros(4, 4).bool(), key_padding_mask=x[:, :, 0] > 2
            )[0].transpose(0, 1),
            a=attention,
        ),
        floats(4, 6),
    ),
    "attention-other-widths": (
        structure(
            lambda m, x: m.a(x, x[..., :3], x[..., 2:])[0],
            a=lambda: attention(batch_first=True, kdim=3, vdim=4, add_bias_kv=True),
        ),
        floats(4, 6),
    ),
    "transformer-layer": (
        sequential(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), linear(6, 2)),
        floats(4, 6),
    ),
    "transformer-layer-in-evaluation": (
        sequential(
            in_evaluation(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)), linear(6, 2)
        ),
        floats(4, 6),
    ),
    "own-layer": (sequential(linear(), lambda: Scale(6), linear()), floats(6)),
    "own-layer-with-mask": (
        structure(lambda m, x: m.b(m.a(x, m.mask)), a=lambda: Masked(6), b=linear(), mask=lambda: torch.randn(4, 4)),
        floats(4, 6),
    ),
    "prelu": (sequential(linear(), lambda: nn.PReLU(6), linear()), floats(6)),
    "transposed-convolution": (sequential(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2)), floats(2, 4, 4)),
    "convolution-3d": (sequential(lambda: nn.Conv3d(2, 3, 2)), floats(2, 3, 4, 3)),
    "convolutions-by-function": (
        structure(
            lambda m, x: F.conv_transpose3d(F.conv3d(x, m.v, padding=1).tanh(), m.w, m.b, stride=2, output_padding=1),
            v=lambda: nn.Parameter(torch.randn(3, 2, 2, 2, 2)), w=lambda: nn.Parameter(torch.randn(3, 2, 2, 1, 2)),
            b=lambda: nn.Parameter(torch.randn(2)),
        ),
        floats(2, 3, 2, 2),
    ),
    "bilinear": (structure(lambda m, x: m.a(x, x.sin()), a=lambda: nn.Bilinear(6, 6, 4)), floats(6)),
    "frozen-batch-norm": (sequential(linear(), with_statistics, linear()), floats(6)),
    "frozen-batch-norm-without-affine": (
        sequential(linear(), in_evaluation(lambda: nn.BatchNorm1d(6, affine=False)), linear()),
        floats(6),
    ),
    "instance-norm": (
        sequential(lambda: nn.Conv2d(2, 4, 3), with_random_affine(lambda: nn.InstanceNorm2d(4, affine=True))),
        floats(2, 6, 6),
    ),
    "norms-without-affine": (
        sequential(
            lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4, affine=False), nn.Flatten,
            lambda: nn.LayerNorm(36, elementwise_affine=False), linear(36, 3),
        ),
        floats(2, 5, 5),
    ),
    "dropout-in-evaluation": (
        sequential(linear(), in_evaluation(lambda: nn.Dropout(0.5)), linear()),
        floats(6),
    ),
    "time-flattened-before-examples": (
        structure(
            lambda m, x: m.a(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x))).transpose(0, 1), a=linear()
        ),
        floats(3, 6),
    ),
    "norm-time-first": (
        structure(
            lambda m, x: m.b(m.a(x.transpose(0, 1))).transpose(0, 1),
            a=with_random_affine(lambda: nn.LayerNorm(6)), b=linear(),
        ),
        floats(3, 6),
    ),
    "positions-of-a-table": (
        structure(
            lambda m, x: m.b((m.a(x) + m.p(torch.arange(4)[None])).tanh()),
            a=lambda: nn.Embedding(7, 5), p=lambda: nn.Embedding(9, 5), b=linear(5, 3),
        ),
        words(4),
    ),
    "class-token": (
        structure(
            lambda m, x: m.a(torch.cat([m.t.expand(len(x), -1, -1), x], 1)).tanh(),
            a=linear(), t=lambda: nn.Parameter(torch.randn(1, 1, 6)),
        ),
        floats(3, 6),
    ),
    "repeated-token": (
        structure(
            lambda m, x: m.a(torch.cat([m.t.repeat(len(x), 1, 1), x], 1)).tanh(),
            a=linear(), t=lambda: nn.Parameter(torch.randn(1, 2, 6)),
        ),
        floats(3, 6),
    ),
    "token-set-in-place": (
        structure(set_in_place, a=linear(), t=lambda: nn.Parameter(torch.randn(6))),
        floats(3, 6),
    ),
    "shift-in-place": (
        structure(lambda m, x: m.a(x).mul_(m.s).add_(m.t), a=linear(), s=lambda: nn.Parameter(torch.randn(6)),
                  t=lambda: nn.Parameter(torch.randn(3, 1))),
        floats(3, 6),
    ),
    "one-plus-scale": (
        structure(lambda m, x: m.a(x) * (1 + m.s) - m.s.square(), a=linear(), s=lambda: nn.Parameter(torch.randn(6))),
        floats(3, 6),
    ),
    "transposed-weight": (
        structure(lambda m, x: (m.a(x) @ m.a.weight).tanh() @ m.a.weight.t(), a=linear(6, 4)), floats(3, 6)
    ),
    "addmm": (
        structure(
            lambda m, x: torch.addmm(m.b, x.reshape(-1, 6), m.w).view(len(x), -1, 4).tanh(),
            w=lambda: nn.Parameter(torch.randn(6, 4)), b=lambda: nn.Parameter(torch.randn(4)),
        ),
        floats(3, 6),
    ),
    "einsum": (
        structure(
            lambda m, x: torch.einsum("btd,dhk->bthk", x, m.w).tanh(), w=lambda: nn.Parameter(torch.randn(6, 2, 3))
        ),
        floats(3, 6),
    ),
    "rms-norm": (sequential(linear(), with_random_affine(lambda: nn.RMSNorm(6)), linear()), floats(3, 6)),
    "lstm-dropout-in-evaluation": (
        structure(
            lambda m, x: m.a(x)[0],
            a=in_evaluation(lambda: nn.LSTM(6, 4, num_layers=2, dropout=0.5, batch_first=True)),
        ),
        floats(5, 6),
    ),
    "lstm-projected": (
        structure(lambda m, x: m.a(x)[0], a=lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True, bias=False)),
        floats(5, 6),
    ),
    "rnn": (structure(lambda m, x: m.a(x)[0], a=lambda: nn.RNN(6, 4, batch_first=True)), floats(5, 6)),
    "lstm-cell": (structure(lambda m, x: m.a(x[:, 1], m.a(x[:, 0]))[1], a=lambda: nn.LSTMCell(6, 4)), floats(2, 6)),
    "cross-attention": (
        structure(lambda m, x: m.a(x, x.flip(1).sin(), x.flip(1).sin())[0], a=lambda: attention(batch_first=True)),
        floats(4, 6),
    ),
    "spectral-norm": (
        in_evaluation(lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))), floats(6)
    ),
    "embedding-bag": (sequential(lambda: nn.EmbeddingBag(7, 5), linear(5, 3)), words(4)),
    "functional-reuse": (structure(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight), a=linear()), floats(6)),
    "functional-embedding-reuse": (
        structure(lambda m, x: F.linear(m.a(x), m.a.weight), a=lambda: nn.Embedding(7, 5)),
        words(4),
    ),
    "time-first": (structure(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=linear()), floats(3, 6)),
    "time-first-of-two": (structure(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=linear()), floats(2, 6)),
    "time-first-as-many-as-examples": (
        structure(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=linear()),
        floats(5, 6),
    ),
    "time-folded-into-examples": (
        structure(lambda m, x: m.a(x.flatten(0, 1)).unflatten(0, (len(x), -1)), a=linear()),
        floats(3, 6),
    ),
    "one-output-made-of-another": (
        structure(lambda m, x: (lambda y: y[0] * y[1])(m.a(m.b(x))), a=lambda: TwoOutputs(6), b=linear()),
        floats(6),
    ),
    "weight-norm": (weight_norm, floats(6)),
    "shared-input-without-examples": (
        structure(no_positions, a=linear(), b=linear(), positions=lambda: torch.randn(3, 6)),
        floats(3, 6),
    ),
}  # fmt: skip

# The layer rules would be wrong or cannot tell examples apart: the loop, with a warning.
LOOPED: Structures = {
    "own-layer-branches-on-data": (sequential(linear(), lambda: BranchOnData(6), linear()), floats(6)),
    "centred-input": (structure(lambda m, x: m.a(0.3 + x - x.mean(0)), a=linear()), floats(6)),
    "centred-inside": (
        structure(lambda m, x: m.b((lambda h: h - 0.5 * h.mean(0))(m.a(x))), a=linear(), b=linear()),
        floats(6),
    ),
    "softmax-over-examples": (structure(lambda m, x: m.a(x).softmax(0) * m.a(x), a=linear()), floats(6)),
    "flipped": (structure(lambda m, x: m.b(m.a(x.flip(0)).tanh().flip(0)), a=linear(), b=linear()), floats(6)),
    "sorted": (structure(sorted_by_length, a=linear(), b=linear()), floats(6)),
    "mixes-in-training-mode-only": (
        structure(lambda m, x: m.a(x - (0.5 * x.mean(0) if m.training else 0)), a=linear()),
        floats(6),
    ),
    "packed-sequence": (structure(packed, a=lambda: nn.LSTM(6, 4, batch_first=True)), floats(3, 6)),
    "input-changed-in-place-later": (structure(changed_later, a=frozen(linear(), "weight")), floats(6)),
}  # fmt: skip


def build(table: Structures, name: str, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The named model and a batch of `count` examples, reproducibly."""
    torch.manual_seed(seed)
    make, inputs = table[name]
    model, x = make(), inputs(count)
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def clip_norm_for(gradients: Tensor, share: float = 0.5) -> float:
    """A clip norm that cuts about this share of the examples."""
    norms = gradients.norm(dim=1)
    norms = norms[norms.isfinite() & (norms > 0)]
    return float(norms.quantile(share)) if len(norms) else 1.0


def points_by_hand(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, points: Sequence[tuple[float, Tensor | None]]
) -> Tensor:
    """Per-example gradients combined over shifted points, with the parameters moved by hand."""
    total, kept = torch.zeros(()), nn.utils.parameters_to_vector(trainable(model)).detach().clone()
    for coefficient, offset in points:
        moved = kept if offset is None else kept + offset
        nn.utils.vector_to_parameters(moved.clone(), trainable(model))
        total = total + coefficient * gradients_by_hand(model, loss_fn, batch)
    nn.utils.vector_to_parameters(kept, trainable(model))
    return total
