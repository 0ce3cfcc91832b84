"""Kind `unit`: activity of the channels of each layer, from module calls and from functions called inside modules."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.probe.model import ModelNames, ModuleRef, is_in_part
from sonde.probe.outputs import floating_tensors, is_plain_tensor
from sonde.probe.structure import kind_of
from sonde.reduce.inspect import units as reduce
from sonde.reduce.inspect.weights import extent, product_rank, product_ratio, stable_rank
from sonde.session.inspect.lora import Adapter, find_adapters
from sonde.session.inspect.rotation import RoundRobin

Values = dict[str, Tensor | float | int]

_RELU_LIKE: Final = (nn.ReLU, nn.ReLU6, nn.Threshold)
_BOUNDED: Final = (nn.Tanh, nn.Sigmoid)
# Norms are left out: the layer before them shows the same dead units.
_RANKED: Final = frozenset({"activation", "linear", "conv", "embedding", "rnn"})
_NEVER_ZERO: Final = ("NativeLayerNorm", "FusedRmsNorm", "Gelu", "Tanh", "Sigmoid", "Silu", "Elu")
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_CALLS: Final = 4
"""Calls of one module in one forward pass whose dead units are recorded separately."""
_MAX_RANK_WIDTH: Final = 1024
_MAX_SITES: Final = 32
"""Layers, and weights, whose spread is measured in one inspection; large models take turns."""
RARELY: Final = 5
"""The expensive numbers are measured at every n-th inspection, including the first."""


def readable(tensor: object) -> bool:
    return (
        is_plain_tensor(tensor)
        and isinstance(tensor, Tensor)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and tensor.ndim > 0
        and tensor.numel() > 0
    )


class UnitInspection:
    """Fills `values`; between inspections it keeps only masks of silent units."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self._silent: dict[str, reduce.SilentUnits] = {}
        self._layers, self._weights = RoundRobin(_MAX_SITES), RoundRobin(_MAX_SITES)
        self._matrices = RoundRobin(_MAX_SITES // 2)
        self._inspection = 0
        self._is_channels_first = True
        self._inner: list[tuple[ModuleRef, weakref.ref[Tensor], str, Tensor]] = []
        """Saturation inside a module that may be a hand-written activation: not known until the module returns."""

    def begin(self, inspection: int) -> None:
        self._inspection = inspection
        self._inner.clear()

    # ---------------------------------------------------------------------------------------------------------- modules

    def pass_through(self, module: nn.Module) -> None:
        """Follow the layout of the values from module to module, whether they are inspected or not."""
        kind = kind_of(module)
        if kind in ("linear", "conv"):
            self._is_channels_first = kind == "conv"
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            self._is_channels_first = True

    def module_called(
        self, values: Values, place: ModuleRef, module: nn.Module, args: Any, output: Any, call: int
    ) -> None:
        kind = kind_of(module)
        self._settle(values, place, output)
        first = args[0] if isinstance(args, tuple) and args else None
        outputs = floating_tensors(output)
        out = outputs[0][1] if outputs and readable(outputs[0][1]) else None
        is_layer = kind in ("linear", "conv") and call < _MAX_CALLS
        if is_layer and isinstance(first, Tensor) and readable(first) and _may_be_dead(first):
            self._dead(values, place.name, "input_dead", call, first, _channel_dim(module, kind, first, False))
        if out is None:
            return
        dim = _channel_dim(module, kind, out, self._is_channels_first)
        if isinstance(module, _RELU_LIKE) and call < _MAX_CALLS:
            self._dead(values, place.name, "dead", call, out, dim)
        if call:
            return
        if isinstance(module, _BOUNDED) and isinstance(first, Tensor) and readable(first):
            values[f"unit/{place.name}/saturated"] = reduce.saturated(first)
        is_ranked = kind in _RANKED or place.ref() is self.names.model()
        if is_ranked and self._layers.is_due(place.name, self._inspection):
            self._spread(values, place.name, module, kind, out, dim)

    def _spread(self, values: Values, site: str, module: nn.Module, kind: str, out: Tensor, dim: int) -> None:
        if out.ndim < 2:
            return
        rows = reduce.rank_rows(out, dim)
        if len(rows) >= 2:
            values[f"unit/{site}/rank"] = reduce.effective_rank(rows)
            values[f"unit/{site}/rank_max"] = min(len(rows) - 1, rows.shape[1])
        if kind == "embedding" or (isinstance(module, nn.RNNBase) and not module.batch_first):
            return  # the first dimension is not, or not certainly, the batch
        if out.shape[0] >= 2:
            values[f"unit/{site}/batch_std"] = reduce.batch_std(out)

    def _dead(self, values: Values, site: str, stat: str, call: int, tensor: Tensor, dim: int) -> None:
        if tensor.ndim < 2:
            return
        name = f"unit/{site}/{stat}"
        silent = self._silent.setdefault(name, reduce.SilentUnits())
        silent.add(call, reduce.is_silent(tensor, dim))
        values[name] = silent.share()

    # -------------------------------------------------------------------------------------------------------- functions

    def function_called(
        self, values: Values, name: str, place: ModuleRef, site: str, argument: Any, out: Tensor
    ) -> None:
        module = place.ref()
        if module is None or isinstance(module, (*_RELU_LIKE, *_BOUNDED)):
            return  # its own call is recorded
        if name == "relu":
            if readable(out):
                dim = 1 if out.ndim >= 4 or (out.ndim == 3 and self._is_channels_first) else out.ndim - 1
                self._dead(values, site, "dead", 0, out, dim)
        elif isinstance(argument, Tensor) and readable(argument):
            share = reduce.saturated(argument)
            if module._modules or module._parameters:
                values[f"unit/{site}/saturated"] = share
            else:
                self._inner.append((place, weakref.ref(out), site, share))

    def _settle(self, values: Values, place: ModuleRef, output: Any) -> None:
        """A module that returns the output of tanh is a tanh; one that computes further with it (a GELU by hand) is
        not."""
        for inner in [inner for inner in self._inner if inner[0] is place]:
            self._inner.remove(inner)
            if inner[1]() is output:
                values[f"unit/{inner[2]}/saturated"] = inner[3]

    # ---------------------------------------------------------------------------------------------------------- weights

    def weights(self, values: Values, part: tuple[int, int], *, is_rare: bool) -> None:
        """Measure this part of the parameters as they are now, before the optimizer changes them."""
        adapters = find_adapters(self.names) if is_rare else []
        in_adapters = {name for adapter in adapters for name in (adapter.a_name, adapter.b_name)}
        number = -1
        for named in self.names.parameters.values():
            weight = named.ref()
            if weight is None or not named.is_selected or not readable(weight) or weight.ndim < 2:
                continue
            number += 1
            if not is_in_part(number, part):
                continue
            if self._inspection == 0 and not weight.requires_grad and weight.is_contiguous() and weight.numel():
                values[f"unit/{named.name}/frozen_rms"], values[f"unit/{named.name}/frozen_max"] = extent(weight)
            # An embedding table has no units; neither does a single row, such as a learned token.
            if "Embedding" in named.module_type or not weight.requires_grad or weight.shape[0] < 2:
                continue
            if self._weights.is_due(named.name, self._inspection):
                values[f"unit/{named.name}/row_spread"] = reduce.row_spread(weight)
            is_small = weight.ndim == 2 and max(weight.shape) <= _MAX_RANK_WIDTH and named.name not in in_adapters
            if is_rare and is_small and self._matrices.is_due(named.name, self._inspection // RARELY):
                values[f"unit/{named.name}/row_rank"] = stable_rank(weight)
        for number, adapter in enumerate(adapters):
            if is_in_part(number, part):
                _adapter(values, adapter)


def _may_be_dead(tensor: Tensor) -> bool:
    """Whether it comes from a layer (data does not) that can produce exact zeros."""
    made_by = tensor.grad_fn
    return made_by is not None and not type(made_by).__name__.startswith(_NEVER_ZERO)


def _adapter(values: Values, adapter: Adapter) -> None:
    """Numbers of the product are recorded under the name of its last factor."""
    tensors = adapter.tensors()
    if tensors is not None and all(readable(tensor) for tensor in tensors):
        a, b, base = tensors
        values[f"unit/{adapter.b_name}/row_rank"] = product_rank(b, a)
        values[f"unit/{adapter.b_name}/adapter_ratio"] = product_ratio(b, a, base)


def _channel_dim(module: nn.Module, kind: str, tensor: Tensor, is_channels_first: bool) -> int:
    """The dimension of the units: dim 1 for images, the last one for everything else."""
    last = tensor.ndim - 1
    if isinstance(module, nn.modules.conv._ConvNd):
        return max(0, last - len(module.kernel_size))
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return min(1, last)
    if kind in ("linear", "norm", "embedding", "rnn") or tensor.ndim < 3:
        return last
    return 1 if is_channels_first else last
