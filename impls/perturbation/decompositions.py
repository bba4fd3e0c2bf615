"""Attention and recurrent functions of torch, computed by calls of linear layers.

Each function here takes ``call(func, *args)``, which calls a function of torch with each member's parameters,
and then the arguments of the torch function that it stands for. It calls linear layers with rows first:
[rows, positions, features].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[..., Any]
_State = tuple[Tensor, ...]


def attention(  # noqa: PLR0913, PLR0917  torch's arguments
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,  # noqa: ARG001  that of the query
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,  # noqa: FBT001  torch's order
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,  # noqa: FBT001, FBT002  torch's order
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001, FBT002  torch's order
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: FBT001, FBT002  torch's order
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    **unused: object,  # noqa: ARG001  is_causal repeats what attn_mask says
) -> tuple[Tensor, Tensor | None]:
    """Compute ``torch.nn.functional.multi_head_attention_forward`` on [positions, rows, embed_dim].

    Self-attention projects its input once. Otherwise each of the inputs is projected to query, key and value,
    and only the part that is needed is used. Keys and values of other widths have weights of their own.
    """
    inputs = query, key, value
    if in_weight is None:
        biases = (None,) * 3 if in_bias is None else call(Tensor.chunk, in_bias, 3)
        weights_of_parts = q_proj_weight, k_proj_weight, v_proj_weight
        projections = [
            call(functional.linear, x.transpose(0, 1), weight, bias)
            for x, weight, bias in zip(inputs, weights_of_parts, biases, strict=True)
        ]
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in projections)
    else:
        projected: dict[int, tuple[Tensor, ...]] = {}
        for x in inputs:
            if id(x) not in projected:
                y = call(functional.linear, x.transpose(0, 1), in_weight, in_bias)
                projected[id(x)] = y.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = (projected[id(x)][part] for part, x in enumerate(inputs))
    mask = _additive_mask(q, k, key_padding_mask, attn_mask)
    added = [_expand_to_heads(call, bias, k) for bias in (bias_k, bias_v) if bias is not None]
    if added:  # a learned key and value after those of the positions
        k, v = (torch.cat(pair, 2) for pair in zip((k, v), added, strict=True))
    if add_zero_attn:
        k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if mask is not None:
        mask = functional.pad(mask, (0, k.shape[2] - mask.shape[-1]))
    dropout = dropout if training else 0.0
    weights = None
    if need_weights:
        scores = (q / q.shape[-1] ** 0.5) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        heads_out = functional.dropout(weights, dropout) @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        heads_out = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
    joined = heads_out.transpose(1, 2).flatten(2)
    return call(functional.linear, joined, out_weight, out_bias).transpose(0, 1), weights


def _expand_to_heads(call: Call, bias: Tensor, k: Tensor) -> Tensor:
    """Return a parameter [1, 1, embed_dim] for each row of keys [rows, heads, ...], [rows, heads, 1, ...]."""
    rows, heads = k.shape[:2]
    y: Tensor = call(Tensor.expand, bias, 1, rows, bias.shape[2])
    return y.transpose(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2).to(k.dtype)


def _additive_mask(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> Tensor | None:
    """Return the sum of the masks as numbers to add to scores [rows, heads, queries, keys], or None."""
    rows, heads, queries, _ = q.shape
    total: Tensor | None = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dim() == 2 else attn_mask.view(rows, heads, queries, -1)  # noqa: PLR2004  axes of queries and keys
        total = _as_numbers(mask, q)
    if key_padding_mask is not None:
        padding = _as_numbers(key_padding_mask, q).view(rows, 1, 1, k.shape[2])
        total = padding if total is None else total + padding
    return total


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers: -inf where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in autocast's dtype, where it is enabled, as it casts the arguments of a function."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _lstm_step(inputs: Tensor, hidden: Tensor, state: _State) -> _State:
    enter, keep, new, out = (inputs + hidden).chunk(4, -1)
    cell = keep.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru_step(inputs: Tensor, hidden: Tensor, state: _State) -> _State:
    reset_x, update_x, new_x = inputs.chunk(3, -1)
    reset_h, update_h, new_h = hidden.chunk(3, -1)
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (new + (state[0] - new) * (update_x + update_h).sigmoid(),)  # lerp() needs equal dtypes


def _tanh_step(inputs: Tensor, hidden: Tensor, state: _State) -> _State:  # noqa: ARG001  no other state
    return ((inputs + hidden).tanh(),)


def _relu_step(inputs: Tensor, hidden: Tensor, state: _State) -> _State:  # noqa: ARG001  no other state
    return ((inputs + hidden).relu(),)


_Step = Callable[[Tensor, Tensor, _State], _State]
"""The products of input and hidden state, and the state -> the next state; a state is (h,) or (h, c)."""


def _recurrent(step: _Step) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function that stands for ``torch.lstm``, ``torch.gru`` or those of plain RNNs."""

    def run(  # noqa: PLR0913, PLR0917  torch's arguments
        call: Call,
        x: Tensor,
        initial: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,  # noqa: FBT001  torch's order
        layers: int,
        dropout: float,
        training: bool,  # noqa: FBT001  torch's order
        bidirectional: bool,  # noqa: FBT001  torch's order
        batch_first: bool = False,  # noqa: FBT001, FBT002  torch's order
    ) -> tuple[Tensor, ...]:
        if not isinstance(has_biases, bool):  # the arguments are those for a packed sequence
            message = (
                "a packed sequence mixes the rows of members: pass a padded tensor, and read each row's "
                "output at its last position"
            )
            raise ValueError(message)  # noqa: TRY004  as for other inputs
        states = [initial] if isinstance(initial, Tensor) else [*initial]
        y = x if batch_first else x.transpose(0, 1)
        linear = partial(call, functional.linear)
        has_projection = states[0].shape[-1] != states[-1].shape[-1]  # of an LSTM's output, not of its cell
        if x.device.type != "cpu" or (step is _lstm_step and not has_projection):
            y, *states = as_autocast(y, *states)  # on a CPU, autocast casts those of no other function
        count, directions = (4 if has_biases else 2) + has_projection, 1 + bidirectional
        finals: list[_State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                in_weight, hidden_weight, *others = weights[index * count : (index + 1) * count]
                in_bias, hidden_bias = others[:2] if has_biases else (None, None)
                inputs = linear(y, in_weight, in_bias)
                state: _State = tuple(part[index] for part in states)
                hidden: list[Tensor] = []
                for products in inputs.flip(1).unbind(1) if direction else inputs.unbind(1):
                    state = step(products, linear(state[0], hidden_weight, hidden_bias), state)
                    if has_projection:
                        state = linear(state[0], others[-1], None), *state[1:]
                    hidden.append(state[0])
                outputs.append(torch.stack(hidden[::-1] if direction else hidden, 1))
                finals.append(state)
            y = torch.cat(outputs, -1)
            if layer < layers - 1:
                y = functional.dropout(y, dropout, training)
        return (y if batch_first else y.transpose(0, 1), *map(torch.stack, zip(*finals, strict=True)))

    return run


def _cell(step: _Step) -> Callable[..., Tensor | _State]:
    """Return the function that stands for ``torch.lstm_cell``, ``torch.gru_cell`` or those of plain cells."""

    def run(  # noqa: PLR0913, PLR0917  torch's arguments
        call: Call,
        x: Tensor,
        initial: Tensor | Sequence[Tensor],
        in_weight: Tensor,
        hidden_weight: Tensor,
        in_bias: Tensor | None = None,
        hidden_bias: Tensor | None = None,
    ) -> Tensor | _State:
        state = (initial,) if isinstance(initial, Tensor) else tuple(initial)
        if x.device.type != "cpu":  # on a CPU, autocast does not cast them
            x, *states = as_autocast(x, *state)
            state = tuple(states)
        linear = partial(call, functional.linear)
        products = linear(x, in_weight, in_bias), linear(state[0], hidden_weight, hidden_bias)
        after = step(*products, state)
        return after if len(after) > 1 else after[0]

    return run


def _normalized_weight(call: Call, direction: Tensor, size: Tensor, dim: int = 0) -> Tensor:
    """Compute ``torch._weight_norm``, for which torch.vmap warns that it is slow."""
    # With one more axis, as a norm over no axis would be over all.
    axes = [axis for axis in range(direction.dim() + 1) if axis != dim]
    column = call(Tensor.unsqueeze, direction, -1)
    norm = call(torch.linalg.vector_norm, column, 2, axes, True)  # noqa: FBT003  torch's order
    weight: Tensor = call(torch.mul, direction, call(torch.div, size, call(Tensor.squeeze, norm, -1)))
    return weight


DECOMPOSITIONS: dict[Callable[..., object], Callable[..., object]] = {
    functional.multi_head_attention_forward: attention,
    torch._weight_norm: _normalized_weight,  # noqa: SLF001  what weight_norm() calls
    torch.lstm: _recurrent(_lstm_step),
    torch.gru: _recurrent(_gru_step),
    torch.rnn_tanh: _recurrent(_tanh_step),
    torch.rnn_relu: _recurrent(_relu_step),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_tanh_step),
    torch.rnn_relu_cell: _cell(_relu_step),
}
"""For each function of torch, the function that computes it from others."""
