"""Sees calls of torch's Python functions, whoever holds them and however they were imported.

The function object stays the same and only its code is exchanged. Replacing the attribute of its module would miss
callers that took it earlier (`criterion = F.cross_entropy`), would make a model that holds one unpicklable, and would
confuse torch.compile, which knows these functions by identity. The price: a warning that such a function gives its
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
"""Called with (name, positional arguments, keywords, result) of a call; must not raise: see `guards.protected`."""
Begins = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Called with (name, positional arguments, keywords) before a call; must not raise either."""

_originals: Final[dict[str, types.FunctionType]] = {}
"""Copies with the original code. Kept for good: another thread may be in the middle of a call when watching ends."""
_watchers: Final[dict[str, tuple[FunctionTap, ...]]] = {}
_swapped: Final[dict[str, types.FunctionType]] = {}
_lock: Final = ForkLock()
"""For taps that come and go; calls take no lock."""


class FunctionTap:
    """Calls `begins` before and `seen` after each eager call of these functions, until `detach`. The last tap to go
    restores them. A compiler traces through them as before; with `is_traced=False` it runs them uncompiled, as it does
    with torch's own non-mathematical files.

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
            return  # a torch version whose compiler cannot be configured
        for name in names:
            function = getattr(module, name, None)
            # Built into torch, or with a closure that our code has no cells for: such calls are not seen.
            if isinstance(function, types.FunctionType) and not function.__closure__:
                self.names.append(name)
                with _lock.held:
                    _add(name, function, self)

    def pause(self) -> None:
        """Call nothing until `resume`."""
        for name in self.names:
            with _lock.held:
                _watchers[name] = tuple(other for other in _watchers[name] if other is not self)

    def resume(self) -> None:
        self.pause()
        for name in self.names:
            with _lock.held:
                _watchers[name] = (*_watchers[name], self)

    def detach(self) -> None:
        for name in self.names:
            with _lock.held:
                _remove(name, self)
        self.names = []


def _add(name: str, function: types.FunctionType, tap: FunctionTap) -> None:
    if name not in _swapped:
        _originals[name] = _copy(function)
        function.__code__ = _code(name, is_traced=tap.is_traced)
        # Tools that ask for the signature or the source (inspect, TorchScript) get the original's.
        function.__wrapped__ = _originals[name]  # type: ignore[attr-defined]
        _swapped[name] = function
    _watchers[name] = (*_watchers.get(name, ()), tap)


def _remove(name: str, tap: FunctionTap) -> None:
    _watchers[name] = tuple(other for other in _watchers.get(name, ()) if other is not tap)
    if _watchers[name]:
        return
    function = _swapped.pop(name, None)
    # Unless other code has exchanged it again since.
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
    # It runs with the globals of the module it was put into, so it imports everything else here.
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
    """The original's result, after the observers have seen it."""
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
    """The same, while a compiler runs the surrounding code: it must not compile ours."""
    if not _watchers[name]:
        return _originals[name](*args, **kwargs)
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
    """A decorator that makes torch.compile run code uncompiled, without importing the compiler."""
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    action, put = getattr(eval_frame, "_FrameAction", None), getattr(eval_frame, "set_code_exec_strategy", None)
    if strategy is None or action is None or put is None:
        return None
    return lambda code: put(code, strategy(action.SKIP, action.DEFAULT))


_set_compiler: Final = eval_frame.set_eval_frame
_run_as_is: Final = _find_run_as_is()
if _run_as_is is not None:
    _run_as_is(call_untraced.__code__)
