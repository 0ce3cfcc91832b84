"""The complete result of a training, to the last bit: parameters, buffers, optimizer state, losses, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def seed_all(seed: int) -> None:
    """The three generators that training code draws from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that foreign code uses
    torch.manual_seed(seed)


def imprint(model: nn.Module, optimizers: Iterable[Any], losses: Iterable[float]) -> dict[str, Any]:
    """Name -> bytes of the state a training has reached. Two are equal if and only if all of it is bit-identical."""
    found = {f"param {name}": as_bytes(p) for name, p in model.named_parameters(remove_duplicate=False)}
    found |= {f"buffer {name}": as_bytes(b) for name, b in model.named_buffers(remove_duplicate=False)}
    found |= {f"grad {name}": as_bytes(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for number, optimizer in enumerate(optimizers):
        found |= {f"optimizer {number} {path}": value for path, value in leaves(optimizer.state_dict())}
    found |= {f"loss {step}": float(loss).hex() for step, loss in enumerate(losses)}
    found["torch's random numbers"] = as_bytes(torch.get_rng_state())
    found["numpy's random numbers"] = repr(np.random.get_state(legacy=True))  # noqa: NPY002
    found["numpy's random numbers, all"] = np.random.get_state(legacy=True)[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    found["Python's random numbers"] = repr(random.getstate())
    return found


def differences(plain: dict[str, Any], watched: dict[str, Any]) -> list[str]:
    """The names of what is not the same in both."""
    names = [*plain, *(name for name in watched if name not in plain)]
    return [name for name in names if name not in plain or name not in watched or plain[name] != watched[name]]


def as_bytes(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield path, as_bytes(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}.{number}")
    else:
        yield path, repr(value)
