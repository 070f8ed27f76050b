"""Models and data sets of the laboratory alone, beside those of `fodp.data`: small enough for ten seeds on one core."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fodp.data import Card, Splits, load
from fodp.data.models import build, wants_flat
from fodp_lab.paper import text

DIGITS = (
    "digits-1000"  # the first thousand digits train and the next 437 are for choosing: the whole set has no such part
)


def make(name: str, card: Card) -> nn.Module:
    """A model of the laboratory's, or of the library's."""
    return MODELS[name](card) if name in MODELS else build(name, card)


def splits(dataset: str, model: str) -> Splits:
    """A data set of the laboratory's, or of the library's, as the model wants it."""
    if dataset == text.SST2.name:
        return text.load()
    if dataset == DIGITS:
        return load("digits", train_size=1000, flatten=wants_flat(model))
    return load(dataset, flatten=wants_flat(model), progress=False)


def small_cnn(card: Card) -> nn.Module:
    """Three 3x3 convolutions of stride 2 with GroupNorm and tanh, 16 to 32 channels, and a linear head."""
    channels, height, width = card.shape
    layers: list[nn.Module] = []
    for wide in (16, 32, 32):
        layers += [nn.Conv2d(channels, wide, 3, stride=2, padding=1), nn.GroupNorm(4, wide), nn.Tanh()]
        channels, height, width = wide, -(-height // 2), -(-width // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, card.classes))


class Block(nn.Module):
    """An encoder layer: attention among the words of one sentence, then two linear layers; norms come first."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        """`is_word` is False where a sentence is padded: nobody attends to that."""
        n, length, width = x.shape
        parts = self.mix(self.first_norm(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        # A large number and not -inf: a sentence without words would have no weights at all.
        weights = scores.masked_fill(~is_word[:, None, None, :], -1e9).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(n, length, width))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class TextTransformer(nn.Module):
    """Embedded words with fixed positions, encoder layers, the mean over the words, a linear head.

    Padding has no effect: nobody attends to it, and the mean leaves it out.
    """

    def __init__(self, classes: int, length: int, buckets: int = text.BUCKETS, width: int = 64, layers: int = 1):
        super().__init__()
        self.embed = nn.Embedding(buckets, width, padding_idx=0)
        nn.init.normal_(self.embed.weight, std=width**-0.5)  # as long as a word's share of a step is small
        self.blocks = nn.ModuleList(Block(width, heads=4, inner=2 * width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.register_buffer("positions", _waves(length, width) * width**-0.5)

    def forward(self, words: Tensor) -> Tensor:
        """Bucket numbers, 0 for padding, to scores of classes."""
        is_word = words != 0
        x = self.embed(words) + self.positions
        for block in self.blocks:
            x = block(x, is_word)
        kept = is_word.unsqueeze(-1).to(x.dtype)
        return self.head((self.norm(x) * kept).sum(1) / kept.sum(1).clamp(min=1))


def _waves(length: int, width: int) -> Tensor:
    """Sines and cosines of the position, as in Vaswani et al. 2017: nothing to train."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).view(length, width)


def text_transformer(card: Card) -> nn.Module:
    """For sentences of hashed words."""
    return TextTransformer(card.classes, card.shape[0])


MODELS: dict[str, Callable[[Card], nn.Module]] = {"small-cnn": small_cnn, "text-transformer": text_transformer}
