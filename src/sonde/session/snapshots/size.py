"""The minimum memory of a snapshot, including gradients and optimizer state that do not exist yet.

The first step creates optimizer state. For torch's own optimizers its size is known; for others, only existing state
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, optim

if TYPE_CHECKING:
    from sonde.session.snapshots.gather import Gather

_STATES: Final[dict[type, int]] = {
    **dict.fromkeys([optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.SparseAdam], 2),
    **dict.fromkeys([optim.Adadelta, optim.Rprop], 2),
    **dict.fromkeys([optim.Adagrad, optim.ASGD, optim.RMSprop], 1),
    **({optim.Muon: 1} if hasattr(optim, "Muon") else {}),
    optim.SGD: 0,
}
"""Tensors of a parameter's size that each optimizer keeps for it, with default options."""
_OPTIONS: Final[dict[type, tuple[str, ...]]] = {
    optim.Adam: ("amsgrad",),
    optim.AdamW: ("amsgrad",),
    optim.RMSprop: ("momentum", "centered"),
    optim.SGD: ("momentum",),
}
"""Options that add another tensor."""


def expected_bytes(gather: Gather, kinds: Iterable[str]) -> dict[str, int]:
    """Bytes by kind, as far as they are known. Activations, inputs and the state of unknown optimizers are not
    counted."""
    parameters = [parameter for _, parameter in gather.parameters()]
    found: dict[str, int] = {}
    if "param" in kinds:
        buffers = [buffer for large in (True, False) for _, buffer in gather.buffers(large=large)]
        found["param"] = sum(tensor.nbytes for tensor in [*parameters, *buffers])
    if "grad" in kinds:
        found["grad"] = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    if "optim" in kinds:
        found["optim"] = sum(_state_bytes(gather, {id(parameter) for parameter in parameters}))
    return found


def _state_bytes(gather: Gather, wanted: set[int]) -> Iterator[int]:
    for optimizer in gather.watching.optimizers.watched:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in wanted:
                    known = [
                        value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)
                    ]
                    num = num_states(optimizer, group) if parameter.requires_grad else 0
                    yield max(sum(value.nbytes for value in known), num * int(parameter.nbytes))


def num_states(optimizer: Any, group: dict[str, Any]) -> int:
    """The number of tensors of a parameter's size that it keeps for each parameter. A subclass may differ: 0 is
    assumed."""
    kind = type(optimizer)
    return _STATES.get(kind, 0) + sum(bool(group.get(option)) for option in _OPTIONS.get(kind, ()))
