"""The refined coordinate check (Haas et al. 2025, arXiv 2505.22491): how much of a layer's change is its own doing.

For a layer with weights W the change of its output since initialisation splits into

    W_t x_t - W_0 x_0  =  (W_t - W_0) x_t  +  W_0 (x_t - x_0)
                          effective            propagating

In a parametrisation that transfers over widths (muP) both stay of the same size as the model gets wider.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.batch import LossFunction, call, forward
from sonde.flow.monitor import ModuleMonitor
from sonde.flow.preserve import preserved
from sonde.schema.names import strip_wrappers

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTED: Final = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.Bilinear)
WEIGHTED_BY_NAME: Final = ("Conv1D",)
"""Linear layers of other libraries that are no `nn.Linear`."""
FLAT: Final = 0.15
"""A slope of the logarithms smaller than this is no trend."""
Verdict = Literal["stable", "grows", "vanishes", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Root mean squares of one layer's parts."""

    name: str
    type: str
    effective: float
    """(W_t - W_0) x_t"""
    propagating: float
    """W_0 (x_t - x_0)"""
    total: float
    """W_t x_t - W_0 x_0"""
    output: float
    """W_0 x_0"""
    input: float
    """x_t"""
    input_change: float
    """x_t - x_0"""


def refined_coordinate_check(model: nn.Module, reference: nn.Module, x: Any) -> list[Coordinate]:
    """Split each layer's change since `reference` (a copy made at initialisation) on one batch. Both stay as they were.

    reference = copy.deepcopy(model)
    train(model)
    refined_coordinate_check(model, reference, x)
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_slow_path())
        for each in (model, reference):
            stack.enter_context(preserved(each, training=False))
        now, then = _calls(model, x), _calls(reference, x)
        modules = {strip_wrappers(name): module for name, module in reference.named_modules()}
        found = []
        for name, calls in now.items():
            if name not in then or len(then[name]) != len(calls):
                raise UsageError(f"the two models differ: {name} was called {len(calls)} times in one of them.")
            module = modules[name.removesuffix(IN_PROJ)]
            parts = [split(module, a, b) for a, b in zip(calls, then[name], strict=True)]
            found.append(_coordinate(name, type(module).__name__, parts))
    return found


@contextmanager
def _slow_path() -> Iterator[None]:
    """torch's fused encoder layer passes its own modules by, hooks and all."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def is_weighted(module: nn.Module) -> bool:
    return isinstance(module, WEIGHTED) or type(module).__name__ in WEIGHTED_BY_NAME


IN_PROJ: Final = ".in_proj"
"""The joint projection of `nn.MultiheadAttention` to queries, keys and values, which is no module."""
_Call = tuple[tuple[Tensor, ...], Tensor]


def _calls(model: nn.Module, x: Any) -> dict[str, list[_Call]]:
    """Input and output of every weighted module."""
    seen: dict[str, list[_Call]] = {}
    names = {id(module): strip_wrappers(name) for name, module in model.named_modules()}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is None or not args:
            return
        given = tuple(a.detach().clone() for a in args if isinstance(a, Tensor))
        if is_weighted(module) and isinstance(output, Tensor):
            seen.setdefault(name, []).append((given, output.detach().clone()))
        elif isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            seen.setdefault(name + IN_PROJ, []).append((given[:1], _applied(module, given[:1])))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        call(model, x)
    finally:
        handle.remove()
    return seen


def _applied(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """A layer's output, past the hooks of whoever watches."""
    if isinstance(module, nn.MultiheadAttention):
        assert module.in_proj_weight is not None
        return nn.functional.linear(given[0], module.in_proj_weight, module.in_proj_bias)
    output: Tensor = type(module).forward(module, *given)
    return output


def split(before: nn.Module, now: _Call, then: _Call) -> dict[str, Tensor]:
    """The parts as tensors, from one more pass of the old layer over the new input."""
    (given_now, y_now), (given_then, y_then) = now, then
    mixed = _applied(before, given_now)
    x_now, x_then = given_now[0], given_then[0]
    same_kind = x_now.is_floating_point()
    return {
        "effective": y_now - mixed,
        "propagating": mixed - y_then,
        "total": y_now - y_then,
        "output": y_then,
        "input": x_now if same_kind else torch.zeros(1),
        "input_change": x_now - x_then if same_kind else torch.zeros(1),
    }


def _coordinate(name: str, type_name: str, parts: list[dict[str, Tensor]]) -> Coordinate:
    rms = {key: math.sqrt(np.mean([float(p[key].double().square().mean()) for p in parts])) for key in parts[0]}
    return Coordinate(name=name, type=type_name, **rms)


class RefinedCoordinateCheck:
    """The same inside a training loop, on what a monitor with a reference saw in this step."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        if monitor.reference is None:
            raise UsageError("the coordinate check needs a reference:  monitor.set_reference_module(reference)")
        self.monitor = monitor
        monitor.keeps_calls = True

    def refined_coordinate_check(self) -> None:
        """Log the parts of every weighted layer; to be called after the forward passes of both models."""
        monitor = self.monitor
        if not monitor.is_monitoring or monitor.reference is None:
            return
        modules = {monitor.format_name(name): module for name, module in monitor.reference.named_modules()}
        with torch.no_grad(), monitor.no_monitor():
            found = list(self._parts(modules))
        for name, parts in found:
            for title, key in _TITLES.items():
                monitor.log_tensor(f"RCC {title}/{name}/l2norm", parts[key].float().flatten(1).norm(dim=-1))

    def _parts(self, modules: dict[str, nn.Module]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, calls in self.monitor.calls.items():
            module, others = modules.get(name), self.monitor.reference_calls.get(name, [])
            if module is None or not is_weighted(module):
                continue
            for now, then in zip(calls, others, strict=False):
                if now.inputs and then.inputs and isinstance(now.output, Tensor):
                    yield name, split(module, (now.inputs, now.output), (then.inputs, then.output))


_TITLES: Final = {
    "(W_t-W_0)x_t": "effective",
    "W_0(x_t-x_0)": "propagating",
    "x_t": "input",
    "(x_t-x_0)": "input_change",
}


# ------------------------------------------------------------------------------------------------------ over widths


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a part of a layer's change goes with the width: value ~ width**slope."""

    layer: str
    part: str
    slope: float
    error: float
    """Half the width of the 95 % interval of the slope."""
    verdict: Verdict
    widths: tuple[int, ...]
    values: tuple[float, ...]
    """Mean over seeds, per width."""


@dataclass(frozen=True, slots=True)
class CoordinateReport:
    """Trends of all layers."""

    trends: tuple[Trend, ...]

    @property
    def is_stable(self) -> bool:
        """Whether nothing grows with the width."""
        return not any(trend.verdict == "grows" for trend in self.trends)

    def get(self, layer: str, part: str = "effective") -> Trend:
        for trend in self.trends:
            if (trend.layer, trend.part) == (layer, part):
                return trend
        known = sorted({trend.layer for trend in self.trends})
        raise KeyError(f"no layer {layer!r}; there are {', '.join(known)}")

    def __str__(self) -> str:
        lines = [f"{'layer':32} {'part':12} {'slope':>14}  verdict"]
        for t in self.trends:
            lines.append(f"{t.layer:32} {t.part:12} {t.slope:+7.2f} ± {t.error:4.2f}  {t.verdict}")
        return "\n".join(lines)

    def save_svg(self, path: str | Path) -> Path:
        """A picture: one small chart per layer, value over width, both logarithmic."""
        from sonde.flow.coordinate_picture import save_svg

        return save_svg(self, path)


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    batches: Callable[[int], Iterator[tuple[Any, Any]]] | tuple[Any, Any],
    loss_fn: LossFunction | None,
    make_optimizer: Callable[[nn.Module, int], torch.optim.Optimizer] | None = None,
    steps: int = 4,
    seeds: int = 3,
    parts: Sequence[str] = ("effective", "propagating"),
) -> CoordinateReport:
    """Train models of several widths for a few steps, and see what grows with the width.

    `make_model(width)`; `batches` is a batch (x, y), or a function of the seed that gives an iterator of batches;
    `make_optimizer(model, width)` is Adam with lr 1e-3 unless given.
    """
    if len(set(widths)) < 2:
        raise UsageError(f"a trend needs at least two widths; got {list(widths)}.")
    rows: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with torch.random.fork_rng():
        for seed in range(seeds):
            for width in widths:
                for coordinate in _trained(make_model, width, batches, loss_fn, make_optimizer, steps, seed):
                    for part in parts:
                        rows.setdefault((coordinate.name, part), []).append((width, getattr(coordinate, part)))
    trends = [_trend(layer, part, points) for (layer, part), points in rows.items()]
    return CoordinateReport(tuple(trend for trend in trends if trend is not None))


def _trained(
    make_model: Any, width: int, batches: Any, loss_fn: Any, make_optimizer: Any, steps: int, seed: int
) -> list[Coordinate]:
    torch.manual_seed(seed)
    model = make_model(width)
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(model, width) if make_optimizer else torch.optim.Adam(model.parameters(), lr=1e-3)
    given = batches(seed) if callable(batches) else _repeat(batches)
    x: Any = None
    for _ in range(steps):
        x, y = next(given)
        optimizer.zero_grad()
        _, loss = forward(model, x, y, loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return refined_coordinate_check(model, reference, x)


def _repeat(batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    while True:
        yield batch


def _trend(layer: str, part: str, points: list[tuple[int, float]]) -> Trend | None:
    """Least squares of the logarithms; the interval is Student's."""
    positive = [(w, v) for w, v in points if v > 0 and math.isfinite(v)]
    if len({w for w, _ in positive}) < 2:
        return None
    x, y = np.log2([w for w, _ in positive]), np.log2([v for _, v in positive])
    centred = x - x.mean()
    slope = float((centred * y).sum() / (centred**2).sum())
    rest = y - y.mean() - slope * centred
    freedom = len(x) - 2
    error = _STUDENT.get(freedom, 1.97) * math.sqrt((rest**2).sum() / max(freedom, 1) / (centred**2).sum())
    widths = tuple(sorted({w for w, _ in positive}))
    values = tuple(float(np.mean([v for w, v in positive if w == width])) for width in widths)
    return Trend(
        layer=layer, part=part, slope=slope, error=error, verdict=_verdict(slope, error), widths=widths, values=values
    )


def _verdict(slope: float, error: float) -> Verdict:
    if slope - error > FLAT:
        return "grows"
    if slope + error < -FLAT:
        return "vanishes"
    return "stable" if abs(slope) + error < 3 * FLAT else "unclear"


# 97.5 % quantiles of Student's distribution.
_STUDENT: Final = {
    0: 12.7, 1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 12: 2.18,
    13: 2.16, 14: 2.14, 15: 2.13, 16: 2.12, 18: 2.10, 20: 2.09, 22: 2.07, 25: 2.06, 28: 2.05,
}  # fmt: skip
