"""Sees calls of Python functions of torch, whoever holds them and however they were imported.

The function object stays what it is and only its code is exchanged. Replacing the attribute of its module would miss
those who took it before (`criterion = F.cross_entropy`), would make a model that holds one unpicklable, and would be
remembered by torch.compile, which knows these functions by identity. The price: a warning such a function gives its
caller names our line, not the caller's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._C._dynamo import eval_frame

from sonde.probe.locks import ForkLock

Seen = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""(name, positional arguments, keywords, result) of a call; must not raise: see `guards.protected`."""
Begins = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""(name, positional arguments, keywords) of a call that is about to be made; must not raise either."""

_originals: Final[dict[str, types.FunctionType]] = {}
"""Copies with the true code. They stay for good: another thread may be in the middle of a call when watching ends."""
_watchers: Final[dict[str, tuple[FunctionTap, ...]]] = {}
_swapped: Final[dict[str, types.FunctionType]] = {}
_lock: Final = ForkLock()
"""For those who come and go; calls take no lock."""


class FunctionTap:
    """Calls `begins` before and `seen` after each eager call of these functions, until `detach`. The last tap to go
    restores them. A compiler traces through them as before; with `is_traced=False` it runs them as they are, which is
    what it does with torch's own files that are no mathematics.

    tap = FunctionTap(torch.nn.functional, ["relu"], protected(seen, on_error, "relu"))
    """

    def __init__(
        self,
        module: Any,
        names: Iterable[str],
        seen: Seen | None = None,
        *,
        begins: Begins | None = None,
        is_traced: bool = True,
    ) -> None:
        self.seen, self.begins, self.is_traced = seen, begins, is_traced
        self.names: list[str] = []
        if not is_traced and _run_as_is is None:
            return  # a torch in which a compiler cannot be told
        for name in names:
            function = getattr(module, name, None)
            # Compiled into torch, or with a closure our code has no cells for: such calls are simply not seen.
            if isinstance(function, types.FunctionType) and not function.__closure__:
                self.names.append(name)
                with _lock.held:
                    _add(name, function, self)

    def detach(self) -> None:
        for name in self.names:
            with _lock.held:
                _remove(name, self)
        self.names = []


def _add(name: str, function: types.FunctionType, tap: FunctionTap) -> None:
    if name not in _swapped:
        _originals[name] = _copy(function)
        function.__code__ = _code(name, is_traced=tap.is_traced)
        # What asks for the signature or the source (inspect, TorchScript) is led to the original.
        function.__wrapped__ = _originals[name]  # type: ignore[attr-defined]
        _swapped[name] = function
    _watchers[name] = (*_watchers.get(name, ()), tap)


def _remove(name: str, tap: FunctionTap) -> None:
    _watchers[name] = tuple(other for other in _watchers.get(name, ()) if other is not tap)
    if _watchers[name]:
        return
    function = _swapped.pop(name, None)
    # Unless somebody has exchanged it again since.
    if function is not None and function.__code__.co_filename == __file__:
        function.__code__ = _originals[name].__code__
        if getattr(function, "__wrapped__", None) is _originals[name]:
            del function.__wrapped__  # type: ignore[attr-defined]


def _copy(function: types.FunctionType) -> types.FunctionType:
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = dict(function.__annotations__)
    copied.__module__, copied.__doc__ = function.__module__, function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied


def _template(*args: Any, **kwargs: Any) -> Any:
    # It runs with the globals of the module it was put into: everything else is imported here.
    from sonde.probe.loss.functions import call

    return call("<name>", args, kwargs)


def _untraced_template(*args: Any, **kwargs: Any) -> Any:
    from sonde.probe.loss.functions import call_untraced

    return call_untraced("<name>", args, kwargs)


def _code(name: str, *, is_traced: bool) -> types.CodeType:
    code = (_template if is_traced else _untraced_template).__code__
    consts = tuple(name if const == "<name>" else const for const in code.co_consts)
    made = code.replace(co_name=name, co_consts=consts)
    if not is_traced and _run_as_is is not None:
        _run_as_is(made)
    return made


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The original's result, after those who watch have seen it."""
    if torch.compiler.is_compiling():
        return _originals[name](*args, **kwargs)
    for tap in _watchers[name]:
        if tap.begins is not None:
            tap.begins(name, args, kwargs)
    result = _originals[name](*args, **kwargs)
    for tap in _watchers[name]:
        if tap.seen is not None:
            tap.seen(name, args, kwargs, result)
    return result


def call_untraced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, where a compiler is running what is around it: it must not compile what is ours."""
    compiler = _set_compiler(None)
    for tap in _watchers[name]:
        if tap.begins is not None:
            tap.begins(name, args, kwargs)
    _set_compiler(compiler)
    result = _originals[name](*args, **kwargs)
    compiler = _set_compiler(None)
    for tap in _watchers[name]:
        if tap.seen is not None:
            tap.seen(name, args, kwargs, result)
    _set_compiler(compiler)
    return result


def _find_run_as_is() -> Callable[[types.CodeType], None] | None:
    """How to have torch.compile run a piece of code as it is, without importing its compiler."""
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    action, put = getattr(eval_frame, "_FrameAction", None), getattr(eval_frame, "set_code_exec_strategy", None)
    if strategy is None or action is None or put is None:
        return None
    return lambda code: put(code, strategy(action.SKIP, action.DEFAULT))


_set_compiler: Final = eval_frame.set_eval_frame
_run_as_is: Final = _find_run_as_is()
if _run_as_is is not None:
    _run_as_is(call_untraced.__code__)
