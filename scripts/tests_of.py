"""Print the test files closest to one source file:  python scripts/tests_of.py src/sonde/write/queue.py

The closest ones have its name or its folder's, or import it. If there are few, tests of its room that import its
importers follow, level by level. If nothing imports it (a file that is found by its name), all tests of its room count.
This gives quick feedback while you work; a test of another room may still break. `make check` decides.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

import sonde

ROOT = Path(__file__).parents[1]
TESTS, SOURCE = ROOT / "tests", ROOT / "src"
ENOUGH = 4


@cache
def all_tests() -> dict[Path, set[str]]:
    """Every test file except the foreign zoo, with the modules it imports."""
    paths = sorted(path for path in TESTS.rglob("test_*.py") if "foreign" not in path.parts)
    return {path: set(imported(path)) for path in paths}


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("sonde", exclude_type_checking_imports=True)


def module_of(path: Path) -> str:
    """src/sonde/write/queue.py -> sonde.write.queue"""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(test: Path) -> Iterator[str]:
    """The sonde modules that a test imports, including inside functions."""
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "sonde")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def public(test: Path) -> set[str]:
    """The modules that define the public names a test uses: `sonde.watch` is defined in `sonde.session`."""
    names = re.findall(r"\bsonde\.(\w+)", test.read_text(encoding="utf-8"))
    return {home for name in names if (home := sonde._HOME_OF.get(name))}


def importers(graph: grimp.ImportGraph, modules: set[str]) -> set[str]:
    return {above for one in modules & graph.modules for above in graph.find_modules_that_directly_import(one)}


def closest(source: Path) -> list[Path]:
    """The test files closest to a source file, those with its name first."""
    module, (room, *inside) = module_of(source), source.relative_to(SOURCE / "sonde").parts
    tests, graph = all_tests(), import_graph()
    own = [test for test in tests if test.parent == TESTS or room in test.parts]
    found = [test for test in own if test.stem == f"test_{source.stem}"]
    if len(inside) > 1:
        found += [test for test in own if test not in found and test.stem.startswith(f"test_{inside[0]}")]
    found += [test for test in tests if test not in found and module in tests[test]]
    level, seen = {module}, {module}
    while len(found) < ENOUGH and level:
        level = importers(graph, level) - seen
        seen |= level
        found += [test for test in own if test not in found and level & (tests[test] | public(test))]
    return found or own


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    if not source.is_file() or source.suffix != ".py" or not source.is_relative_to(SOURCE / "sonde"):
        sys.exit(f"{sys.argv[1]} is not a Python file in src/sonde. Example:  make quick FILE=src/sonde/write/queue.py")
    print(*(path.relative_to(ROOT) for path in closest(source)))


if __name__ == "__main__":
    main()
