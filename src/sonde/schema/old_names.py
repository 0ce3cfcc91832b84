"""Names from earlier versions, and their current names. The only such table: to rename something, add a line.

Runs, YAML files, variables and scripts keep an old name for as long as they exist. Readers translate it, and nothing
writes it. A chain of renames is not followed: when a name changes again, its old lines change too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SETTINGS: Final[Mapping[str, str]] = {
    "finite": "check_finite",
    "system": "system_metrics",
    "diagnose": "live_rules",
}
"""Settings: in YAML files, as keywords, and in capitals as variables (`SONDE_FINITE`)."""

REMOVED_SETTINGS: Final[Mapping[str, str]] = {"free_steps": "budget_seconds"}
"""Settings that are still accepted and have no effect, and the setting to use instead."""

SETTING_VALUES: Final[Mapping[str, Mapping[str, str]]] = {"mode": {"on": "enabled"}}
"""Values of settings, by the current name of the setting."""

STATS: Final[Mapping[str, str]] = {
    "norm_raw": "norm_preclip",
    "kurtosis_proxy": "rms_over_abs_mean",
    "below_fp16": "fp16_underflow_fraction",
}
"""Stats of a sketch. They are derived on reading; on disk only the evidence of findings names them."""

INSPECTED_STATS: Final[Mapping[tuple[str, str], str]] = {
    ("unit", "carry"): "skip_gain",
    ("unit", "rank_of"): "rank_max",
}
"""Stats that inspections store as scalars `kind/site/stat`, by kind and stat: a user's scalars are left alone."""

SCALARS: Final[Mapping[str, str]] = {"model/model/fingerprint": "model/weights/fingerprint"}
"""Scalars, by their whole name."""

_OLD_STATS: Final = {new: tuple(old for old in STATS if STATS[old] == new) for new in STATS.values()}
_OLD_INSPECTED: Final = {(kind, new): old for (kind, old), new in INSPECTED_STATS.items()}
_OLD_SCALARS: Final = {new: old for old, new in SCALARS.items()}


def current_stat(name: str) -> str:
    """The current name of a stat.

    >>> current_stat("norm_raw"), current_stat("norm")
    ('norm_preclip', 'norm')
    """
    return STATS.get(name, name)


def old_stats(name: str) -> tuple[str, ...]:
    """Earlier names of a stat.

    >>> old_stats("norm_preclip"), old_stats("norm")
    (('norm_raw',), ())
    """
    return _OLD_STATS.get(name, ())


def current_scalar(name: str) -> str:
    """The current name of a scalar, or of a pattern over scalars that ends in a stat.

    >>> current_scalar("unit/blocks.0/carry"), current_scalar("unit/*/rank_of"), current_scalar("mine/carry")
    ('unit/blocks.0/skip_gain', 'unit/*/rank_max', 'mine/carry')
    """
    head, _, stat = name.rpartition("/")
    inspected = INSPECTED_STATS.get((name.partition("/")[0], stat))
    return f"{head}/{inspected}" if inspected and head.count("/") == 1 else SCALARS.get(name, name)


def old_scalar(name: str) -> str | None:
    """The earlier name of a scalar; None if it was never renamed.

    >>> old_scalar("unit/blocks.0/skip_gain"), old_scalar("loss")
    ('unit/blocks.0/carry', None)
    """
    head, _, stat = name.rpartition("/")
    inspected = _OLD_INSPECTED.get((name.partition("/")[0], stat))
    return f"{head}/{inspected}" if inspected and head.count("/") == 1 else _OLD_SCALARS.get(name)
