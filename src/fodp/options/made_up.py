"""Made-up batches: what a model is shown to learn about itself, with nobody's data in it.

From records only what is public is taken: the shapes and types of their columns. Images are pink noise (amplitudes fall
as 1/frequency, as in pictures), whole numbers are Zipf's (the k-th word comes 1/k as often as the first), all others
unit normals; labels are uniform. How many labels and words there are the model says: the length of its output, the
length of its largest table.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fodp.clipping.engine import LossFunction
from fodp.errors import ConfigurationError

RECORDS = 256
_COLOURS_SHARE = 0.9  # of the variance of an image's channels: pictures are mostly grey
_ASK_FOR_A_SAMPLE = "give public_sample, a batch of public records as loss_fn takes them"


def made_up(
    columns: Sequence[Tensor] | None,
    model: nn.Module,
    loss_fn: LossFunction,
    kind: str,
    seed: int,
    count: int = RECORDS,
) -> tuple[Tensor, ...]:
    """A batch of `count` made-up records like those of these columns, of which only shape and type are looked at."""
    if columns is None:
        raise ConfigurationError(
            "shape='kronecker' makes up inputs like the data's, and these records are not tensors of one shape each: "
            + _ASK_FOR_A_SAMPLE
        )
    generator = torch.Generator().manual_seed(seed)
    forms = [(column.shape[1:], column.dtype, column.device) for column in columns]
    words = _words(model)
    batch = [_column(shape, dtype, kind, words, count, generator).to(device) for shape, dtype, device in forms]
    labels = [place for place, (shape, dtype, _) in enumerate(forms) if shape == () and _is_whole(dtype)]
    if labels:
        classes = _classes(model, loss_fn, tuple(batch))
        for place in labels:
            drawn = torch.randint(0, classes, (count,), generator=generator)
            batch[place] = drawn.to(batch[place])
    return tuple(batch)


def _column(
    shape: torch.Size, dtype: torch.dtype, kind: str, words: int, count: int, generator: torch.Generator
) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(count, *shape, dtype=dtype)
    if _is_whole(dtype):  # a single one is a label, for which any model takes 0
        return zipf((count, *shape), words, generator).to(dtype) if shape else torch.zeros(count, dtype=dtype)
    image = _image(shape, kind)
    if image is None:
        return torch.randn(count, *shape, generator=generator).to(dtype)
    return pink(count, image, generator).reshape(count, *shape).to(dtype)


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _image(shape: torch.Size, kind: str) -> tuple[int, int, int] | None:
    """Channels, height and width of what is taken for an image; flat ones are square, of three colours or one."""
    if kind == "normal" or not shape:
        return None
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    for channels in (3, 1):
        side = math.isqrt(shape[0] // channels)
        # Small squares come by chance: a table of nine columns is no image.
        if len(shape) == 1 and channels * side**2 == shape[0] and side >= (8 if kind == "auto" else 2):
            return channels, side, side
    if kind == "pink":
        raise ConfigurationError(
            f"shape_inputs='pink' makes images, and records of shape {tuple(shape)} are none: {_ASK_FOR_A_SAMPLE}"
        )
    return None


def pink(count: int, image: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Noise whose amplitude falls as 1/frequency, of unit variance; channels share most of it. [count, *image]."""
    channels, height, width = image
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
    amplitude = 1 / frequency.clamp(min=1 / max(height, width))

    def noise(layers: int) -> Tensor:
        white = torch.fft.rfft2(torch.randn(count, layers, height, width, generator=generator))
        found: Tensor = torch.fft.irfft2(white * amplitude, s=(height, width))
        return found / found.square().mean().sqrt()

    shared = noise(1)
    if channels == 1:
        return shared
    return math.sqrt(_COLOURS_SHARE) * shared + math.sqrt(1 - _COLOURS_SHARE) * noise(channels)


def zipf(shape: Sequence[int], words: int, generator: torch.Generator) -> Tensor:
    """Whole numbers below `words`, the k-th with a chance that falls as 1/(k + 1)."""
    chances = zipf_chances(words)
    drawn = torch.multinomial(chances, math.prod(shape), replacement=True, generator=generator)
    return drawn.reshape(tuple(shape))


def zipf_chances(words: int) -> Tensor:
    """How often each word comes."""
    weights = 1 / torch.arange(1, words + 1, dtype=torch.float64)
    return weights / weights.sum()


def _words(model: nn.Module) -> int:
    """The rows of the model's largest table; without one whole numbers may be of any kind."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return max(tables, default=2)


def _classes(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...]) -> int:
    """The length of what the model makes for one example: its last dimension, that of the scores."""
    lengths: list[int] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        scores = getattr(output, "logits", output)
        if isinstance(scores, Tensor) and scores.dim() > 1:
            lengths.append(scores.shape[-1])

    handle = model.register_forward_hook(note)
    try:
        with torch.no_grad():
            loss_fn(model, tuple(column[:2] for column in batch))
    except Exception as error:
        error.add_note(f"fodp: found on made-up records of the data's shapes and types; {_ASK_FOR_A_SAMPLE}")
        raise
    finally:
        handle.remove()
    return max(2, lengths[-1]) if lengths else 2
