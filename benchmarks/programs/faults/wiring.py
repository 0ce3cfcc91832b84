"""Graphs that are cut, a mode that is wrong, memory that is kept."""

from __future__ import annotations

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    is_in,
    turns,
)
from programs.setup import Setup


@fault("detached_graph", also=(*SLOW, "frozen_layers", "optimizer_missing_params"), num=7, where=turns("cut"))
def _detached(s: Setup, level: int) -> None:
    s.options["cut"] = True


@fault(
    "eval_mode_training",
    also=("overfitting", *SLOW, *BROKEN),
    num=5,
    where=is_in("normed_mlp", "normed_cnn", "resnet"),
    outcome="always",
)
def _eval_mode(s: Setup, level: int) -> None:
    s.eval_mode = True


@fault("memory_leak", also=(), num=5, outcome="memory", where=lambda _a, t: t.name != "policy")
def _leak(s: Setup, level: int) -> None:
    s.keep = True
    s.batch = 128
