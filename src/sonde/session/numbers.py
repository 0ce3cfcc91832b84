"""Turns any value passed to `log` into a number without waiting for a device, or explains why it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

Late = Callable[[], float]
"""A number that may still be on a device. Called on the writer thread."""
_MAX_DEPTH: Final = 16


class NotANumberError(Exception):
    """A value that cannot be recorded: the message says why, and what to do."""


def take(value: Any) -> Any:
    """The number as a float; if it is still on a device, a `Late` or a one-element tensor on a GPU.

    >>> take(3), take(np.array([2.5])), take([np.float16(0.5)])
    (3.0, 2.5, 0.5)
    """
    if isinstance(value, int | float):
        return as_float(value)
    if isinstance(value, list | tuple):
        value = _alone(value)
    if _is_a(value, "torch", "Tensor"):
        return _tensor(value)
    return _late(value) or _plain(value)


def as_float(value: Any) -> float:
    """An int too large for a float becomes infinite, as it would in any tensor.

    >>> as_float(10**400), as_float(True)
    (inf, 1.0)
    """
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def numeric_array(value: Any) -> np.ndarray[Any, Any]:
    """An array of real or complex numbers, without masked values.

    >>> numeric_array(np.ma.masked_greater([1, 2, 9], 5))
    array([1, 2])
    """
    array = value.compressed() if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    if array.dtype.kind in "biufc":
        return array
    if array.dtype.kind == "V" and not array.dtype.names and array.dtype.type is not np.void:
        return array.astype(np.float64)  # bfloat16 and similar types, which numpy itself does not know
    raise NotANumberError(f"it holds {array.dtype}, not numbers")


def flattened(values: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each value under its name; names of nested mappings are joined with a slash.

    >>> list(flattened({"a": {"b": 1}, 2: 3}))
    [('a/b', 1), ('2', 3)]
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            yield from flattened(value, f"{name}/", depth + 1)
        else:
            yield name, value


def _tensor(tensor: Any) -> Any:
    from sonde.probe.guards import quiet
    from sonde.reduce.dense import UnreadableError
    from sonde.reduce.scalars import one_element

    try:
        with quiet():
            element = one_element(tensor)
            if element.device.type == "cpu":
                return float(element)
            return element if element.is_cuda else partial(float, element)
    except UnreadableError as why:
        raise NotANumberError(str(why)) from None


def _late(value: Any) -> Late | None:
    """Reads arrays of JAX and TensorFlow, which are computed while the program continues; None for anything else."""
    if _is_a(value, "jax", "Array"):
        if _is_a(value, "jax.core", "Tracer"):
            raise NotANumberError("it is traced by jax.jit and has no value yet. Return it, and log the result")
        _check_one(value)
        copied = value.copy()  # the next step may reuse the memory of this one
        copied.copy_to_host_async()
        return lambda: _plain(np.asarray(copied))
    if _is_a(value, "tensorflow", "Variable"):
        value = value.read_value()
    if _is_a(value, "tensorflow", "Tensor"):
        if not hasattr(value, "numpy"):
            raise NotANumberError("it is traced by tf.function and has no value yet. Return it, and log the result")
        _check_one(value)
        return lambda: _plain(value.numpy())
    return None


def _is_a(value: Any, module: str, name: str) -> bool:
    """Checks the type by name: only a program that has imported the class can have created the value."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _plain(value: Any) -> float:
    """A number in the memory of this process."""
    if value is None:
        raise NotANumberError("None is not a number. Omit the name at steps without a value")
    if isinstance(value, str | bytes | bytearray):
        raise NotANumberError(f"{value!r:.40} is a string. Put strings in config= or notes=")
    if isinstance(value, Mapping):
        raise NotANumberError("the mapping is nested too deeply, or contains itself")
    if isinstance(value, list | tuple):
        raise NotANumberError(_several(f"a {type(value).__name__} of {len(value)}"))
    if isinstance(value, complex | np.complexfloating):
        raise NotANumberError(_complex(type(value).__name__))
    if not isinstance(value, np.generic) and hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array(value)
    if isinstance(value, np.datetime64 | np.timedelta64 | np.void) or not _is_float_like(value):
        hint = ". Log the result of its compute()" if hasattr(value, "compute") else ""
        raise NotANumberError(f"{type(value).__name__} is not a number{hint}")
    return as_float(value)


def _alone(value: Any) -> Any:
    """Unwraps one-element lists: `[[x]]` is x."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(value, list | tuple) or len(value) != 1:
            break
        value = value[0]
    return value


def _array(value: Any) -> float:
    _check_one(value)
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise NotANumberError("it is masked and has no value")
    array = np.asarray(value).reshape(-1)
    if array.dtype.kind == "O":
        return _plain(array[0])
    if array.dtype.kind == "c":
        raise NotANumberError(_complex(str(array.dtype)))
    return float(numeric_array(array)[0])


def _check_one(value: Any) -> None:
    shape = tuple(value.shape)
    if None in shape or int(np.prod(shape, dtype=np.int64)) != 1:
        raise NotANumberError(_several(f"an array of shape {shape}"))


def _several(what: str) -> str:
    return (
        f"{what} is not a single number. Log its mean, for example, or record its statistics with sonde.tap(name, "
        "value)"
    )


def _complex(what: str) -> str:
    return f"{what} is not a real number. Log its absolute value, or its real and imaginary parts under two names"


def _is_float_like(value: Any) -> bool:
    """Whether this is a `Decimal`, `Fraction` or similar, but not a class."""
    return not isinstance(value, type) and (hasattr(value, "__float__") or hasattr(value, "__index__"))
