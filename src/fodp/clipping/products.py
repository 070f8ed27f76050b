"""The weighted sum of outer products: the weight of a linear layer takes most of a private step's time here."""

import torch
from torch import Tensor

from fodp import kernels

# What the compiled loop reads again and again must stay in a core's second cache; the constants are its tile's.
_CACHED = 1 << 20
_ROWS, _WIDTH, _PLACE = 8, 48, 2


def add_product(out: Tensor, inputs: Tensor, back: Tensor, weights: Tensor, accumulate: bool) -> None:
    """out = Σ_i weights_i · back_i ⊗ inputs_i, or out += that. Shapes: [B, fan_in], [B, fan_out], [B]."""
    if _add_compiled(out, inputs, back, weights, accumulate):
        return
    back = back * weights.unsqueeze(1)
    if inputs.dtype != out.dtype or back.dtype != out.dtype:
        back, inputs = back.to(out.dtype), inputs.to(out.dtype)
    if accumulate:
        out.addmm_(back.t(), inputs)
    else:
        torch.mm(back.t(), inputs, out=out)


def _add_compiled(out: Tensor, inputs: Tensor, back: Tensor, weights: Tensor, accumulate: bool) -> bool:
    """The same, where one thread and AVX-512 do the work: 0.8 of the library's time for the paper's MLP."""
    library = kernels.library_for(out, inputs, back, weights) if torch.get_num_threads() == 1 else None
    scratch = len(inputs) * (back.shape[1] + _ROWS + _WIDTH + _PLACE)
    if library is None or 4 * scratch > _CACHED:
        return False
    room = inputs.new_empty(scratch)
    vectors = (tensor.data_ptr() for tensor in (out, inputs, back, weights))
    sizes = len(inputs), inputs.shape[1], back.shape[1]
    return bool(library.fodp_product(*vectors, *sizes, accumulate, room.data_ptr()))
