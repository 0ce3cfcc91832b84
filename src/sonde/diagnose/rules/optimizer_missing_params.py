"""Parameters take part in training but are not in any optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, listed
from sonde.schema.window import Window

STALLED: Final = 0.3
"""Final loss as a fraction of its start; below it, an optimizer with only the head is transfer learning."""


@rule(
    severity="critical",
    causes=(
        "underfitting", "lr_too_low", "frozen_layers", "vanishing_gradients", "missing_zero_grad", "bottleneck_layer",
        "exploding_gradients", "qkv_imbalance", "label_shuffling", "detached_graph", "symmetric_init", "init_scale",
        "rank_collapse", "rnn_vanishing_temporal",
    ),
    references=("Jiang et al. 2025, TrainCheck",),
)  # fmt: skip
def optimizer_missing_params(window: Window) -> Iterator[Found]:
    """Trainable parameters are not in any optimizer, so they never change."""
    known = structure(window)
    order = {module.name: module.order for module in known.modules}
    missing = [p for p in known.parameters if p.trainable and not p.in_optimizer and order.get(p.owner, -1) >= 0]
    hidden = _unregistered(window)
    if known.optimizers and missing:
        yield _left_out(window, missing, is_meant=_is_transfer(window, missing, order))
    elif known.optimizers and hidden:
        state = learned(window)
        yield _in_a_list(hidden, is_meant=state is None or state.left < STALLED)


def _is_transfer(window: Window, missing: list[Parameter], order: Mapping[str, int]) -> bool:
    """Whether all layers before the trained ones, and no others, were left out, and the model learns anyway."""
    trained = [order.get(p.owner, -1) for p in structure(window).matrices if p.in_optimizer]
    left_out = [order[p.owner] for p in missing]
    state = learned(window)
    return bool(trained) and max(left_out) < min(trained) and state is not None and state.left < STALLED


def _left_out(window: Window, missing: list[Parameter], *, is_meant: bool) -> Found:
    known = structure(window)
    num = sum(p.trainable for p in known.parameters)
    owners = list(dict.fromkeys(p.owner for p in missing))
    is_one = len(missing) == 1
    return Found(
        f"{len(missing)} of {counted(num, 'trainable parameter')} ({listed(owners, 'layer')}) "
        f"{'is' if is_one else 'are'} not in any optimizer and never {'changes' if is_one else 'change'}.",
        step=0,
        confidence=0.95,
        remedy="Build the optimizer after the model is complete: "
        f"`{known.optimizer_type}(model.parameters(), lr={known.group_value('lr')})`.",
        sites=tuple(p.name for p in missing),
        evidence=(
            Evidence("model.json", float(len(missing)), "0", meaning="trainable parameters without an optimizer"),
        ),
        severity="info" if is_meant else None,
    )


def _unregistered(window: Window) -> list[str]:
    document = window.facts.get("model")
    names = document.get("unregistered") if isinstance(document, Mapping) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _in_a_list(hidden: list[str], *, is_meant: bool) -> Found:
    is_one = len(hidden) == 1
    return Found(
        f"No optimizer updates {listed(hidden)}: model.parameters() does not include {'it' if is_one else 'them'}, "
        f"because {'it is' if is_one else 'they are'} not registered with the model.",
        step=0,
        confidence=0.95,
        remedy=f"Register {'it' if is_one else 'them'} with `nn.ModuleList(...)`, `nn.ModuleDict(...)` or "
        "`nn.Parameter(...)`.",
        evidence=(Evidence("model.json", float(len(hidden)), "0", meaning="layers that are not registered"),),
        severity="info" if is_meant else None,
    )
