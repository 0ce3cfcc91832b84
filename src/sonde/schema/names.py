"""Names of kinds, sites and series: parse, format, match, and strip wrapper prefixes. Knows no model and no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.old_names import current_scalar, current_stat, old_scalar, old_stats

Kind = Literal["param", "grad", "update", "act", "actgrad", "optim", "attn", "custom"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_DATA_SITES: Final = frozenset({"input", "target", "output", "loss", "batch"})
_OF_WEIGHTS: Final = "weights/fingerprint"
INSPECTED: Final = ("unit", "attn", "rnn", "data", "model")
"""Kinds of the numbers that inspections add: stored as scalars, named like series (`unit/layers.3.act/dead`)."""

# Wrappers add these to a name, at the start or in the middle; the user never wrote them.
_INNER_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_flat_param")
_LEADING_WRAPPERS: Final = ("module.", "base_model.model.")
_MAYBE_WRAPPED: Final = re.compile("|".join((*_INNER_WRAPPERS, "^module", "^base_model")))
# "%" is escaped too, so that two different names never become one; invisible and direction-changing characters, so that
# a name looks like what it is.
_UNSAFE: Final = re.compile(r"[%/\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class Series(NamedTuple):
    """One number over steps: `grad/layers.3.mlp.weight/rms`."""

    kind: str
    site: str
    stat: str

    def __str__(self) -> str:
        return "/".join(self)


def parse_series(text: str) -> Series:
    """Split `kind/site/stat`.

    >>> parse_series("grad/layers.3.mlp.weight/rms").site
    'layers.3.mlp.weight'
    """
    parts = text.split("/")
    if len(parts) != 3 or not all(parts):
        raise UsageError(f'a series name is "kind/site/stat", such as "grad/layers.3.mlp.weight/rms"; got "{text}".')
    return Series(*parts)


def is_inspection(name: str) -> bool:
    """Whether a scalar was recorded for the rules. There are hundreds of them: views that list scalars leave them out.

    >>> is_inspection("data/input/std"), is_inspection("data/loss"), is_inspection("val/loss")
    (True, False, False)
    """
    kind, _, rest = name.partition("/")
    if kind not in INSPECTED or rest.count("/") != 1:
        return False
    site = rest.partition("/")[0]
    return {"data": site in _DATA_SITES, "model": site == "model" or rest == _OF_WEIGHTS}.get(kind, True)


def inspected_series(name: str) -> Series | None:
    """The series of a scalar's name, if an inspection could have added it.

    >>> inspected_series("unit/layers.3.act/dead")
    Series(kind='unit', site='layers.3.act', stat='dead')
    >>> inspected_series("val/loss")
    """
    return Series(*name.split("/")) if is_inspection(name) else None


def current_series(name: str) -> str:
    """The current name of a series that earlier versions called differently: a stat of a sketch, or a scalar.

    >>> current_series("grad/0.weight/norm_raw"), current_series("model/model/fingerprint")
    ('grad/0.weight/norm_preclip', 'model/weights/fingerprint')
    """
    head, _, stat = name.rpartition("/")
    return f"{head}/{current_stat(stat)}" if name.partition("/")[0] in KINDS else current_scalar(name)


def is_setting(name: str) -> bool:
    """Whether a scalar is a hyperparameter that is set once and rarely changes, such as weight decay.

    >>> is_setting("optim/group1/weight_decay"), is_setting("optim/lr"), is_setting("loss")
    (True, False, False)
    """
    return name.startswith("optim/") and name.rpartition("/")[2] not in ("lr", "grad_norm", "max_norm", "loss_scale")


def strip_wrappers(name: str) -> str:
    """The name the user wrote: the same eager, compiled, under DDP, FSDP or PEFT.

    >>> strip_wrappers("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    if _MAYBE_WRAPPED.search(name) is None:  # as nearly all names are
        return name
    parts = [part for part in name.split(".") if part not in _INNER_WRAPPERS]
    stripped = ".".join(parts)
    while True:
        for prefix in _LEADING_WRAPPERS:
            if stripped.startswith(prefix):
                stripped = stripped[len(prefix) :]
                break
        else:
            return "" if stripped in ("module", "base_model.model", "base_model") else stripped


def site_name(name: str) -> str:
    """A name that is safe to store, show and split on "/": unsafe characters are percent-encoded, so names stay
    distinct.

    >>> site_name("heads.a/b")
    'heads.a%2Fb'
    """
    return _UNSAFE.sub(percent_encoded, name)


def percent_encoded(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode("utf-8", "surrogatepass"))


def unique_sites(names: Sequence[str]) -> list[str]:
    """Strip wrappers from all names, except if that would make two of them equal."""
    stripped = [strip_wrappers(name) for name in names]
    counts: dict[str, int] = {}
    for name in stripped:
        counts[name] = counts.get(name, 0) + 1
    return [site_name(short if counts[short] == 1 else full) for short, full in zip(stripped, names, strict=True)]


def as_code(site: str, root: str = "model") -> str:
    """The Python expression for a module or parameter.

    >>> as_code("blocks.0.mlp.fc1")
    'model.blocks[0].mlp.fc1'
    """
    return root + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in site.split(".") if part != root)


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a name; a name always matches itself, brackets or not.

    >>> matches("layers.*.mlp", "layers.3.mlp")
    True
    """
    return pattern == name or _regex(pattern).match(name) is not None


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the globs matches."""
    return any(matches(pattern, name) for pattern in patterns)


def matches_stat(pattern: str, stat: str) -> bool:
    """Whether a glob matches a stat by its name, or by its name in earlier versions.

    >>> matches_stat("norm_raw", "norm_preclip")
    True
    """
    return matches(pattern, stat) or any(matches(pattern, old) for old in old_stats(stat))


def matches_scalar(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the globs matches a scalar by its name, or by its name in earlier versions.

    >>> matches_scalar(["unit/*/carry"], "unit/blocks.0/skip_gain")
    True
    """
    old = old_scalar(name)
    return any(matches(pattern, name) or (old is not None and matches(pattern, old)) for pattern in patterns)


def split_pattern(pattern: str) -> Series:
    """A glob over series, part by part; an omitted part matches everything.

    >>> split_pattern("grad/*/norm")
    Series(kind='grad', site='*', stat='norm')
    >>> split_pattern("grad")
    Series(kind='grad', site='*', stat='*')
    """
    parts = pattern.split("/")
    if len(parts) > 3 or not all(parts):
        raise UsageError(f'a pattern is "kind/site/stat" with globs, such as "grad/layers.*/norm"; got "{pattern}".')
    kind, site, stat = (*parts, "*", "*")[:3]
    if not any(matches(kind, known) for known in (*KINDS, *INSPECTED)):
        raise UnknownNameError("kind", kind, KINDS)
    return Series(kind, site, stat)
