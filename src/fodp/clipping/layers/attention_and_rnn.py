"""Functions that hold a whole layer, written as the functions it is made of, which have rules."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fodp.support.torch_internals import DisableTorchFunction

Step = Callable[[Tensor, tuple[Tensor, ...], list[Tensor], bool], tuple[Tensor, ...]]


def in_parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What computes, and draws, the same by functions that can be watched one by one; None: it stays as it is."""
    parts = _PARTS.get(function)
    if parts is None or _is_packed(function, args):
        return None
    weights: Any = (args, *kwargs.values())
    if function is F.scaled_dot_product_attention:  # of what it takes, only a mask may be made of parameters
        weights = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    return parts if _trains(weights) else None


def _trains(value: Any) -> bool:
    """Whether there is a tensor with a gradient in it."""
    if isinstance(value, Tensor):
        with DisableTorchFunction():
            return value.requires_grad
    return isinstance(value, tuple | list) and any(map(_trains, value))


def _is_packed(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a recurrent function is given a packed sequence: (data, sizes, state, weights, ...)."""
    if function is torch.lstm:
        return isinstance(args[1], Tensor)
    return function in (torch.gru, torch.rnn_tanh, torch.rnn_relu) and isinstance(args[2], Tensor)


@functools.cache
def _opened(function: FunctionType) -> FunctionType:
    """A function of PyTorch's that does not ask whether it is watched: those that it calls are."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


# --- recurrent layers -----------------------------------------------------------------------------------------


def _lstm_step(gates: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], biases: bool) -> tuple[Tensor, ...]:
    hidden, cell = state
    gates = gates + F.linear(hidden, weights[1], weights[3] if biases else None)
    inward, forget, new, outward = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + inward.sigmoid() * new.tanh()
    hidden = outward.sigmoid() * cell.tanh()
    if len(weights) in (3, 5):  # projected to fewer
        hidden = F.linear(hidden, weights[-1])
    return hidden, cell


def _gru_step(gates: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], biases: bool) -> tuple[Tensor, ...]:
    (hidden,) = state
    reset, update, new = gates.chunk(3, -1)
    old_reset, old_update, old = F.linear(hidden, weights[1], weights[3] if biases else None).chunk(3, -1)
    new = (new + (reset + old_reset).sigmoid() * old).tanh()
    return (new + (update + old_update).sigmoid() * (hidden - new),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(gates: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], biases: bool) -> tuple[Tensor, ...]:
        return (activation(gates + F.linear(state[0], weights[1], weights[3] if biases else None)),)

    return step


def _direction(
    step: Step, x: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], biases: bool, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer over time, first dimension of x, in one direction: all hidden states and the last state."""
    gates = F.linear(x, weights[0], weights[2] if biases else None).unbind(0)
    outputs = []
    for now in reversed(gates) if backwards else gates:
        state = step(now, state, weights, biases)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _recurrent(step: Step, single: bool) -> Callable[..., Any]:
    """A recurrent function of PyTorch's; `single`: its state is one tensor, not a tuple."""

    def run(x: Tensor, hx: Any, *rest: Any) -> Any:
        params, biases, layers, dropout, train, both, batch_first = rest
        x = x.transpose(0, 1) if batch_first else x
        states = [state.unbind(0) for state in ((hx,) if single else hx)]
        each = len(params) // (layers * (1 + both))
        lasts = []
        for layer in range(layers):
            outputs = []
            for backwards in (False, True)[: 1 + both]:
                place = layer * (1 + both) + backwards
                weights = list(params[place * each : (place + 1) * each])
                state = tuple(values[place] for values in states)
                output, last = _direction(step, x, state, weights, biases, backwards)
                outputs.append(output)
                lasts.append(last)
            x = torch.cat(outputs, -1) if both else outputs[0]
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout, True)
        final = [torch.stack(values) for values in zip(*lasts, strict=True)]
        return (x.transpose(0, 1) if batch_first else x), *final

    return run


def _cell(step: Step, single: bool) -> Callable[..., Any]:
    def run(x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        biases = b_ih is not None
        weights = [w_ih, w_hh, b_ih, b_hh] if biases else [w_ih, w_hh]
        state = step(F.linear(x, w_ih, b_ih), (hx,) if single else tuple(hx), weights, biases)
        return state[0] if single else state

    return run


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with what is learned about pairs of positions added to it."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    products = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = (products + attn_mask).softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


_PARTS: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _recurrent(_lstm_step, False),
    torch.gru: _recurrent(_gru_step, True),
    torch.rnn_tanh: _recurrent(_plain_step(torch.tanh), True),
    torch.rnn_relu: _recurrent(_plain_step(torch.relu), True),
    torch.lstm_cell: _cell(_lstm_step, False),
    torch.gru_cell: _cell(_gru_step, True),
    torch.rnn_tanh_cell: _cell(_plain_step(torch.tanh), True),
    torch.rnn_relu_cell: _cell(_plain_step(torch.relu), True),
}
