"""NaN or infinity, with its origin: the data, a module, the loss, the backward pass or the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.nonfinite import NEEDS, Moment, backward_gap, between, first_moment
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, listed, number
from sonde.schema.window import Window

GROWN: Final = 1e9
INPUTS: Final = {"batch.0": "inputs", "batch.1": "targets"}
COMMON_CAUSES: Final = (
    "Common causes: log or sqrt of a non-positive value (add an epsilon inside), division by a sum that can be 0 (use "
    "`clamp_min`), exp of a large number (use `log_softmax` or `logsumexp`), float16 beyond 65,504 (use bfloat16)."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first non-finite value came from, in words."""

    what: str
    """A sentence without its full stop."""
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
    """A value became NaN or infinite."""
    moment = first_moment(window)
    if moment is None:
        return
    origin = _origin(window, moment)
    severity = ("critical" if moment.is_lasting else "warning") if moment.matters else "info"
    skipped = counted(moment.num_skipped, "consecutive step was", "consecutive steps were")
    after = f"; {skipped} skipped because of it" if moment.num_skipped else ""
    after += "" if moment.is_lasting else "; the run has since recovered"
    yield Found(
        f"{origin.what}{after}.",
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
        f"Before the forward pass, {listed(names)} had non-finite values, although no gradient had been non-finite: "
        "the values were loaded or initialised that way, or something other than the optimizer changed them",
        names,
        0.8,
        "Check the checkpoint and the initialisation: `assert all(p.isfinite().all() for p in model.parameters())`.",
    )


def _from_data(moment: Moment) -> Origin:
    names = [INPUTS.get(site, f"tensor {site.removeprefix('batch.')}") for site in moment.data]
    return Origin(
        f"The {listed(names or ['inputs'])} of the batch contained NaN or infinity{_micro(moment)}",
        moment.data or (str(moment.forward.get("site", "")),),
        0.95,
        "Clean the data: `x = x[torch.isfinite(x).all(-1)]` or `torch.nan_to_num(x)`, and put "
        "`assert torch.isfinite(x).all()` into the dataset. Find the batch by its hash: scalar `data/batch/hash` at "
        f"step {moment.step:,}.",
    )


def _from_forward(window: Window, moment: Moment) -> Origin:
    moment = _narrowed(window, moment)
    order = {module.name: module.order for module in structure(window).modules}
    guess = min(moment.activations, key=lambda name: order.get(name, 10**9), default="")
    seen = str(moment.forward.get("site", guess)) or "The model"
    site = _inside(window, moment, seen)
    unknown = _names(moment.forward.get("unknown")) if site == seen else ()
    what = "infinity" if moment.forward.get("value") == "inf" else "NaN"
    came = moment.forward.get("after")
    where = f"between {came} and {site}" if came else f"before {site}"
    sites: tuple[str, ...] = (site,)
    inspect = f"Inspect the code {where}."
    if unknown:
        sites, likely = _candidates(window, moment, site, unknown)
        text, inspect = f"{what} appeared {where}{_micro(moment)}{likely}", f"Inspect {listed(sites)}."
    elif moment.forward.get("role") == "input":
        text = f"{what} appeared {where}, in code outside these modules{_micro(moment)}"
    else:
        text, inspect = (
            f"{_typed(window, site)} produced {what} from finite inputs{_micro(moment)}",
            f"Inspect {_typed(window, site)}.",
        )
    others = len(_names(moment.forward.get("sites"))) - (not unknown)
    text += f"; it then spread to {counted(others, 'later module')}" if others > 0 else ""
    text += _grown(window, str(came), moment.step)
    is_sure = bool(moment.forward) and not unknown and not moment.forward.get("is_sampled")  # as in older runs
    return Origin(text, sites, 0.95 if is_sure else 0.8, f"{inspect} {COMMON_CAUSES}")


def _narrowed(window: Window, moment: Moment) -> Moment:
    """The same with fewer unknown outputs: some that were freed before the check may have been recorded."""
    forward = dict(moment.forward)
    unknown = []
    for site in _names(forward.get("unknown")):
        steps, values = window.get(f"act/{site}/nonfinite_fraction")
        recorded = values[steps == moment.step]
        if not len(recorded):
            unknown.append(site)
        elif recorded[0] > 0:
            forward |= {"site": site, "role": "output"}
            break
        else:
            forward["after"] = site
            if forward.get("suspect") == site:
                forward["suspect"] = None
    return replace(moment, forward={**forward, "unknown": unknown}) if "unknown" in forward else moment


def _candidates(window: Window, moment: Moment, site: str, unknown: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The modules that a value may have come from, and a clause about them. Outputs that were freed or overwritten
    before the end of the forward pass could not be checked."""
    suspect = str(moment.forward.get("suspect") or "")
    if suspect:
        return (suspect,), f", most likely in {_typed(window, suspect)}"
    sites = unknown if moment.forward.get("role") == "input" else (*unknown, site)
    outputs = f"the output of {unknown[0]} was" if len(unknown) == 1 else f"the outputs of {listed(unknown)} were"
    return sites, f"; {outputs} freed before the check"


def _typed(window: Window, site: str) -> str:
    module = structure(window).module(site)
    return f"{site} ({module.type})" if module is not None and module.type else site


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list | tuple) else ()


def _inside(window: Window, moment: Moment, site: str) -> str:
    """The module inside a compiled one, which is a single call from outside. The outputs recorded inside it, in graph
    order, show more: the first bad output, or the module whose code ran between the last finite output and that."""
    module = structure(window).module(site)
    if module is None or module.is_leaf:
        return site
    # Modules inside a compiled one are never called from Python, so they have no call order.
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
        f"The loss{f' ({name})' if name else ''} was non-finite although all outputs of the model were finite: the "
        f"cause is the loss function or the targets{grown}",
        (),
        0.9,
        "Check the targets, and use the numerically stable form of the loss: `cross_entropy` on logits, "
        "`binary_cross_entropy_with_logits`, or `log(x.clamp_min(1e-8))`.",
    )


def _from_backward(window: Window, moment: Moment) -> Origin:
    bad, sound = backward_gap(window, moment)
    inside = between(window, bad, sound)
    if sound:
        where = f"between {sound} and {bad} in the backward pass" + (f", in {listed(inside)}" if inside else "")
    else:
        where = f"after {bad}, in the loss or after the last layer"
    return Origin(
        f"Gradients became non-finite {where}, while outputs and loss were finite: a derivative is infinite there",
        (*inside[:4], bad),
        0.85 if inside else 0.7,
        "Add a small constant inside sqrt, norm, pow, log and division: `(x.square().sum(-1) + 1e-12).sqrt()`. Check "
        "`torch.where` too: the branch that is not taken can produce 0 * infinity, which is NaN.",
    )


def _from_update(window: Window, moment: Moment) -> Origin:
    optimizer, eps = structure(window).optimizer_type or "the optimizer", structure(window).group_value("eps")
    names = moment.updates
    by_zero = " (eps is 0, so a gradient that is always 0 gives 0 / 0)" if eps == 0 else ""
    return Origin(
        f"The step of {optimizer} made {listed(names)} non-finite although all gradients were finite{by_zero}",
        names,
        0.95,
        f"Use a positive eps: `{structure(window).optimizer_type or 'optimizer'}(..., eps=1e-8)`."
        if eps == 0
        else "Lower the learning rate, keep the optimizer state in float32, and check eps and betas.",
    )


def _from_gradients(window: Window, moment: Moment) -> Origin:
    """The origin as far as gradients alone show it, when outputs were not recorded."""
    bad, sound = backward_gap(window, moment)
    if moment.grads and sound:
        inside = between(window, bad, sound)
        text = (
            f"The gradients of {bad} and all layers before it were non-finite, but those from {sound} on were finite: "
            "the origin is between the two"
        )
        return Origin(text, (*inside[:4], bad), 0.6, f"Inspect the layers between {bad} and {sound}. {COMMON_CAUSES}")
    what = "All gradients were" if moment.grads else "The loss was"
    text = (
        f"{what} non-finite; outputs were not recorded at this step, so the origin is in the forward pass or the loss"
    )
    remedy = f"Record outputs at every step to find the origin: `watch(..., activations=True)`. {COMMON_CAUSES}"
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
            found.append(Evidence(series, share, "0", moment.step, "non-finite fraction"))
    came = moment.forward.get("after")
    if came and np.isfinite(size := _size(window, came, moment.step)):
        found.append(Evidence(f"act/{came}/max_abs", size, "below 1e4", meaning="largest input value"))
    return found[:3]


def _size(window: Window, site: str, step: int) -> float:
    """The largest value in a module's latest output up to a step; NaN if it was not recorded."""
    steps, values = window.get(f"act/{site}/max_abs")
    known = values[(steps <= step) & np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def _grown(window: Window, site: str, step: int) -> str:
    """A clause about values that were already huge: then growth is the cause, and it began earlier."""
    size = _size(window, site, step)
    return f"; values had already grown to {number(size)} in {site}" if size > GROWN else ""


def _micro(moment: Moment) -> str:
    micro_batch, rank = moment.forward.get("micro_batch") or 0, moment.forward.get("rank") or 0
    where = [f"rank {rank}"] * bool(rank) + [f"micro-batch {micro_batch}"] * bool(micro_batch)
    return f" ({', '.join(where)})" if where else ""
