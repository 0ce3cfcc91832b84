"""The random generators of a process: Python's, numpy's, torch's on every device. Reading their state changes none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from sonde.errors import UsageError


def take_rng() -> dict[str, Any]:
    """The state of all of them, as a tree of bytes and numbers."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the generator that user code shares
        "torch": _bytes(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_bytes(each) for each in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["mps"] = _bytes(torch.mps.get_rng_state())
    return state


def put_rng(state: dict[str, Any]) -> None:
    """Set all of them. A missing device is an error: its random numbers could not continue."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002  as above
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state:
        if torch.cuda.device_count() < len(state["cuda"]):
            raise UsageError(
                f"the checkpoint has random states of {len(state['cuda'])} CUDA devices; this machine has "
                f"{torch.cuda.device_count()}. Restore with rng=False; random numbers on the device will then differ."
            )
        for device, each in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(_tensor(each), device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_tensor(state["mps"]))


def take_generator(generator: Any) -> Any:
    """The state of one generator of torch or numpy."""
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    return generator.bit_generator.state


def put_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    else:
        generator.bit_generator.state = state


def is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator)


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
