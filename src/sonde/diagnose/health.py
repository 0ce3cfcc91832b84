"""A health score from 0 to 100 for each layer and for the run, at every step. Scale-free: see docs/diagnose.md.

A layer's score is 100 times the product of factors between 0 and 1, one for each kind of problem. Every factor is a
fraction or a ratio of like quantities, so neither the scale of the loss nor the size of the model affects it. Values
that were not measured do not lower the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.measures.curves import held
from sonde.diagnose.measures.loss import loss_name
from sonde.diagnose.measures.model import structure
from sonde.schema.sketch import Array
from sonde.schema.window import Grid, Window

RUN: Final = ""
"""The site of the whole run: no layer can have this name."""
NO_LAYER: Final = "/"
"""The owner of sites that belong to no layer."""
REQUIRED_SERIES: Final = (
    *("grad/*/norm", "param/*/norm", "update/*/norm", "act/*/zero_fraction"),
    *("grad/*/nonfinite_fraction", "param/*/nonfinite_fraction", "act/*/nan_fraction"),
)
"""Patterns of the series that the scores are computed from."""

# For each value: where it begins to lower the score, and where the factor reaches 0.
PROFILE_DECADES: Final = (2.0, 5.0)
"""How far a layer's gradient, relative to its weight, may be from the median of all layers."""
UPDATE_RATIO_DECADES: Final = (-1.0, 1.0)
"""log10 of update norm / weight norm: a tenth of the weight in one step, and ten times the weight."""
ZERO_SHARE: Final = (0.9, 1.0)
DEAD_SHARE: Final = (0.5, 1.0)
SATURATED_SHARE: Final = (0.5, 1.0)
NONFINITE_FACTOR: Final = 0.1
"""The factor for a single non-finite value, before the non-finite fraction is taken into account."""
SEVERITY_FACTORS: Final = {Severity.INFO: 1.0, Severity.WARNING: 0.6, Severity.CRITICAL: 0.3}
"""The factor for a finding with full confidence, at the steps it covers; info findings do not lower the score."""

FINE: Final = 80.0
POOR: Final = 50.0
"""A score of at least FINE is healthy, one below POOR is critical; web/ uses the same numbers."""

BANDS: Final = {Severity.WARNING: (POOR, FINE), Severity.CRITICAL: (0.0, POOR)}
"""The scores of a run while it has a finding of this severity; without one they are between FINE and 100."""
MOST_LEFT: Final = 0.99
"""The largest factor of a finding, however low its confidence: a band does not contain its upper end."""

Steps = NDArray[np.int64]
Owner = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Health:
    """Scores by site and step; NaN before a site was first measured."""

    steps: Steps
    sites: tuple[str, ...]
    """The whole run first, then the layers in the order in which they were first measured."""
    scores: Array
    """(sites, steps)"""

    @property
    def last(self) -> float:
        """The run's latest score; NaN when nothing was measured."""
        return float(self.scores[0, -1]) if self.scores.size else np.nan


def grade(score: float) -> Severity:
    """The severity of a score, by which views colour it."""
    return Severity.INFO if score >= FINE else Severity.WARNING if score >= POOR else Severity.CRITICAL


def health(window: Window, findings: Iterable[Finding] = ()) -> Health:
    """Compute the health of each layer and of the run at every step."""
    steps = _steps(window)
    if not len(steps):
        return Health(steps, (RUN,), np.empty((1, 0)))
    owner_of = _owners(window)
    layers: dict[str, Array] = {}
    for layer, own_steps, factor in _factors(window, owner_of):
        if layer != NO_LAYER:
            aligned = _aligned(steps, own_steps, factor)
            layers[layer] = _times(layers[layer], aligned) if layer in layers else aligned
    measured = np.stack(list(layers.values())) if layers else np.ones((1, len(steps)))
    severe = [f for f in findings if f.severity > Severity.INFO]
    run = _in_band(_whole(measured), severe, steps) * _loss_factor(window, steps)
    scores = [run, *(own * _finding_factor(_about(severe, name), steps) for name, own in layers.items())]
    return Health(steps, (RUN, *layers), 100.0 * np.stack(scores))


def health_by(findings: Sequence[Finding], window: Window, known: Health, known_by: Sequence[Finding]) -> Health:
    """The health by these findings; `known` if it was computed from the same severe ones."""
    is_same = _severe(findings) == _severe(known_by)
    return known if is_same else health(window, findings)


def _severe(findings: Iterable[Finding]) -> set[tuple[object, ...]]:
    return {(f.rule, f.sites, f.severity, f.step) for f in findings if f.severity > Severity.INFO}


# ---------------------------------------------------------------------------------------------------------- the factors


def _factors(window: Window, owner_of: Owner) -> Iterator[tuple[str, Steps, Array]]:
    """Yield (layer, steps, factor) for everything that was measured."""
    for pattern, bounds in (
        ("act/*/zero_fraction", ZERO_SHARE),
        ("unit/*/dead", DEAD_SHARE),
        ("unit/*/saturated", SATURATED_SHARE),
    ):
        for site, steps, share in window.by_site(pattern):
            yield owner_of(site), steps, falling(share, bounds)
    for pattern in ("grad/*/nonfinite_fraction", "param/*/nonfinite_fraction", "act/*/nan_fraction"):
        for site, steps, share in window.by_site(pattern):
            yield owner_of(site), steps, _finite(share)
    grads, params, updates = (
        _by_layer(window.grid(f"{kind}/*/norm"), owner_of) for kind in ("grad", "param", "update")
    )
    yield from _rows(grads, profile_factor(grads, params))
    yield from _rows(updates, update_factor(updates, params))


def falling(value: Array, bounds: tuple[float, float]) -> Array:
    """1 up to the first bound, 0 from the second bound, linear in between; NaN stays NaN.

    >>> falling(np.array([0.2, 0.75, 1.0]), (0.5, 1.0)).tolist()
    [1.0, 0.5, 0.0]
    """
    low, high = bounds
    return 1.0 - np.clip((value - low) / (high - low), 0.0, 1.0)


def _finite(share: Array) -> Array:
    """The factor for a non-finite fraction. A single value spoils every sum it enters, so the first one costs most."""
    return np.where(share > 0, NONFINITE_FACTOR * (1.0 - share), 1.0)


def profile_factor(grads: Grid, params: Grid) -> Array:
    """The factor for gradients that are far from the median layer's, each relative to its weight."""
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(grads.values / _grown(params, grads))
        middle = _median(np.where(np.isfinite(decades), decades, np.nan))
        return falling(np.abs(decades - middle), PROFILE_DECADES)  # if all are zero, there is no median and no factor


def update_factor(updates: Grid, params: Grid) -> Array:
    """The factor for updates too large for their weight. Small ones are healthy: learning rates decay to zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return falling(np.log10(updates.values / _grown(params, updates)), UPDATE_RATIO_DECADES)


def _grown(params: Grid, like: Grid) -> Array:
    """Weight norms; NaN while a weight still grows from zero, as adapters do: its first steps are rightly large."""
    weights = _reordered(params, like)
    return np.where((weights > 0) & (weights >= 0.5 * _median(weights.T)[:, None]), weights, np.nan)


def _loss_factor(window: Window, steps: Steps) -> Array:
    name = loss_name(window)
    if name is None:
        return np.ones(len(steps))
    own_steps, values = window.get(name)
    factor = _aligned(steps, own_steps, np.where(np.isfinite(values), 1.0, 0.0))
    return np.where(np.isnan(factor), 1.0, factor)


def _finding_factor(findings: Sequence[Finding], steps: Steps) -> Array:
    """The factor for findings at the steps they cover. Only the most severe counts: others often share its cause."""
    factor = np.ones(len(steps))
    for finding in findings:
        inside = _steps_of(finding, steps)
        left = 1.0 - finding.confidence * (1.0 - SEVERITY_FACTORS[finding.severity])
        factor[inside] = np.minimum(factor[inside], left)
    return factor


def _in_band(measured: Array, severe: Sequence[Finding], steps: Steps) -> Array:
    """The score of the run: what was measured decides only where it is within the band of its most severe finding.

    So a run without a finding is never graded as ill, and one with a finding never as well.
    """
    low, high = np.full(len(steps), FINE), np.full(len(steps), 100.0)
    for finding in sorted(severe, key=lambda finding: finding.severity.rank):
        inside = _steps_of(finding, steps)
        low[inside], high[inside] = BANDS[finding.severity]
    left = np.minimum(_finding_factor(severe, steps), np.where(low < FINE, MOST_LEFT, 1.0))
    scores: Array = (low + (high - low) * measured * left) / 100.0
    return scores


def _steps_of(finding: Finding, steps: Steps) -> NDArray[np.bool_]:
    """The recorded steps that a finding covers; if there is none between its first and last, the one closest to it."""
    inside: NDArray[np.bool_] = (steps >= finding.step) & (steps <= finding.last_step)
    if len(steps) and not inside.any():
        inside[min(int(np.searchsorted(steps, finding.step)), len(steps) - 1)] = True
    return inside


def _whole(layers: Array) -> Array:
    """The whole network's factor: half the mean of the layers, half the worst layer."""
    known = ~np.isnan(layers)
    num = known.sum(axis=0)
    mean = np.where(known, layers, 0.0).sum(axis=0) / np.maximum(num, 1)
    worst = np.where(known, layers, np.inf).min(axis=0)
    return np.where(num > 0, 0.5 * mean + 0.5 * worst, 1.0)


# ------------------------------------------------------------------------------------------------------ sites and steps


def _owners(window: Window) -> Owner:
    """The layer of each site: a parameter's module, an activation's own site, none for containers."""
    known = {p.name: p.owner for p in structure(window).parameters}
    parameters = {name.site for name in window.series if name.kind in ("param", "grad", "update")}
    sites = {name.site for name in window.series}
    # A parameter of the root module counts as its own layer.
    owners = {site: known.get(site) or site.rpartition(".")[0] or site for site in parameters}
    containers = {site[:end] for site in sites for end, sign in enumerate(site) if sign == "."} - {*owners.values()}
    if "model" not in containers:
        containers.add("model")  # the output of the whole model
    return lambda site: owners.get(site, NO_LAYER if site in containers else site)


def _by_layer(norms: Grid, owner_of: Owner) -> Grid:
    """One norm over all parameters of a layer, so that a bias whose gradient is rounding noise does not count."""
    rows: dict[str, list[int]] = {}
    for row, site in enumerate(norms.sites):
        rows.setdefault(owner_of(site), []).append(row)
    squares = norms.values**2
    known = ~np.isnan(squares)
    values = [
        np.where(known[own].any(axis=0), np.sqrt(np.where(known[own], squares[own], 0.0).sum(axis=0)), np.nan)
        for own in rows.values()
    ]
    return Grid(tuple(rows), norms.steps, np.stack(values) if values else np.empty((0, len(norms.steps))))


def _about(findings: Sequence[Finding], layer: str) -> list[Finding]:
    """Findings that name this layer, one of its parameters or a block that contains it."""
    return [f for f in findings if any(_touches(site, layer) for site in f.sites)]


def _touches(site: str, layer: str) -> bool:
    return site == layer or site.startswith(f"{layer}.") or layer.startswith(f"{site}.")


def _steps(window: Window) -> Steps:
    """Steps at which gradients, weights or activations were recorded."""
    columns = [window.grid(pattern).steps for pattern in REQUIRED_SERIES]
    return np.unique(np.concatenate(columns)) if columns else np.empty(0, np.int64)


def _rows(grid: Grid, factors: Array) -> Iterator[tuple[str, Steps, Array]]:
    for site, row in zip(grid.sites, factors, strict=True):
        yield site, grid.steps, row


def _reordered(source: Grid, like: Grid) -> Array:
    """Values of `source` at the sites and steps of `like`; NaN where it has none."""
    values = np.full(like.values.shape, np.nan)
    row_of = {site: row for row, site in enumerate(source.sites)}
    _, here, there = np.intersect1d(like.steps, source.steps, assume_unique=True, return_indices=True)
    for row, site in enumerate(like.sites):
        if site in row_of:
            values[row, here] = source.values[row_of[site], there]
    return values


def _aligned(steps: Steps, own_steps: Steps, values: Array) -> Array:
    """The latest known value at each step; NaN before the first."""
    known = ~np.isnan(values)
    return held(steps, own_steps[known], values[known])


def _times(a: Array, b: Array) -> Array:
    """The product, in which unknown values count as 1."""
    product = np.where(np.isnan(a), 1.0, a) * np.where(np.isnan(b), 1.0, b)
    return np.where(np.isnan(a) & np.isnan(b), np.nan, product)


def _median(values: Array) -> Array:
    """Median of each column without NaN; NaN where nothing is known."""
    if not values.size:
        return np.full(values.shape[1], np.nan)
    count = (~np.isnan(values)).sum(axis=0)
    ordered = np.sort(values, axis=0)  # NaN comes last
    columns = np.arange(values.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    middle = (ordered[low, columns] + ordered[np.minimum(high, len(values) - 1), columns]) / 2
    return np.where(count > 0, middle, np.nan)
