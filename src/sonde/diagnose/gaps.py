"""What rules could not look at because it was not recorded: a silence of theirs then means nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sonde.diagnose.measures.progress import loss_name, validation
from sonde.diagnose.rule import Rule
from sonde.schema.window import Window


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that is not in the record, what cannot be told without it, and how to have it next time."""

    what: str
    hides: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        return {"what": self.what, "hides": self.hides, "remedy": self.remedy}


def _has(*patterns: str) -> Callable[[Window], bool]:
    return lambda window: any(window.names(pattern) for pattern in patterns)


_GAPS: Final[tuple[tuple[Callable[[Window], bool], Gap], ...]] = (
    (lambda w: loss_name(w) is not None, Gap("the loss", "whether it learns", 'sonde.log({"loss": loss})')),
    (
        lambda w: len(validation(w)[0]) > 0,
        Gap("a validation loss", "overfitting", 'sonde.log({"val_loss": val_loss})'),
    ),
    (_has("grad"), Gap("gradients", "how they flow", "sonde.watch(model, optimizer)")),
    (
        _has("update/*/ratio", "update/*/norm"),
        Gap("updates", "what the optimizer does", "sonde.watch(model, optimizer)"),
    ),
    (_has("act"), Gap("activations", "what units do", "sonde.watch(model, activations=True)")),
    (
        _has("unit", "attn", "rnn", "data", "model"),
        Gap("inspections", "data, dead units, attention", "sonde.watch(model, inspect=True)"),
    ),
)


def gaps(window: Window) -> list[Gap]:
    """What was not recorded, most important first."""
    return [gap for is_there, gap in _GAPS if not is_there(window)]


def blind(window: Window, rules: Iterable[Rule]) -> list[str]:
    """Rules of whose series not one is there."""
    return [rule.name for rule in rules if rule.needs and not any(window.names(need) for need in rule.needs)]
