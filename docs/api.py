"""Write the Python API reference from the code: one page for each public module, for the documentation site.

What is public is a module's `__all__`; the text is its docstrings. `docs/site.py` calls this when it builds the site.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULES = {
    "sonde": "recording and reading",
    "sonde.show": "reports, exports, deleting runs, and requests to running ones",
    "sonde.run": "reading weights files, exports and checkpoints",
    "sonde.flow": "gradient flow of one batch",
    "sonde.tune": "fine-tuning and checkpoints",
    "sonde.write": "the stores of whole tensors",
    "sonde.testing": "test suites for your own adapters and stores",
    "sonde.errors": "every exception",
}
"""The modules of docs/python.md whose names do not depend on an installed framework, and what each holds."""


def pages() -> dict[str, str]:
    """The Markdown page of each public module, by its name."""
    return {name: page(name) for name in MODULES}


def page(name: str) -> str:
    module = importlib.import_module(name)
    parts = [f"# {name}", text_of(module)]
    for public in sorted(module.__all__, key=str.lower):
        parts += entry(public, getattr(module, public), name)
    return "\n\n".join(part for part in parts if part) + "\n"


def entry(name: str, thing: Any, module: str) -> Iterator[str]:
    """The section of one public name."""
    yield f"## {name}"
    if inspect.isclass(thing):
        yield signature(name, thing, "class ")
        yield text_of(thing)
        yield from fields(thing)
        yield from methods(thing)
    elif callable(thing):
        yield signature(name, thing)
        yield text_of(thing)
    elif isinstance(thing, ModuleType):
        yield text_of(thing)
    else:
        yield f"A value of type `{type(thing).__name__}`. Import it from `{module}`."


def signature(name: str, thing: Callable[..., Any], prefix: str = "") -> str:
    """The call as a code block: on one line if it fits, otherwise one argument on each."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"```py\n{prefix}{name}\n```"
    if [one.kind for one in found.parameters.values()] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]:
        return f"```py\n{prefix}{name}\n```"  # says nothing, like that of a protocol
    line = f"{prefix}{name}{_plain(found)}"
    if len(line) > 88:
        inside = ",\n    ".join(_arguments(found))
        result = "" if found.return_annotation is inspect.Signature.empty else f" -> {_word(found.return_annotation)}"
        line = f"{prefix}{name}(\n    {inside},\n){result}"
    return f"```py\n{line}\n```"


def _plain(found: inspect.Signature) -> str:
    result = "" if found.return_annotation is inspect.Signature.empty else f" -> {_word(found.return_annotation)}"
    return f"({', '.join(_arguments(found))}){result}"


def _arguments(found: inspect.Signature) -> list[str]:
    """Each argument as it is written in a definition, with the marks for keyword-only and positional-only ones."""
    words: list[str] = []
    is_marked = False
    given = [one for one in found.parameters.values() if one.name != "self"]
    for i, one in enumerate(given):
        is_marked |= one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not is_marked:
            words.append("*")
            is_marked = True
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        word = f"{stars}{one.name}"
        if one.annotation is not one.empty:
            word += f": {_word(one.annotation)}"
        if one.default is not one.empty:
            default = re.sub(r" at 0x[0-9a-f]+", "", repr(one.default))
            word += f" = {default}" if one.annotation is not one.empty else f"={default}"
        words.append(word)
        is_last = i + 1 == len(given) or given[i + 1].kind is not one.POSITIONAL_ONLY
        if one.kind is one.POSITIONAL_ONLY and is_last:
            words.append("/")
    return words


def _word(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("typing.", "").replace("collections.abc.", "")


def fields(thing: type) -> Iterator[str]:
    """The fields of a dataclass or of a settings model, with their types and defaults."""
    names: dict[str, tuple[str, str]] = {}
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            names[field.name] = (_word(field.type), default)
    if names and not any(name.startswith("_") for name in names):
        rows = [
            f"| `{name}` | `{kind.replace('|', chr(92) + '|')}` | {default} |"
            for name, (kind, default) in names.items()
        ]
        yield "\n".join(["| field | type | default |", "|---|---|---|", *rows])


def methods(thing: type) -> Iterator[str]:
    """Each public method and property that the class, or a class of ours that it extends, defines."""
    for name in sorted(dir(thing), key=str.lower):
        if name.startswith(("_", "test_")):  # of a suite, only what its user writes or calls
            continue
        static = inspect.getattr_static(thing, name)
        home = next(base for base in thing.__mro__ if name in vars(base))
        if not home.__module__.startswith("sonde"):
            continue
        title = f"### {thing.__name__}.{name}"
        if isinstance(static, property) or type(static).__name__ == "cached_property":
            yield title
            yield text_of(static) or text_of(getattr(static, "func", None))
        elif inspect.isroutine(static) or callable(static):
            bound = getattr(thing, name)
            yield title
            yield signature(name, bound)
            yield text_of(bound)


def text_of(thing: object) -> str:
    """A docstring as Markdown: examples and tables of words become code blocks."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    parts: list[tuple[str, str]] = []
    for paragraph in text.split("\n\n"):
        language = _language(paragraph)
        if parts and language in ("py", "pycon") and parts[-1][0] == language:
            parts[-1] = (language, f"{parts[-1][1]}\n\n{paragraph}")
        else:
            parts.append((language, paragraph))
    return "\n\n".join(f"```{language}\n{textwrap.dedent(part)}\n```" if language else part for language, part in parts)


def _language(paragraph: str) -> str:
    """The language of a paragraph that is code, "text" for one whose lines are aligned, "" for prose."""
    if paragraph.startswith(">>>"):
        return "pycon"
    try:
        tree = ast.parse(textwrap.dedent(paragraph))
    except SyntaxError:
        return "text" if re.search(r"^( {2,}|[├└│])", paragraph, re.MULTILINE) else ""
    is_word = len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Name)
    return "" if is_word or not tree.body else "py"
