"""No window makes a rule raise or warn: cut short, with holes, of zeros, of infinities, without facts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import sonde
from faults.program import REGISTRY, Observer, programs, train
from sonde.diagnose.check import check
from sonde.schema.window import Column, Window

pytestmark = pytest.mark.slow


class Recorded(Observer):
    def start(self, model, optimizer, loss_fn, total_steps, val=None):  # type: ignore[no-untyped-def]
        self.session = sonde.init(project="robust", verbose=False).watch(model, optimizer)

    def before_step(self, step, batch):  # type: ignore[no-untyped-def]
        sonde.batch(*batch)

    def after_step(self, step, loss):  # type: ignore[no-untyped-def]
        sonde.log({"loss": loss})

    def validation(self, step, metrics):  # type: ignore[no-untyped-def]
        sonde.log(metrics)

    def finish(self) -> Window:
        sonde.finish()
        return sonde.open(self.session.path).window()


def spoiled(window: Window) -> Iterator[tuple[str, Window]]:
    random = np.random.default_rng(0)

    def each(change) -> tuple[dict, dict]:  # type: ignore[no-untyped-def, type-arg]
        def apply(column: Column) -> Column:
            return column[0], change(column[1].astype(float))

        return {k: apply(c) for k, c in window.series.items()}, {k: apply(c) for k, c in window.scalars.items()}

    for last in (-1, 0, 1, 2, 4, 7, 12, 20, 40, 80):
        yield f"up to step {last}", window.between(0, last)
    yield (
        "half of the series",
        Window({k: c for k, c in window.series.items() if random.random() < 0.5}, window.scalars, window.facts),
    )
    yield "half of the values", Window(*each(lambda v: np.where(random.random(len(v)) < 0.5, np.nan, v)), window.facts)
    for value in (np.nan, 0.0, np.inf, -1.0, 1e300):
        yield f"all {value}", Window(*each(lambda v, value=value: np.full(len(v), value)), window.facts)
    yield "without facts", Window(window.series, window.scalars, {})
    yield "without scalars", Window(window.series, {}, window.facts)
    yield "without series", Window({}, window.scalars, window.facts)


def chosen() -> list[str]:
    """One program of each file, healthy or not."""
    programs()
    by_file: dict[str, str] = {}
    for program in REGISTRY.values():
        by_file.setdefault(program.make.__module__.rpartition(".")[2], program.id)
    return sorted(by_file.values())


@pytest.mark.parametrize("name", chosen())
def test_no_window_makes_a_rule_raise_or_warn(name: str) -> None:
    window: Window = train(REGISTRY[name].build(0), Recorded())
    broken: list[str] = []
    for what, spoilt in spoiled(window):
        check(spoilt, on_error=lambda rule, error, what=what: broken.append(f"{rule}, {what}: {error!r}"))
    assert broken == []
