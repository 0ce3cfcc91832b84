"""Build the documentation site into site/:  make site. Any warning ends the build.

docs/README.md is the landing page, and its tables are the navigation: a section for each heading, a page for each row.
Pages are copied to build/site/ first, where links to files outside docs/ become links to the repository, hidden code
is removed, and the API reference is written from the code. The site needs no network and no server: open
site/index.html. Each page's Markdown is next to it, and llms.txt lists all of them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What Zensical would load from the network on every page; docs/theme/offline.js does the same."""

REPOSITORY = "https://github.com/sonde-ml/sonde/blob/main"
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \| (.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page of the site: its title in the navigation, its path in docs/, and one sentence on what it holds."""

    title: str
    path: str
    meaning: str


def sections() -> dict[str, list[Page]]:
    """The navigation, as the tables of docs/README.md list it, with what is generated."""
    found: dict[str, list[Page]] = {}
    for part in re.split(r"^## ", (DOCS / "README.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        rows = [Page(*match.groups()) for match in ROW.finditer(part)]
        if rows:
            found[part.partition("\n")[0]] = rows
    found["Python API"] = [Page(name, f"api/{name}.md", meaning) for name, meaning in _load("api").MODULES.items()]
    found["Rules"] = [
        Page(path.stem, f"rules/{path.name}", _first_words(path)) for path in sorted(DOCS.glob("rules/*.md"))
    ]
    return found


def _first_words(path: Path) -> str:
    """The first paragraph below the title of a page."""
    return path.read_text("utf-8").split("\n\n")[1].replace("\n", " ")


def _load(name: str) -> ModuleType:
    """Another script of this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stage(folder: Path) -> Path:
    """Copy and generate everything the site is made of; the path of its configuration."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "docs"
    for source in DOCS.rglob("*.md"):
        name = source.relative_to(DOCS)
        write(
            pages / ("index.md" if name.as_posix() == "README.md" else name),
            prepared(source, source.read_text("utf-8")),
        )
    for name, text in _load("api").pages().items():
        write(pages / "api" / f"{name}.md", text)
    shutil.copytree(DOCS / "pictures", pages / "pictures")
    shutil.copytree(DOCS / "theme", pages / "theme")
    return write(
        folder / "zensical.toml", (DOCS / "zensical.toml").read_text("utf-8").replace("nav = []", navigation())
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def navigation() -> str:
    def row(title: str, value: str) -> str:
        return f"{{ {json.dumps(title, ensure_ascii=False)} = {value} }}"

    rows = [row("Overview", '"index.md"')]
    for title, pages in sections().items():
        inside = ", ".join(row(page.title, json.dumps(page.path)) for page in pages)
        rows.append(row(title, f"[{inside}]"))
    return "nav = [\n  " + ",\n  ".join(rows) + ",\n]"


def prepared(source: Path, text: str) -> str:
    """The text of a page without hidden code, with links that hold on the site. Code blocks stay as they are."""
    return "".join(
        part if is_code else LINK.sub(lambda match: _link(source, match), COMMENT.sub("", part))
        for part, is_code in _parts(text)
    )


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The page in pieces, each with whether it is a code block that readers see."""
    hidden = [match.span() for match in COMMENT.finditer(text)]
    start = 0
    for match in FENCE.finditer(text):
        if any(first <= match.start() < last for first, last in hidden):
            continue
        yield text[start : match.start()], False
        yield match[0], True
        start = match.end()
    yield text[start:], False


def _link(source: Path, match: re.Match[str]) -> str:
    before, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    path = (source.parent / target).resolve()
    if not path.is_relative_to(DOCS) or path.suffix == ".py":
        return f"{before}{REPOSITORY}/{path.relative_to(ROOT).as_posix()}{anchor})"
    if path == DOCS / "README.md":
        target = f"{target.removesuffix('README.md')}index.md"
    return f"{before}{target}{anchor})"


def llms() -> str:
    """The list of pages for language models, as llmstxt.org describes it."""
    lead = (DOCS / "README.md").read_text("utf-8").split("\n\n")[1].replace("\n", " ")
    parts = [f"# sonde\n\n> {lead}"]
    for title, pages in sections().items():
        rows = [f"- [{page.title}]({page.path}): {LINK.sub('](', page.meaning)}" for page in pages]
        parts.append("\n".join([f"## {title}\n", *rows]))
    return "\n\n".join(parts) + "\n"


def run_zensical(configuration: Path) -> int:
    """Build what a configuration describes, next to it; not 0 after any warning."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(configuration)]
    return subprocess.run(command, check=False).returncode


def build(folder: Path, target: Path) -> None:
    """Prepare the pages in a folder and build the site into another."""
    if code := run_zensical(stage(folder)):
        raise SystemExit(code)
    built = folder / "site"
    (built / "404.html").unlink()  # of use only at the root of a server
    for page in (folder / "docs").rglob("*.md"):
        shutil.copy(page, built / page.relative_to(folder / "docs"))
    for page in built.rglob("*.html"):
        up = "../" * (len(page.relative_to(built).parts) - 1)
        write(page, page.read_text("utf-8").replace(SHIM, f"{up}theme/offline.js"))
    write(built / "llms.txt", llms())
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(built, target)
    print(f"Built {len(list(target.rglob('*.html')))} pages: open {target / 'index.html'}")


if __name__ == "__main__":
    build(ROOT / "build" / "site", ROOT / "site")
