"""Every series of a run against an oracle's: what is missing, extra, at a wrong step or different. Reads a run only as
a user does, through `sonde.open(...).stats("*")` and `.scalars("*")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from oracle import Key, Oracle
from tally import EXACT, ROUNDED, Expected, Tally

FROM_HISTOGRAM = ("hist_n", "fp16_underflow_fraction", "below_fp16_normal")
WITHOUT_REFERENCE = frozenset({*(f"abs_q{q}" for q in ("01", "05", "25", "50", "75", "95", "99")), "dynamic_range"})
"""Of a large tensor these are of a sample, which is not the oracle's."""
KINDS = ("param", "grad", "update", "optim", "act")
OWN_SCALARS = ("lr", "grad_norm", "max_norm")
"""Endings of the names below `optim/` that are always compared."""
Schedule = Callable[[str, int], bool]


@dataclass
class Comparison:
    """What differs, in words, and how much was compared."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Kinds that were recorded and have no reference."""
    num_series: int = 0
    num_values: int = 0

    @property
    def problems(self) -> list[str]:
        return [*self.missing, *self.extra, *self.different]

    def __str__(self) -> str:
        lines = [f"{self.num_values:,} values of {self.num_series:,} series compared, {len(self.problems)} problems"]
        for name in ("missing", "extra", "different"):
            found = getattr(self, name)
            lines += [f"{name}: {line}" for line in found[:20]]
            lines += [f"... {len(found) - 20} more {name}"] if len(found) > 20 else []
        return "\n".join(lines)


def always(kind: str, step: int) -> bool:
    """Every kind at every step: what the default schedule promises for the first 100 steps."""
    return True


def compare(
    run: Any, oracle: Oracle, *, promised: Schedule = always, kinds: Iterable[str] = KINDS, scalars: Iterable[str] = ()
) -> Comparison:
    """Each recorded row must be right, and each row that `promised(kind, step)` must be there.

    `scalars` names scalars that must be exactly those given to `oracle.log`; learning rates and the norms that clipping
    saw are always compared.
    """
    result = Comparison()
    kinds = tuple(kinds)
    found = pc.unique(pc.cast(pa.table(run.stats("*/*/n")).column("kind"), pa.string())).to_pylist()
    result.not_compared = sorted(set(found) - set(kinds))
    recorded = _recorded(run, kinds, oracle.measures)
    tallies = {key: tally for key, tally in oracle.tallies.items() if key[0] in kinds}
    counted = {key for key in oracle.counted if key[0] in kinds}
    _presence(result, recorded.keys() | _counted(run, kinds, oracle.measures), tallies.keys() | counted, promised)
    for key, stats in recorded.items():
        if key in tallies:
            _row(result, key, stats, _expected(key[0], tallies[key], oracle.more.get(key, {}), stats))
    _scalars(result, run, oracle, {*scalars, *(name for name, _ in oracle.scalars)})
    result.num_series = len({(kind, site, stat) for (kind, site, _), stats in recorded.items() for stat in stats})
    return result


def _recorded(run: Any, kinds: tuple[str, ...], measures: Callable[[int], bool]) -> dict[Key, dict[str, float]]:
    rows: dict[Key, dict[str, float]] = {}
    table = pa.table(run.stats("*"))
    steps = [step for step in pc.unique(table.column("step")).to_pylist() if measures(step)]
    table = table.filter(pc.is_in(table.column("step"), value_set=pa.array(steps, pa.int64())))
    # Numpy first: Arrow makes its Python objects one by one.
    columns = [table.column(name).to_pandas().tolist() for name in ("kind", "site", "step", "stat", "value")]
    for kind, site, step, stat, value in zip(*columns, strict=True):
        if kind in kinds:
            row = rows.setdefault((kind, site, step), {})
            assert stat not in row, f"two values of {kind}/{site}/{stat} at step {step}"
            row[stat] = value
    return rows


def _counted(run: Any, kinds: tuple[str, ...], measures: Callable[[int], bool]) -> set[Key]:
    """Rows of the steps that are not measured."""
    table = pa.table(run.stats("*/*/n"))
    columns = [table.column(name).to_pandas().tolist() for name in ("kind", "site", "step")]
    return {key for key in zip(*columns, strict=True) if key[0] in kinds and not measures(key[2])}


def _presence(result: Comparison, recorded: AbstractSet[Key], expected: AbstractSet[Key], promised: Schedule) -> None:
    absent = [key for key in expected if key not in recorded and promised(key[0], key[2])]
    result.missing += _by_site(absent)
    result.extra += _by_site(key for key in recorded if key not in expected)


def _by_site(keys: Iterable[Key]) -> list[str]:
    steps: dict[str, list[int]] = {}
    for kind, site, step in keys:
        steps.setdefault(f"{kind}/{site}", []).append(step)
    return [f"{name} at steps {_short(found)}" for name, found in sorted(steps.items())]


def _short(steps: list[int]) -> str:
    return f"{', '.join(map(str, sorted(steps)[:8]))}{' …' if len(steps) > 8 else ''} ({len(steps)} in all)"


def _expected(kind: str, tally: Tally, more: dict[str, Expected], stats: dict[str, float]) -> dict[str, Expected]:
    expected = tally.stats(element=ROUNDED if kind == "update" else EXACT)
    # Only gradients are clipped; of no elements there is no number.
    factor = Expected(1.0 if tally.num_finite else math.nan, EXACT)
    expected |= {"norm_preclip": expected["norm"], "clip_factor": factor} | more
    # A histogram is of a sample; of a small tensor it is of all elements.
    if stats.get("hist_n") == tally.n:
        expected |= tally.histogram_stats()
    return expected


def _row(result: Comparison, key: Key, stats: dict[str, float], expected: dict[str, Expected]) -> None:
    kind, site, step = key
    for stat, (value, tolerance) in expected.items():
        if stat not in stats:
            if not math.isnan(value):
                result.missing.append(f"{kind}/{site}/{stat} at step {step}")
            continue
        result.num_values += 1
        if not _equal(stats[stat], value, tolerance):
            result.different.append(f"{kind}/{site}/{stat} at step {step}: recorded {stats[stat]!r}, is {value!r}")
    unknown = stats.keys() - expected.keys() - WITHOUT_REFERENCE - set(FROM_HISTOGRAM)
    result.extra += [f"{kind}/{site}/{stat} at step {step}" for stat in sorted(unknown)]


def _equal(recorded: float, expected: float, tolerance: float) -> bool:
    if math.isnan(expected) or math.isnan(recorded):
        return math.isnan(expected) and math.isnan(recorded)
    return recorded == expected or abs(recorded - expected) <= tolerance


def _is_own(name: str) -> bool:
    return name.startswith("optim/") and name.rpartition("/")[2] in OWN_SCALARS


def _scalars(result: Comparison, run: Any, oracle: Oracle, names: set[str]) -> None:
    table = run.scalars("*")
    columns = [table.column(name).to_pylist() for name in ("name", "step", "value")]
    recorded: dict[tuple[str, int], float] = {}
    for name, step, value in zip(*columns, strict=True):
        if name in names or _is_own(name):
            if (name, step) in recorded and _is_own(name):  # a trainer may log the same name twice
                result.extra.append(f"scalar {name} at step {step}: a second value")
            recorded[name, step] = value
    for (name, step), (value, tolerance) in oracle.scalars.items():
        if (name, step) not in recorded:
            result.missing.append(f"scalar {name} at step {step}")
            continue
        result.num_values += 1
        if not _equal(recorded[name, step], value, tolerance):
            result.different.append(f"scalar {name} at step {step}: recorded {recorded[name, step]!r}, is {value!r}")
    result.extra += [f"scalar {name} at step {step}" for name, step in recorded if (name, step) not in oracle.scalars]
