"""The things to train: models and synthetic data of the right shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, its batch size, and data: `inputs(n)` are n examples."""

    batch: int
    examples: int
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels, the same in every process."""
        torch.manual_seed(0)
        return self.inputs(self.examples), torch.randint(CLASSES, (self.examples,))

    def public(self) -> tuple[Tensor, Tensor]:
        """As many other rows as a lot has."""
        torch.manual_seed(1)
        return self.inputs(self.batch), torch.randint(CLASSES, (self.batch,))


def mlp(width: int = 64) -> nn.Module:
    """The paper's MLP; another first width scales its number of parameters."""
    return nn.Sequential(
        nn.Linear(3072, width), nn.Tanh(), nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, CLASSES)
    )  # fmt: skip


def mlp_with_dropout() -> nn.Module:
    """The paper's MLP with dropout, which is drawn for each example in every step."""
    first, tanh, *rest = mlp().children()
    return nn.Sequential(first, tanh, nn.Dropout(0.5), *rest[:2], nn.Dropout(0.5), *rest[2:])


def conv_net() -> nn.Module:
    """Five 3x3 convolutions with GroupNorm, 0.54M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for wide, halve in ((32, True), (64, True), (128, False), (128, True), (256, False)):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.GroupNorm(8, wide), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if halve else []
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class _Block(nn.Module):
    """Pre-norm self-attention and feed-forward, of Linear and LayerNorm only, which every library here knows."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        three = self.queries_keys_values(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = three.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Tokens, fixed positions, four blocks, the mean, a linear classifier; 0.9M parameters."""

    def __init__(self, vocabulary: int = 1000, width: int = 128, length: int = 128, layers: int = 4, heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        # A plain attribute: Opacus refuses models with buffers.
        self.positions = torch.stack((angles.sin(), angles.cos()), -1).reshape(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.to(tokens.device))).mean(1))


class MeanOfEmbeddings(nn.Module):
    """A bag of words: 20 thousand rows of 16, averaged, and a linear classifier."""

    def __init__(self, vocabulary: int = 20_000, width: int = 16):
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.words(words).mean(1))


WORKLOADS = {
    "mlp": Workload(200, 5000, mlp, lambda n: torch.randn(n, 3072)),
    "mlp-dropout": Workload(200, 5000, mlp_with_dropout, lambda n: torch.randn(n, 3072)),
    "conv": Workload(256, 2560, conv_net, lambda n: torch.randn(n, 3, 32, 32)),
    "transformer": Workload(64, 2560, Transformer, lambda n: torch.randint(1000, (n, 128))),
    "embedding": Workload(256, 5120, MeanOfEmbeddings, lambda n: torch.randint(20_000, (n, 64))),
}
