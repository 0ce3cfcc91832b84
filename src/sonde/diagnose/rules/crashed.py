"""An exception, or an exit code other than 0, ended the program before training was over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from sonde.diagnose.measures.ending import Kind, ending
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

SYMPTOM: Final = 0.5
"""Confidence if the exception is about NaN or infinity: it reports another fault, which is then listed first."""
_NONFINITE: Final = re.compile(r"\bnan\b|\binf(inity|inite)?\b|non-?finite|not finite", re.IGNORECASE)
_REMEDIES: Final = {
    r"shapes? .*(cannot be multiplied|mismatch)|size mismatch|must match the size": "Print the shapes before that "
    "line, and check the features and the size of the last, incomplete batch (`drop_last=True`).",
    r"device-side assert|CUBLAS_STATUS|Target \d+ is out of bounds|index out of range": "Check that labels are in "
    "`[0, num_classes)` and token ids in `[0, vocab_size)`. On a GPU, `CUDA_LAUNCH_BLOCKING=1` shows the true line.",
    r"Expected all tensors to be on the same device": "Move the batch to the model's device: `x = x.to(device)`.",
    r"expected scalar type|same dtype|expected .* but (got|found) .*(Float|Double|Half|BFloat16|Long)": "Convert the "
    "tensor to the type that the layer expects: `x.float()`, or `target.long()` for class labels.",
    r"backward through the graph a second time": "A tensor of an earlier step is still part of the graph. Detach it: "
    "`hidden = hidden.detach()`.",
    r"modified by an inplace operation": "Replace the in-place operation (`+=`, `relu_`) by one that returns a new "
    "tensor; `torch.autograd.set_detect_anomaly(True)` names it.",
    r"NCCL|Gloo|connection (reset|closed|refused)|ProcessGroup": "Look for the first rank that failed: the others only "
    "lost their connection to it. `TORCH_DISTRIBUTED_DEBUG=DETAIL` prints more.",
    r"DataLoader worker": "Run with `num_workers=0` to see the worker's own error. If it was killed, `/dev/shm` or the "
    "host memory was too small.",
}


@rule(severity="critical", is_measured=True, references=("Python documentation: Errors and Exceptions",))
def crashed(window: Window) -> Iterator[Found]:
    """The program ended with an error before training was over."""
    end = ending(window)
    if end is None or end.kind is not Kind.ERROR:
        return
    where = f" in {end.place}" if end.place else ""
    yield Found(
        f"Training stopped {end.when}{where}: {end.reason or 'the reason is unknown'}.",
        step=end.step,
        confidence=SYMPTOM if _NONFINITE.search(end.reason) else 1.0,
        traceback=end.traceback,
        remedy=_remedy(end.reason, has_traceback=bool(end.traceback)),
    )


def _remedy(reason: str, *, has_traceback: bool) -> str:
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, reason, re.IGNORECASE):
            return remedy
    if has_traceback:
        return "Fix the line that the traceback names. Then continue from a checkpoint, or start again."
    return "Read the end of the program's own output: sonde saw only its exit code."
