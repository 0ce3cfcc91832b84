"""The residual stream from block to block, and the feed-forward part of each block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.flow.fetch import Gathered
from sonde.flow.model_index import ModelIndex, site_of, weight_of
from sonde.flow.trace import Trace
from sonde.probe.guards import quiet
from sonde.probe.model import ModuleRef
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.inspect.units import sampled_skip_gain, some_units

_UP: Final = re.compile(
    r"(^|\.)(fc1|up|up_proj|gate_proj|c_fc|linear1|lin1|wi|wi_0|dense_h_to_4h|w1|0|intermediate\.dense)$"
)
_DOWN: Final = re.compile(r"(^|\.)(fc2|down|down_proj|c_proj|linear2|lin2|wo|dense_4h_to_h|w2|2|3|output\.dense)$")


class Stream:
    """How much of its input each block of a list passes on, and the gradient at its output."""

    def __init__(self, anatomy: ModelIndex) -> None:
        self._names = anatomy.names
        self._attention = [part.layer for part in anatomy.attention]
        self._lists = [module for module in anatomy.modules if isinstance(module, nn.ModuleList | nn.Sequential)]
        self._blocks = {id(block) for blocks in self._lists for block in _blocks(blocks)}
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        """A sample of each block's input and output."""
        self._shares: dict[str, float] = {}
        self._asked: list[tuple[list[str], Gathered]] = []

    def called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._blocks or not args:
            return
        given, out = args[0], output[0] if isinstance(output, tuple) and output else output
        if is_plain_tensor(given) and is_plain_tensor(out) and given.shape == out.shape and given.ndim >= 2:
            # Copies: the block's tensors must not be kept, and a model may change them in place.
            took, gave = (some_units(tensor).to(torch.float32, copy=True) for tensor in (given, out))
            self._rows[place.name] = took, gave

    def ask(self) -> None:
        """Compute from the samples, blocks of one shape together. Does not wait."""
        groups: dict[tuple[torch.Size, torch.device], list[str]] = {}
        for name, (given, _) in self._rows.items():
            groups.setdefault((given.shape, given.device), []).append(name)
        with quiet():
            for names in groups.values():
                given, out = (torch.stack([self._rows[name][i] for name in names]) for i in (0, 1))
                self._asked.append((names, Gathered([sampled_skip_gain(given, out)])))
        self._rows.clear()

    def resolve(self) -> None:
        for names, gathered in self._asked:
            self._shares |= dict(zip(names, *gathered.numbers(), strict=True))
        self._asked.clear()

    def carry(self, names: Sequence[str]) -> dict[str, float]:
        return {name: self._shares[name] for name in names if name in self._shares}

    def residual(self, trace: Trace) -> tuple[tuple[str, float], ...]:
        """The residual stream: the longest run of blocks in a list, all of one shape of input and output, of which some
        hold attention. Stages of another width are another stream."""
        best: list[tuple[str, float]] = []
        for module in self._lists:
            runs: dict[tuple[int, ...], list[tuple[str, float]]] = {}
            attends = False
            for block in _blocks(module):
                place = self._names.place(block)
                grad = trace.get("actgrad", place.name) if place is not None else None
                stop = trace.stops.get(place.name) if place is not None else None
                if stop is not None and grad is not None and stop.input_shape == stop.output_shape:
                    runs.setdefault(stop.output_shape, []).append((stop.name, grad.norm))
                    attends = attends or any(f"{name}.".startswith(f"{stop.name}.") for name in self._attention)
            longest = max(runs.values(), key=len, default=[])
            if attends and len(longest) > max(len(best), 1):
                best = longest
        return tuple(best)


def _blocks(listed: nn.Module) -> Iterator[nn.Module]:
    """The modules of a list that hold others. An entry may be None: Informer's list of downsampling layers has some."""
    return (block for block in listed._modules.values() if block is not None and block._modules)


def feed_forward_pairs(anatomy: ModelIndex) -> dict[str, tuple[str, str]]:
    """Names of the weights that widen and narrow again, by the module that holds them."""
    found: dict[str, tuple[str, str]] = {}
    for module in anatomy.modules:
        place = anatomy.names.place(module) if module._modules else None
        if place is None:
            continue
        children = {name: weight for name, child in _layers_of(module) if (weight := weight_of(child)) is not None}
        wide = next((weight for name, weight in children.items() if _UP.search(name)), None)
        narrow = next((weight for name, weight in children.items() if _DOWN.search(name)), None)
        if wide is None or narrow is None or wide is narrow:
            continue
        if tuple(wide.shape) == tuple(narrow.shape)[::-1] and wide.shape[0] != wide.shape[-1]:
            found[place.name] = site_of(anatomy.names, wide), site_of(anatomy.names, narrow)
    return found


def _layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules of a module, and the two that BERT and similar models wrap once more."""
    yield from module.named_children()
    for wrapper in ("intermediate", "output"):
        inner = module._modules.get(wrapper)
        dense = inner._modules.get("dense") if inner is not None else None
        if dense is not None:
            yield f"{wrapper}.dense", dense


def feed_forward_ratios(pairs: dict[str, tuple[str, str]], trace: Trace) -> dict[str, float]:
    """Gradient/weight of the second over the first, if both have any."""
    found = {}
    for name, pair in pairs.items():
        first, second = (trace.weight_ratio(weight) for weight in pair)
        if first and second:
            found[name] = second / first
    return found
