"""Several uses of one parameter, or one times a factor, as one use."""

from collections.abc import Sequence

import torch

from fodp.clipping.tables import Rows
from fodp.clipping.uses import Dense, Outer, Product, Use


def scaled(use: Use, factor: float) -> Use:
    """The gradients times a public factor."""
    if factor == 1:
        return use
    if isinstance(use, Rows):
        return Rows(use.indices, use.back * factor, use.table_rows)
    if isinstance(use, Product):
        return Product(use.inputs, use.back * factor)
    if isinstance(use, Outer):
        return Outer(use.inputs(), use.back * factor)
    return Dense(use.dense() * factor)


def merged(uses: Sequence[Use]) -> Use:
    """Several uses of one parameter as one: their gradients add up before anything is squared."""
    uses = _joined(uses)
    if len(uses) == 1:
        return uses[0]
    uses = [use.as_outer() if isinstance(use, Product) else use for use in uses]
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses) and len({use.back.shape[1] for use in outers}) == 1:
        return Outer(torch.cat([u.inputs() for u in outers], 2), torch.cat([u.back for u in outers], 2))
    tables = [use for use in uses if isinstance(use, Rows)]
    if len(tables) == len(uses):
        indices, back = torch.cat([u.indices for u in tables], 1), torch.cat([u.back for u in tables], 1)
        return Rows(indices, back, tables[0].table_rows)
    return Dense(torch.stack([use.dense().flatten(1) for use in uses]).sum(0))


def _joined(uses: Sequence[Use]) -> Sequence[Use]:
    """Products of the same inputs, as of a first layer at two points, become one: their back-signals add up."""
    if len(uses) == 1:
        return uses
    joined: dict[object, Use] = {}
    for use in uses:
        if not isinstance(use, Product):
            joined[use] = use
            continue
        key = use.inputs.data_ptr(), use.inputs.shape, use.inputs.stride(), use.inputs.dtype
        known = joined.get(key)
        joined[key] = Product(use.inputs, known.back + use.back) if isinstance(known, Product) else use
    return list(joined.values())
