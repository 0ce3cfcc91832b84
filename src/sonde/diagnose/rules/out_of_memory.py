"""An allocation failed, on the GPU or on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.ending import Ending, Kind, ending, largest_activations, last_of, memory_by_use
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import listed, number
from sonde.schema.window import Window

MOSTLY: Final = 0.5
"""Fraction of the known memory from which one use is named as the main one."""
FRAGMENTED: Final = 1.3
"""Memory that the allocator reserved, divided by what it handed out; above it, fragmentation matters."""
NOTABLE: Final = 0.05
"""Fraction of the memory in use that the model must need to be what holds it."""
ELSEWHERE: Final = (
    "Look at what that line allocates, and for tensors or data that are kept in lists, caches and globals: "
    "`torch.cuda.memory_summary()` or `tracemalloc` shows them."
)
CHANGES: Final = {
    "activations": "Halve the batch size and accumulate gradients over two batches, or recompute activations: "
    "`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`. Train in bfloat16: "
    "`torch.autocast('cuda', torch.bfloat16)`.",
    "optimizer state": "Use an optimizer with less state (`torch.optim.SGD`, Adafactor, 8-bit Adam), shard it with "
    "`ZeroRedundancyOptimizer` or FSDP2, or train adapters (LoRA) instead of all weights.",
    "parameters": "Keep frozen weights in bfloat16, shard the model with FSDP2, or train adapters (LoRA).",
    "gradients": "Call `optimizer.zero_grad(set_to_none=True)`, keep weights in bfloat16, or shard with FSDP2.",
}


@rule(severity="critical", is_measured=True, references=("PyTorch documentation: Understanding CUDA Memory Usage",))
def out_of_memory(window: Window) -> Iterator[Found]:
    """The program ran out of memory."""
    end = ending(window)
    if end is None or end.kind is not Kind.MEMORY:
        return
    uses = memory_by_use(window)
    place = f" in {end.place}" if end.place else ""
    asked = f", which tried to allocate {end.asked}" if end.asked else ""
    yield Found(
        f"Memory ran out {end.when}{place}{asked}{_held(window, end, uses)}.",
        step=end.step,
        confidence=1.0,
        sites=[site for site, _ in largest_activations(window)] if next(iter(uses), "") == "activations" else (),
        evidence=_evidence(window),
        traceback=end.traceback,
        remedy=_remedy(end, uses) if _is_holder(window, end, uses) else ELSEWHERE,
    )


def _is_holder(window: Window, end: Ending, uses: dict[str, float]) -> bool:
    """Whether the model needs a notable part of the memory in use; if that is unknown, it does."""
    used = (end.gpu_mib or {}).get("allocated", last_of(window, "system/process_rss_mib"))
    return not sum(uses.values()) < NOTABLE * used


def _held(window: Window, end: Ending, uses: dict[str, float]) -> str:
    """A clause on what the memory held."""
    if not uses:
        return ""
    if not _is_holder(window, end, uses):
        return f"; the model needs only {number(sum(uses.values()))} MiB, so something else holds the memory"
    clause = f"; the model needs {listed([f'{number(size)} MiB for {name}' for name, size in uses.items()][:4])}"
    largest = largest_activations(window, 1)
    if next(iter(uses)) == "activations" and largest:
        clause += f", most of all {largest[0][0]} ({number(largest[0][1])} MiB)"
    return clause


def _remedy(end: Ending, uses: dict[str, float]) -> str:
    main = next(iter(uses), "activations")
    is_main = not uses or uses[main] >= MOSTLY * sum(uses.values())
    parts = [CHANGES[main]] if is_main else [CHANGES["activations"], CHANGES[main]]
    gpu = end.gpu_mib or {}
    if gpu.get("reserved", 0.0) > FRAGMENTED * gpu.get("allocated", float("inf")):
        parts.append("Much of the reserved memory is fragmented: set `PYTORCH_ALLOC_CONF=expandable_segments:True`.")
    return " ".join(dict.fromkeys(parts))


def _evidence(window: Window) -> list[Evidence]:
    """The last readings of memory that were recorded."""
    gpu = {f"model/{site}/gpu_mb": "GPU memory in MB" for site, _, _ in window.by_site("model/*/gpu_mb")}
    readings = {**gpu, "system/process_rss_mib": "memory of the process in MiB"}
    return [
        Evidence(name, value, meaning=what) for name, what in readings.items() if (value := last_of(window, name)) >= 0
    ]
