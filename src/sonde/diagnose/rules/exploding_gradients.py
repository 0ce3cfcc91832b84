"""Gradients grow without bound: over time compared with the start, or over depth from the output to the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import loss_name
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.sketch import Array
from sonde.schema.window import Window

GROWN: Final = 1e3
"""Gradient norm relative to the first steps; healthy runs reach about 30."""
STEEP: Final = 1e3
"""Gradient of the first layer divided by that of the last, each relative to its weights; healthy up to 3.3."""
JUMP: Final = 30.0
"""Growth from one layer's largest output to the next layer's."""
BLOWN_UP: Final = 1e6
"""Largest output of a layer relative to the first layer's."""
LASTING: Final = 3
"""Minimum number of steps; a single bad batch is not an explosion."""


@rule(
    is_measured=True,
    severity="warning",
    needs=("grad/*/norm_preclip", "grad/*/nonfinite_fraction", "param/*/norm", "act/*/max_abs"),
    causes=("loss_spikes", "loss_oscillation", "clip_too_tight", "dead_relu", "saturated_activations"),
    references=("Pascanu et al. 2013", "AUTOTRAINER, Zhang et al. 2021"),
)
def exploding_gradients(window: Window) -> Iterator[Found]:
    """Gradients grow until updates are useless or values overflow."""
    sites = [weight.name for weight in path(window)] or sorted(
        {name.site for name in window.names("grad/*/norm_preclip")}
    )
    if (blown := _blown_up(window)) is not None:
        yield _forward(window, *blown)
        return
    steps, norms = _matrix(window, sites)
    if norms.shape[1] < 5:
        return
    total = np.sqrt((norms**2).sum(axis=0))
    step = _grown_at(steps, total)
    if step is not None:
        yield _over_time(window, sites, steps, total, norms, step)
    elif (where := _steep_at(window, sites, norms)) is not None:
        yield _over_depth(window, sites, steps, where)


def _matrix(window: Window, sites: list[str]) -> tuple[NDArray[np.int64], Array]:
    """Steps and gradient norms, with inf where a gradient is non-finite."""
    columns = [(site, *window.get(f"grad/{site}/norm_preclip")) for site in sites]
    columns = [column for column in columns if len(column[1])]
    if not columns:
        return np.empty(0, np.int64), np.empty((0, 0))
    steps = columns[0][1]
    rows = []
    for site, own, values in columns:
        if not np.array_equal(own, steps):
            continue
        bad = window.get(f"grad/{site}/nonfinite_fraction")[1]
        rows.append(np.where(bad > 0, np.inf, values) if len(bad) == len(values) else values)
    norms = np.stack(rows)
    norms[np.isnan(norms)] = np.inf
    return steps, norms


def _grown_at(steps: NDArray[np.int64], total: Array) -> int | None:
    """The step since which gradients stayed a thousand times larger than at the start, or became non-finite."""
    start = total[: min(5, len(total))]
    level = float(np.median(start[np.isfinite(start)])) if np.isfinite(start).any() else np.nan
    if not level > 0:
        return None
    high = (total > GROWN * level) & np.isfinite(total)
    ended = not np.isfinite(total[-1])
    # Large for a while, or growing up to the first non-finite value.
    runs = np.convolve(high, np.ones(LASTING, int), "valid") >= LASTING if len(high) >= LASTING else np.zeros(0, bool)
    is_lasting = runs.any() and bool(high[-max(5, len(high) // 10) :].mean() > 0.5 or ended)
    rising = ended and np.isfinite(total).sum() >= 3 and float(total[np.isfinite(total)].max()) > GROWN * level
    if not is_lasting and not rising:
        return None
    return int(steps[np.flatnonzero(high)[0]])


def _steep_at(window: Window, sites: list[str], norms: Array) -> tuple[str, float] | None:
    """The layer whose gradient, relative to its weight, is a thousand times that of the last layer at the start."""
    if len(norms) < 3 or len(norms) != len(sites):
        return None
    early = norms[:, : min(10, norms.shape[1])]
    weights = [window.get(f"param/{site}/norm")[1] for site in sites]
    if not all(len(weight) and weight[0] > 0 for weight in weights):
        return None
    relative = np.median(early, axis=1) / np.asarray([weight[0] for weight in weights])
    front, back = relative[: len(relative) // 2], relative[-1]
    if not np.isfinite(relative).all() or not back > 0 or front.max() < STEEP * back:
        return None
    return sites[int(front.argmax())], float(front.max() / back)


def _blown_up(window: Window) -> tuple[int, str, str, float] | None:
    """(step, first layer, last layer, growth) where outputs grow from layer to layer until they are non-finite.

    A division by zero causes one jump; an explosion causes several.
    """
    loss = _loss(window)
    if not len(loss) or np.isfinite(loss[-1]):
        return None
    grid = window.grid("act/*/max_abs")
    order = [m.name for m in structure(window).in_order if m.is_leaf and m.name in grid.sites]
    if len(order) < 4:
        return None
    values = np.stack([grid.row(name) for name in order])
    for column, step in zip(values.T, grid.steps, strict=True):
        known = np.flatnonzero(np.isfinite(column) & (column > 0))
        if len(known) < 3:
            continue
        sizes = column[known]
        num_jumps = int((sizes[1:] > JUMP * sizes[:-1]).sum())
        top = int(sizes.argmax())
        if num_jumps >= 2 and sizes[top] > BLOWN_UP * sizes[0]:
            return int(step), order[known[0]], order[known[top]], float(sizes[top] / sizes[0])
    return None


def _loss(window: Window) -> Array:
    name = loss_name(window)
    return window.get(name)[1] if name is not None else np.empty(0)


def _forward(window: Window, step: int, first: str, last: str, growth: float) -> Found:
    return Found(
        f"Values, and with them gradients, explode from layer to layer at step {step:,}: the outputs of {last} are "
        f"{number(growth)} times those of {first}, and then end as NaN or infinity.",
        step=step,
        confidence=0.8,
        sites=[last],
        evidence=[Evidence(f"act/{last}/max_abs", growth, "below 100", step, "largest output / the first layer's")],
        remedy=_remedy(window),
    )


def _over_time(
    window: Window, sites: list[str], steps: NDArray[np.int64], total: Array, norms: Array, step: int
) -> Found:
    finite = total[np.isfinite(total)]
    level, top = float(np.median(finite[:5])), float(finite.max())
    at = int(np.searchsorted(steps, step))
    worst = [sites[i] for i in np.argsort(-norms[:, at])[:3]]
    end = "" if np.isfinite(total[-1]) else ", and end as NaN or infinity"
    return Found(
        f"Gradients have exploded since step {step:,}: they reach {number(top / level)} times their starting norm, "
        f"most of all in {worst[0]}{end}.",
        step=step,
        confidence=0.75,
        sites=worst,
        evidence=[
            Evidence(
                f"grad/{worst[0]}/norm_preclip", top / level, "below 30", step, "gradient norm / its starting value"
            )
        ],
        remedy=_remedy(window),
    )


def _over_depth(window: Window, sites: list[str], steps: NDArray[np.int64], where: tuple[str, float]) -> Found:
    site, ratio = where
    return Found(
        f"Gradients have been exploding towards the input {since(int(steps[0]))}: relative to its weights, the "
        f"gradient of {site} is {number(ratio)} times that of {sites[-1]}.",
        step=int(steps[0]),
        confidence=0.7,
        sites=[site],
        evidence=[
            Evidence(
                f"grad/{site}/norm_preclip", ratio, "0.2 to 3.3", int(steps[0]), "first layer's gradient / the last's"
            )
        ],
        remedy=_remedy(window),
    )


def _remedy(window: Window) -> str:
    rate = structure(window).group_value("lr")
    has_rate = isinstance(rate, int | float) and rate
    lower = f" Lower the learning rate: `lr={one_digit(rate / 10)}` (now {number(rate, 3)})." if has_rate else ""
    return (
        "Clip gradients before `optimizer.step()`: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`."
        f"{lower} Initialise with `nn.init.kaiming_normal_`, and avoid activations that grow faster than their input."
    )
