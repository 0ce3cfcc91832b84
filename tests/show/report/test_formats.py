"""A report in its formats: the same verdicts in each, everything escaped, nothing reached outside, sizes bounded."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.show.report.answers import collect
from sonde.show.report.html import to_html
from sonde.show.report.markdown import escape, to_markdown
from sonde.show.report.source import Report, gather
from sonde.show.report.target import default_path, is_report, pick_format, refuse_overwriting
from sonde.show.report.write import to_text
from sonde.show.web import assets


def falling(step: int) -> float:
    return 3.0 / (1 + step)


@pytest.fixture(scope="module")
def run(hostile_run: Path) -> sonde.Run:
    return sonde.open(hostile_run)


@pytest.fixture(scope="module")
def report(run: sonde.Run) -> Report:
    return gather(run)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A front-end of two lines: what a report does with it is the same."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "app.js").write_text("const t = `<!----></script>`;")
    (folder / "app.css").write_text("body { color: red }")
    (folder / "icon.svg").write_text("<svg/>")
    monkeypatch.setattr("sonde.show.report.html.FOLDER", folder)
    return folder


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.texts.append((self.found[-1][0], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def answers_of(page: str) -> dict[str, bytes]:
    """What the front-end unpacks."""
    data = re.search(r'id="sonde-data">\s*([^<]*)</script>', page)
    assert data is not None
    body = gzip.decompress(base64.b64decode(data[1]))
    length = int.from_bytes(body[4:8], "little")
    header, rest = json.loads(body[8 : 8 + length]), body[8 + length :]
    return {key: rest[offset : offset + size] for key, offset, size in header["answers"]}


def test_markdown_says_what_the_analyses_say(report: Report) -> None:
    text = to_markdown(report)
    for analysis in report.analyses:
        assert f"## {analysis.title}" in text
        assert escape(analysis.verdict) in text
    assert "layers.1.weight" in text


def test_markdown_takes_no_markup_from_a_run(report: Report) -> None:
    text = to_markdown(report).replace("<!-- sonde report -->", "")
    outside_code = re.sub(r"`[^`\n]*`", "", text)
    assert not re.search(r"(?<!\\)<", outside_code)


def test_json_is_json_and_holds_everything(report: Report) -> None:
    read = json.loads(to_text(report.as_dict()), parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert [one["key"] for one in read["analyses"]] == ["convergence", "gradient_flow", "weights", "overfitting"]
    assert read["findings"]
    assert read["config"]["note"].startswith("</script>")
    lines = read["analyses"][0]["charts"][0]["lines"][0]
    assert len(lines["x"]) == len(lines["y"]) == 40


def test_page_holds_the_answers_of_the_server(run: sonde.Run, report: Report, built: Path) -> None:
    answers = answers_of(to_html(run, report))
    base = next(key for key in answers if key.endswith("/report")).removesuffix("/report")
    for what in ("", "/sites", "/findings", "/health", "/heat?kind=grad&stat=rms", "/scalars?i=0"):
        assert base + what in answers
    assert json.loads(answers[f"{base}/report"])["analyses"][0]["verdict"] == report.analyses[0].verdict
    assert "/" not in json.loads(answers[base])["path"], "where the run lay is nobody's business"


def test_page_cannot_reach_anything_and_runs_nothing_but_its_script(
    run: sonde.Run, report: Report, built: Path
) -> None:
    page = to_html(run, report)
    elements = Elements(page)
    assert [sorted(attributes) for attributes in elements.all("script")] == [["id", "type"], ["type"]]
    assert elements.all("img") == []
    policy = next(one["content"] for one in elements.all("meta") if one.get("http-equiv")) or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    script = next(data for name, data in elements.texts if name == "script" and "const t" in data)
    assert script == r"const t = `\x3C!----><\/script>`;", "the same text, in which HTML sees nothing of its own"
    style = next(data for name, data in elements.texts if name == "style")
    for tag, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    places = [value or "" for _, own in elements.found for name, value in own.items() if name in ("href", "src")]
    assert [place for place in places if not place.startswith("data:")] == []


def test_two_writings_of_a_run_are_the_same(run: sonde.Run, report: Report, built: Path) -> None:
    assert to_html(run, report) == to_html(run, report)


@pytest.mark.slow
def test_data_grow_with_the_tensors_and_no_faster(begin: Any) -> None:
    layers = [f"layers.{n}.weight" for n in range(150)]
    run = sonde.open(begin(layers=layers).steps(60, falling).finish())
    kept = collect(run, gather(run))
    size = len(gzip.compress(b"".join(kept.values()), 6)) * 4 / 3
    assert size < 600_000
    assert sum("/lines?" in key for key in kept) > 100


def test_missing_front_end_is_said(run: sonde.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sonde.show.report.html import NotBuiltError
    from sonde.show.report.write import write_report

    monkeypatch.setattr("sonde.show.report.html.FOLDER", tmp_path / "nothing")
    with pytest.raises(NotBuiltError, match="make web"):
        write_report(run, tmp_path / "x.html", "html")
    assert not (tmp_path / "x.html").exists()
    assert assets.FOLDER.name == "static"


def test_no_browser_is_said_with_the_remedy(run: sonde.Run, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.show.report import pdf
    from sonde.show.report.write import write_report

    monkeypatch.setattr(pdf, "_PLACES", ())
    monkeypatch.setattr(pdf, "_NAMES", ())
    with pytest.raises(pdf.BrowserError, match="SONDE_CHROMIUM"):
        write_report(run, Path("x.pdf"), "pdf")
    assert not Path("x.pdf").exists()


def test_a_report_of_almost_nothing(begin: Any, built: Path) -> None:
    run = sonde.open(begin(layers=()).steps(2, lambda step: float("nan")).finish())
    report = gather(run)
    assert to_markdown(report)
    assert answers_of(to_html(run, report))


# ------------------------------------------------------------------------------------------------------ where it goes


def test_format_is_what_was_asked_or_what_the_ending_says() -> None:
    assert pick_format(None, None) == "html"
    assert pick_format(Path("x.MD"), None) == "md"
    assert pick_format(Path("x.txt"), None) == "txt"
    assert pick_format(Path("x.txt"), "json") == "json"
    with pytest.raises(ValueError, match="with format=: html, md"):
        pick_format(Path("x.doc"), None)
    assert default_path(Path("runs/gpt/a"), "md") == Path("a-report.md")


def test_only_a_report_gives_way_to_a_report(report: Report, tmp_path: Path) -> None:
    mine, old = tmp_path / "notes.md", tmp_path / "report.md"
    mine.write_text("my notes")
    old.write_text(to_markdown(report))
    assert (is_report(mine), is_report(old)) == (False, True)
    refuse_overwriting(old, force=False)
    refuse_overwriting(mine, force=True)
    with pytest.raises(ValueError, match="not a report"):
        refuse_overwriting(mine, force=False)
    with pytest.raises(ValueError, match="folder"):
        refuse_overwriting(tmp_path, force=True)


def test_json_and_html_are_known_again(run: sonde.Run, report: Report, built: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(to_text(report.as_dict()))
    (tmp_path / "a.html").write_text(to_html(run, report))
    assert is_report(tmp_path / "a.json")
    assert is_report(tmp_path / "a.html")


def test_code_in_a_remedy_is_code(report: Report) -> None:
    assert "(use `clamp_min`)" in to_markdown(report)


def test_escaped_text_reads_the_same() -> None:
    assert escape("a_b*c <x> | [y](z)") == r"a\_b\*c \<x\> \| \[y\](z)"
    assert escape("# no heading") == r"\# no heading"
    assert escape("1. no list") == r"\1. no list"
