"""Recurrent layers of mlx-lm's models: our recurrences and convolutions, and rows packed into one flat sequence.

`install_recurrence` changes mlx-lm's modules once, when a model with states is loaded. A layer with `PackedStates` as
its cache sees the tokens of all rows as one row: its linear layers and norms take every token by itself, and the
functions here, which mix tokens, know the rows. A layer that mixes tokens by other means gives wrong numbers then,
which `learner.passes.packing.can_pack` sees.

Axes: M tokens, B rows, T tokens of a row, K width of a convolution.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models import ssm as mlx_lm_ssm
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from parallm.model.kernels.gated_delta_step import Gates
from parallm.model.kernels.recurrent import has_kernels
from parallm.model.patches.decode_step import install_decode_step, mlx_lm_normalize_qk, normalize_qk, token_by_kernel
from parallm.model.patches.forward import silu
from parallm.model.patches.kernel_trial import try_kernels
from parallm.model.recurrence.gated_delta import gated_delta, gated_delta_step
from parallm.model.recurrence.rows import PackedRows, padded_rows, rows_in_use, using, using_lengths, whole_rows
from parallm.model.recurrence.short_conv import ShortConv, is_short
from parallm.model.recurrence.ssd import ssd

_mlx_lm_gated_delta_update = mlx_lm_gated_delta.gated_delta_update
_mlx_lm_ssm_update = mlx_lm_ssm.ssm_update


class PackedStates:
    """The cache of a recurrent layer in a packed forward: keeps nothing."""

    lengths = None
    left_padding = None

    def __init__(self, rows: PackedRows, size: int) -> None:
        """`size` is the number of arrays that the layer keeps."""
        self.rows = rows
        self._size = size

    def __getitem__(self, index: int) -> None:
        if index >= self._size:
            raise IndexError(index)

    def __setitem__(self, index: int, array: mx.array) -> None:
        """Drop a state: the rows end with the forward."""

    def __len__(self) -> int:
        return self._size

    def advance(self, length: int) -> None:
        """Do nothing, as there is no padding."""

    def make_mask(self, length: int) -> None:
        """No mask, as there is no padding."""


class _Functions(ModuleType):
    """`mlx.nn` in models' modules, where silu of convolutions is ours."""

    silu = staticmethod(silu)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def has_states(base: nn.Module) -> bool:
    """Whether layers of a model keep states beside keys and values."""
    caches = make_prompt_cache(base)
    return any(type(part) is ArraysCache for cache in caches for part in getattr(cache, "caches", (cache,)))


def install_recurrence(base: nn.Module) -> None:
    """Let recurrent layers call our functions. Changes mlx-lm's modules; safe to repeat."""
    if not has_states(base):
        return
    try_kernels()
    replaced = {
        "gated_delta_update": (_mlx_lm_gated_delta_update, gated_delta_update),
        "ssm_update": (_mlx_lm_ssm_update, ssm_update),
        "normalize_qk": (mlx_lm_normalize_qk, normalize_qk),
        "nn": (nn, _Functions("nn")),
    }
    for name_of_module in {type(module).__module__ for module in base.modules()}:
        if name_of_module.startswith("parallm."):  # of layers that have a class of ours by now
            continue
        module = sys.modules[name_of_module]
        for name, (original, replacement) in replaced.items():
            if getattr(module, name, None) is original:
                setattr(module, name, replacement)
    for layer in base.modules():
        if type(layer) is nn.Conv1d and is_short(layer):
            layer.__class__ = ShortConv
            if mx.default_device() == mx.Device(mx.cpu):
                # channels beside each other in memory, as in what they are multiplied with
                layer.weight = mx.contiguous(layer.weight.transpose(1, 2, 0)).transpose(2, 0, 1)
    install_decode_step(base)
    for kind in _mixers(base):
        kind.__call__ = _over_packed_rows(kind.__call__)


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Stands in for mlx-lm's function of the same signature; rows with padding of unknown lengths, and one token of
    each row on Metal, are left to it."""
    rows = rows_in_use() or _rows_of(*q.shape[:2], has_padding=mask is not None)
    is_step = rows is None and mask is None and state is not None and q.shape[1] == 1
    if rows is None and not (is_step and not mx.metal.is_available()):
        result: tuple[mx.array, mx.array] = _mlx_lm_gated_delta_update(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state,
            mask,
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
        return result
    if is_step and has_kernels():
        gates = Gates(
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
        if (stepped := token_by_kernel(q, k, v, gates, state)) is not None:
            return stepped
    rate = mx.exp(A_log.astype(mx.float32))
    shifted = a.astype(mx.float32) + dt_bias
    log_a = -rate * nn.softplus(shifted) if lower_bound is None else lower_bound * mx.sigmoid(rate * shifted)
    beta = mx.sigmoid(b) * 2 if allow_neg_eigval else mx.sigmoid(b)
    if is_step:
        outputs, last = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], mx.exp(log_a[:, 0]), beta[:, 0], state)
        return outputs[:, None], last
    assert rows is not None
    q, k, flat_v, log_a, beta = (array.flatten(0, 1) for array in (q, k, v, log_a, beta))
    outputs, last = gated_delta(q, k, flat_v, log_a, beta, state, rows)
    return outputs.reshape(v.shape), last


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Stands in for mlx-lm's function of the same signature; one token, and rows with padding of unknown lengths, are
    left to it."""
    x = hidden_states
    rows = rows_in_use() or _rows_of(*x.shape[:2], has_padding=mask is not None or lengths is not None)
    if rows is None:
        result: tuple[mx.array, mx.array] = _mlx_lm_ssm_update(
            x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths
        )
        return result
    step = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *time_step_limit)
    log_a = -mx.exp(A_log.astype(mx.float32)) * step
    stepped, log_a, B, C = (array.flatten(0, 1) for array in (x * step[..., None], log_a, B, C))
    outputs, last = ssd(stepped, log_a, B, C, state, rows)
    return outputs.reshape(x.shape).astype(x.dtype) + x * D[:, None], last


@contextmanager
def padding(layers: Iterable[Any], lengths: Sequence[int], width: int) -> Iterator[None]:
    """Inside the block a forward of tokens (B, width) leaves in these caches the states after each row's own tokens."""
    states = [layer for layer in layers if isinstance(layer, ArraysCache)]
    for layer in states:
        layer.prepare(lengths=lengths)
    with using_lengths(lengths, width):
        yield
    for layer in states:
        layer.finalize()


def _rows_of(num_rows: int, length: int, *, has_padding: bool) -> PackedRows | None:
    """The rows of several tokens each, where their lengths are known."""
    if length == 1:
        return None
    return padded_rows(num_rows, length) if has_padding else whole_rows(num_rows, length)


def _mixers(base: nn.Module) -> set[type[nn.Module]]:
    """The classes of layers that take a cache, and contain none that does."""
    taking = [layer for layer in base.modules() if _takes_cache(layer)]
    outer = {type(layer) for layer in taking if sum(map(_takes_cache, layer.modules())) > 1}
    return {type(layer) for layer in taking} - outer


def _takes_cache(layer: nn.Module) -> bool:
    return "cache" in inspect.signature(type(layer).__call__).parameters


def _over_packed_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a layer's class, which with `PackedStates` sees its input (M, 1, ..) as one row."""
    if getattr(call, "sees_packed_rows", False):
        return call

    @wraps(call)
    def over_packed_rows(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        caches = [given for given in (*arguments, *options.values()) if isinstance(given, PackedStates)]
        if not caches:
            return call(layer, *arguments, **options)
        with using(caches[0].rows):
            turned = call(layer, *map(_turned, arguments), **{name: _turned(given) for name, given in options.items()})
        return _turned(turned)

    over_packed_rows.sees_packed_rows = True  # type: ignore[attr-defined]
    return over_packed_rows


def _turned(given: Any) -> Any:
    """(M, 1, ..) -> (1, M, ..) and back, if it is an array."""
    return given.swapaxes(0, 1) if isinstance(given, mx.array) else given
