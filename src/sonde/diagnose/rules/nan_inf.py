"""NaN or infinity, with the place where it was made: the data, a module, the loss, the way back, or the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.nonfinite import NEEDS, Moment, backward_gap, between, first_moment
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

GROWN: Final = 1e9
INPUTS: Final = {"batch.0": "the inputs", "batch.1": "the targets"}
TYPICAL: Final = (
    "Typical makers: log or sqrt of 0 or less (add an epsilon inside), division by a sum that can be 0 (clamp_min), "
    "exp of a large number (use log_softmax, logsumexp), float16 beyond 65,504 (use bfloat16)."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of the place, in words."""

    what: str
    """Goes on from "at step 12, "."""
    sites: tuple[str, ...]
    confidence: float
    remedy: str


@rule(
    is_measured=True,
    severity="critical",
    needs=NEEDS,
    causes=("loss_spikes", "dead_relu", "underfitting", "throughput_regression", "constant_output"),
    references=("IEEE 754", "Micikevicius et al. 2018, Mixed Precision Training", "torch.autograd.set_detect_anomaly"),
)
def nan_inf(window: Window) -> Iterator[Found]:
    """A value stopped being finite."""
    moment = first_moment(window)
    if moment is None:
        return
    origin = _origin(window, moment)
    severity = ("critical" if moment.is_lasting else "warning") if moment.matters else "info"
    after = f"; {moment.num_skipped} steps in a row were skipped for it" if moment.num_skipped else ""
    after += "" if moment.is_lasting else "; the run has recovered since"
    yield Found(
        f"at step {moment.step}, {origin.what}{after}",
        step=moment.step,
        confidence=origin.confidence,
        severity=severity,
        sites=origin.sites,
        evidence=_evidence(window, moment),
        remedy=origin.remedy,
    )


def _origin(window: Window, moment: Moment) -> Origin:
    """The first bad thing in the order weights, data, forward, loss, backward, update."""
    if moment.weights:
        return _from_weights(moment)
    if moment.data or moment.forward.get("came_with_data"):
        return _from_data(moment)
    if moment.forward or (moment.activations and not moment.grads and not moment.loss):
        return _from_forward(window, moment)
    if moment.updates and not moment.grads:
        return _from_update(window, moment)
    if moment.is_forward_seen and moment.loss:
        return _from_loss(window, moment)
    if moment.is_forward_seen and moment.grads:
        return _from_backward(window, moment)
    return _from_gradients(window, moment)


def _from_weights(moment: Moment) -> Origin:
    names = moment.weights
    return Origin(
        f"{_listed(names)} went into the forward pass with values that are not finite, though no gradient had been "
        "bad: they were loaded or initialised so, or something other than the optimizer changed them",
        names,
        0.8,
        "check the checkpoint and the initialisation: assert all(p.isfinite().all() for p in model.parameters())",
    )


def _from_data(moment: Moment) -> Origin:
    names = [INPUTS.get(site, f"tensor {site.removeprefix('batch.')} of the batch") for site in moment.data]
    what = " and ".join(names) or "the inputs of the model"
    return Origin(
        f"a value that is not finite arrived with the data, in {what}{_micro(moment)}",
        moment.data or (str(moment.forward.get("site", "")),),
        0.95,
        "clean the data: x = x[torch.isfinite(x).all(-1)] or torch.nan_to_num, and assert torch.isfinite(x).all() "
        "in the dataset; the batch's hash names it (data/batch/hash)",
    )


def _from_forward(window: Window, moment: Moment) -> Origin:
    order = {module.name: module.order for module in structure(window).modules}
    guess = min(moment.activations, key=lambda name: order.get(name, 10**9), default="")
    site, value = str(moment.forward.get("site", guess)), str(moment.forward.get("value", "nan"))
    site = _inside(window, moment, site)
    what = "infinity" if value == "inf" else "NaN"
    module = structure(window).module(site)
    kind = f" ({module.type})" if module is not None and module.type else ""
    if moment.forward.get("role") == "input":
        came = moment.forward.get("after")
        where = f"between {came} and {site}" if came else f"before {site}"
        text = f"{what} was made {where}, in code that is no module of its own{_micro(moment)}"
    else:
        text = f"{site}{kind} gave {what} although what went into it was finite{_micro(moment)}"
    sites = moment.forward.get("sites")
    others = len(sites) - 1 if isinstance(sites, list | tuple) else 0
    text += f"; {others} later module{'s' if others > 1 else ''} took it over" if others > 0 else ""
    text += _grown(window, str(moment.forward.get("after")), moment.step)
    is_sure = bool(moment.forward) and not moment.forward.get("is_sampled")
    return Origin(text, (site,), 0.95 if is_sure else 0.8, f"look at {site}{kind}. {TYPICAL}")


def _inside(window: Window, moment: Moment, site: str) -> str:
    """A compiled module is one call from outside. What was recorded inside it, in the order of its graph, says more:
    the first bad output, or the module whose own code lies between the last sound one and that."""
    module = structure(window).module(site)
    if module is None or module.is_leaf:
        return site
    # Modules inside a compiled one are never called from Python: they have no place in the order of calls.
    uncalled = {m.name for m in structure(window).modules if m.order < 0}
    inner = [s for s, _, _ in window.by_site("act/*/nan_fraction") if s in uncalled]
    bad = [s for s in inner if s in moment.activations]
    if not bad:
        return site
    before = inner[: inner.index(bad[0])]
    parent = before[-1].rpartition(".")[0] if before else ""
    return parent if parent and not f"{bad[0]}.".startswith(f"{parent}.") else bad[0]


def _from_loss(window: Window, moment: Moment) -> Origin:
    name, called = structure(window).loss, structure(window).in_order
    grown = _grown(window, called[-1].name, moment.step) if called else ""
    return Origin(
        f"the loss{f' ({name})' if name else ''} was not finite although all outputs of the model were: it was made by "
        f"the loss function, or came with the targets{grown}",
        (),
        0.9,
        "check the targets, and use the stable form of the loss: cross_entropy on logits, binary_cross_entropy_with_"
        "logits, log(x.clamp_min(1e-8))",
    )


def _from_backward(window: Window, moment: Moment) -> Origin:
    bad, sound = backward_gap(window, moment)
    inside = between(window, bad, sound)
    if sound:
        where = f"between {sound} and {bad} on the way back" + (f", in {_listed(inside)}" if inside else "")
    else:
        where = f"behind {bad}, in the loss or in what follows the last layer"
    return Origin(
        f"gradients stopped being finite {where}, while outputs and loss still were: a slope is infinite there",
        (*inside[:4], bad),
        0.85 if inside else 0.7,
        "give sqrt, norm, pow, log and division a floor inside: (x.square().sum(-1) + 1e-12).sqrt(); "
        "0 * infinity, as where() makes it of the branch not taken, is NaN too",
    )


def _from_update(window: Window, moment: Moment) -> Origin:
    optimizer, eps = structure(window).optimizer_type or "the optimizer", structure(window).group_value("eps")
    names = moment.updates
    by_zero = " (eps is 0: a gradient that is always 0 gives 0 / 0)" if eps == 0 else ""
    return Origin(
        f"the step of {optimizer} made {_listed(names)} not finite although all gradients were finite{by_zero}",
        names,
        0.95,
        f"{optimizer}(..., eps=1e-8)"
        if eps == 0
        else "lower the learning rate; keep the optimizer's state in float32, and check eps and betas",
    )


def _from_gradients(window: Window, moment: Moment) -> Origin:
    """Without any sight of the forward pass: what the gradients alone say."""
    bad, sound = backward_gap(window, moment)
    if moment.grads and sound:
        inside = between(window, bad, sound)
        text = (
            f"gradients of {bad} and of all before it are not finite, those from {sound} on are: it broke between them"
        )
        return Origin(text, (*inside[:4], bad), 0.6, TYPICAL)
    what = "all gradients are" if moment.grads else "the loss is"
    text = f"{what} not finite; outputs were not recorded in this step, so it arose in the forward pass or the loss"
    remedy = f"record outputs in every step: watch(..., activations=True). {TYPICAL}"
    return Origin(text, moment.grads[-1:], 0.5, remedy)


def _evidence(window: Window, moment: Moment) -> list[Evidence]:
    found = []
    for kind, names in (
        ("custom", moment.data),
        ("grad", moment.grads),
        ("update", moment.updates),
        ("param", moment.weights),
    ):
        for name in names[:1]:
            series = f"{kind}/{name}/nonfinite_fraction"
            steps, values = window.get(series)
            share = float(values[steps == moment.step][0])
            found.append(Evidence(series, share, "0", moment.step, "share that is not finite"))
    came = moment.forward.get("after")
    if came and np.isfinite(size := _size(window, came, moment.step)):
        found.append(Evidence(f"act/{came}/max_abs", size, "below 1e4", meaning="largest value that went in"))
    return found[:3]


def _size(window: Window, site: str, step: int) -> float:
    """The largest value a module last gave out, up to a step; NaN when it was not recorded."""
    steps, values = window.get(f"act/{site}/max_abs")
    known = values[(steps <= step) & np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def _grown(window: Window, site: str, step: int) -> str:
    """Near the end of the range nothing but growth is to blame, and it began before."""
    size = _size(window, site, step)
    return f"; values had grown before, to {size:.0e} in {site}" if size > GROWN else ""


def _micro(moment: Moment) -> str:
    number, rank = moment.forward.get("micro_batch") or 0, moment.forward.get("rank") or 0
    where = [f"rank {rank}"] * bool(rank) + [f"micro-batch {number}"] * bool(number)
    return f" ({', '.join(where)})" if where else ""


def _listed(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
