"""Packed sequences: rows that hold several texts, perhaps of several people, taken apart again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fodp.errors import DataError
from fodp.support import checks


def unpack(
    tokens: Tensor,
    segments: Tensor,
    owners: Sequence[Any] | Tensor,
    *,
    padding: int = 0,
    length: int | None = None,
) -> tuple[TensorDataset, list[Any]]:
    """Make each text of packed rows a record of its own, and say whose it is.

    A row that holds the texts of several people mixes them: attention across texts, one loss for all. As records of
    their own they are clipped with all others of their owner.

    Guarantee: a record of the result is made of one text alone, whatever stands beside it in its row, and however long
    the texts of others are; every token that belongs to a text is in exactly one record.

    Args:
        tokens: [rows, length], several texts in each row.
        segments: [rows, length], the number of the text that a token belongs to, from 0 on over all rows, each text in
            one row and its tokens side by side; -1 for padding.
        owners: whose each text is, one name for each number.
        padding: what records are filled up with.
        length: to how many tokens, a public number that no text exceeds; None: to the length of the packed rows, which
            must be public then. The longest text of the data is nobody's to know, and would change all records.

    Returns:
        A `TensorDataset` of (tokens [texts, length], mask [texts, length], True where there is a token), and the owners
        of its records, for `Trainer(owners=...)`.

    Example:
        >>> data, owners = unpack(torch.tensor([[5, 6, 7, 0], [8, 9, 9, 9]]),
        ...                       torch.tensor([[0, 0, 1, -1], [2, 2, 2, 2]]), ["ann", "bob", "ann"])
        >>> data.tensors[0].tolist(), owners
        ([[5, 6, 0, 0], [7, 0, 0, 0], [8, 9, 9, 9]], ['ann', 'bob', 'ann'])
    """
    if tokens.dim() != 2 or tokens.shape != segments.shape:
        raise DataError(
            "tokens and segments must both have the shape (rows, length), got "
            f"{tuple(tokens.shape)} and {tuple(segments.shape)}"
        )
    width = tokens.shape[1] if length is None else checks.whole("length", length)
    named = owners.tolist() if isinstance(owners, Tensor) else list(owners)
    flat = segments.flatten().long()
    inside = flat >= 0
    texts = len(named)
    if inside.any() and int(flat.max()) >= texts:
        raise DataError(f"text {int(flat.max())} has no owner: owners names those of {texts} texts")
    places = inside.nonzero().flatten()
    rows = places // segments.shape[1]
    number = flat[places]
    began = torch.ones_like(number, dtype=torch.bool)  # where another text begins, or another row
    began[1:] = (number[1:] != number[:-1]) | (rows[1:] != rows[:-1]) | (places[1:] != places[:-1] + 1)
    first = number[began]
    if len(first.unique()) != len(first) or len(first) != texts:
        raise DataError("each text must have tokens, side by side and in one row: number the texts anew")
    lengths = torch.bincount(number, minlength=texts)
    if (too_long := (lengths > width).nonzero().flatten()).numel():
        raise DataError(
            f"text {int(too_long[0])} has more tokens than length={width}: cut texts to it before, each by itself, or "
            "declare a larger length"
        )
    start = torch.empty(texts, dtype=torch.int64)
    start[first] = began.nonzero().flatten()
    within = torch.arange(len(number)) - start[number]
    unpacked = tokens.new_full((texts, width), padding)
    unpacked[number, within] = tokens.flatten()[places]
    mask = torch.arange(width) < lengths[:, None]
    return TensorDataset(unpacked, mask), named
