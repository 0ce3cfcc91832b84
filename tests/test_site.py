"""The documentation site: complete, without warnings, without dead links, and without the network."""

from __future__ import annotations

import importlib.util
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", DOCS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load_site()


class Anchors(HTMLParser):
    """What a page links to, what it loads, and where links into it may lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found.get("id") or "", found.get("name") or ""}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        elif found.get("src"):
            self.loads.append(found["src"] or "")
        elif tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.loads.append(found["href"] or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="the packages of the documentation site are missing: make site")
    folder = tmp_path_factory.mktemp("site")
    SITE.build(folder / "stage", folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Anchors]:
    return {path: Anchors(path.read_text("utf-8")) for path in built.rglob("*.html")}


def test_every_page_is_in_the_navigation() -> None:
    listed = [page.path for pages in SITE.sections().values() for page in pages if not page.path.startswith("api/")]
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(written)


def test_readme_and_landing_page_begin_with_the_same_promise() -> None:
    promise = "what went wrong, where, since which step, and how to fix it"
    for page in (ROOT / "README.md", DOCS / "README.md"):
        assert promise in " ".join(page.read_text("utf-8").split())


def test_hidden_code_and_links_out_of_the_folder_are_prepared() -> None:
    text = "<!-- python\nhidden = 1\n-->\n[a](../sql.md#x) [b](../../examples/ddp.py)\n```py\n[c](d.md)\n```\n"
    found = SITE.prepared(DOCS / "guides" / "planted.md", text)
    assert found == f"[a](../sql.md#x) [b]({SITE.REPOSITORY}/examples/ddp.py)\n```py\n[c](d.md)\n```\n"


@pytest.mark.slow
def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="the packages of the documentation site are missing: make site")
    (tmp_path / "docs").mkdir()
    configuration = tmp_path / "zensical.toml"
    configuration.write_text((DOCS / "zensical.toml").read_text("utf-8"), "utf-8")
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[there](index.md#a)\n", "utf-8")
    assert SITE.run_zensical(configuration) == 0
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[nowhere](missing.md)\n", "utf-8")
    assert SITE.run_zensical(configuration) != 0


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_a_place_on_it(pages: dict[Path, Anchors], built: Path) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, place = urldefrag(link)
            if ":" in target:
                continue
            to = (path.parent / unquote(target)).resolve() if target else path
            found = pages.get(to / "index.html" if to.is_dir() else to)
            is_file = to.suffix != ".html" and to.is_file()
            if not is_file and (found is None or unquote(place) not in found.ids):
                dead.append(f"{path.relative_to(built)}: {link}")
    assert len(pages) > 120
    assert dead == []


@pytest.mark.slow
def test_nothing_is_loaded_from_the_network(pages: dict[Path, Anchors], built: Path) -> None:
    loads = [load for page in pages.values() for load in page.loads]
    styles = "".join(path.read_text("utf-8") for path in built.rglob("*.css"))
    loads += re.findall(r"url\([\"']?([^)\"']+)", styles)
    assert [load for load in loads if re.match(r"(https?:)?//", load)] == []
    missing = [
        load
        for path, page in pages.items()
        for load in page.loads
        if not load.startswith("data:") and not (path.parent / urldefrag(load)[0].partition("?")[0]).exists()
    ]
    assert missing == []


@pytest.mark.slow
def test_language_models_find_every_page_as_markdown(built: Path) -> None:
    linked = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (built / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert len(linked) > 120
    assert [link for link in linked if not (built / link).is_file()] == []
