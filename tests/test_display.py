"""Messages, views and lists of results, outside a notebook; tests/session/test_notebook.py has a real kernel."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

from sonde.display import Results, is_notebook, load_view, print_line, visible, warn
from sonde.errors import UsageError


def test_messages_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("sonde: hello")
    assert not is_notebook()
    assert capsys.readouterr() == ("", "sonde: hello\n")


@pytest.mark.parametrize("closed", [True, False])
def test_closed_stream_is_not_an_error(
    closed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    print_line("sonde: hello")
    assert capsys.readouterr().out == ""


def test_warning_names_the_line_of_the_caller() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn("careful", RuntimeWarning)
    assert [(one.category, one.filename) for one in found] == [(RuntimeWarning, __file__)]


def test_unknown_view_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="Reinstall sonde"):
        load_view("nothing")


def test_slices_of_results_are_results() -> None:
    results = Results([1, 2, 3])
    assert isinstance(results[1:], Results)
    assert results[1:] == [2, 3]
    assert results[0] == 1


def test_invisible_characters_are_made_visible() -> None:
    assert visible("a\nb\u202e") == "a\\nb\\u202e"
