"""Overfitting: how the validation loss follows the training loss, and where they diverge."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnose.measures.loss import MIN_POINTS, HeldOut, held_out, loss_name, validation_name
from sonde.schema.window import Window
from sonde.show.analyses.analysis import Analysis, Chart, Quantity, Tone, known, line
from sonde.show.plot.axes import spans_decades
from sonde.show.term.number import counted

TITLE: Final = "Overfitting"
RISEN: Final = 1.15
"""A validation loss above its best times this factor has turned upwards ..."""
MANY_POINTS: Final = 4_000
GAP: Final = 1.5
"""... and above the training loss times this factor, it is too high. The rule of `sonde diagnose` is stricter."""


def overfitting(window: Window) -> Analysis:
    """Compare the training and the validation loss."""
    name = validation_name(window)
    if name is None:
        verdict = (
            "No validation loss was logged, so overfitting cannot be checked. Log one regularly: "
            'sonde.log({"val/loss": value}).'
        )
        return Analysis(key="overfitting", title=TITLE, tone="unknown", verdict=verdict)
    _, values = window.get(name)
    state = held_out(_thinned(window))
    if state is None:
        verdict = _why_not(name, int(np.isfinite(values).sum()))
        return Analysis(
            key="overfitting", title=TITLE, tone="unknown", verdict=verdict, charts=_charts(window, name, None)
        )
    tone, verdict = _judge(name, state)
    quantities = (
        Quantity("validation, best", state.best, "lowest validation loss"),
        Quantity("best step", state.best_step, "step of the lowest validation loss", is_step=True),
        Quantity("validation, end", state.end, "validation loss at the end"),
        Quantity("training, end", state.train, "training loss at the end"),
        Quantity("gap", known(state.gap), "validation loss / training loss at the end"),
        Quantity("rise", known(state.turn), "validation loss at the end / its best"),
        Quantity("accuracy", known(state.accuracy), "typical validation accuracy, if it was logged"),
    )
    charts = _charts(window, name, state.best_step)
    return Analysis(key="overfitting", title=TITLE, tone=tone, verdict=verdict, quantities=quantities, charts=charts)


def _thinned(window: Window) -> Window:
    """Take evenly spaced values of long scalars, including the last: running medians are slow and need no more."""
    strides = {name: max(1, len(values) // MANY_POINTS) for name, (_, values) in window.scalars.items()}
    scalars = {
        name: (steps[:: -strides[name]][::-1], values[:: -strides[name]][::-1])
        for name, (steps, values) in window.scalars.items()
    }
    return Window(window.series, scalars, window.facts)


def _why_not(name: str, num_finite: int) -> str:
    if num_finite < MIN_POINTS:
        return f"{name} has {counted(num_finite, 'finite value')}; judging it needs at least {MIN_POINTS}."
    return (
        f"{name} cannot be compared with the training loss, which is missing, non-finite at the end, or summed over "
        "a different number of samples."
    )


def _judge(name: str, state: HeldOut) -> tuple[Tone, str]:
    times = f"{state.gap:.3g} times the training loss" if np.isfinite(state.gap) else "at a training loss of zero"
    if state.turn > RISEN and state.gap > GAP:
        turned = (
            f"{name} was best at step {state.best_step:,} ({state.best:.4g}) and has risen to {state.end:.4g} since"
        )
        return "bad", f"{turned}, {times}: training beyond that step does not generalise. Stop there, or regularise."
    if state.turn > RISEN:
        risen = f"{name} has risen from {state.best:.4g} at step {state.best_step:,} to {state.end:.4g}"
        return "watch", f"{risen}, but is still close to the training loss."
    if state.gap > GAP:
        return (
            "watch",
            f"{name} ends at {state.end:.4g}, {times}, and is not rising: training still improves it.",
        )
    return "good", f"{name} follows the training loss: it ends at {state.end:.4g}, {times}."


def _charts(window: Window, name: str, best: int | None) -> tuple[Chart, ...]:
    train = loss_name(window)
    names = [one for one in (train, name) if one is not None]
    columns = {one: window.get(one) for one in names}
    marks = ((best, "best validation"),) if best is not None else ()
    lines = tuple(line(one, *column) for one, column in columns.items())
    is_log = spans_decades([values for _, values in columns.values()])
    return (Chart(title="training and validation loss", lines=lines, is_log=is_log, marks=marks),)
