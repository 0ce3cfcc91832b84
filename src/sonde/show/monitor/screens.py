"""What opens above the screen: the list of keys, and all of one finding."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from sonde.show.monitor.words import finding_note


class Note(ModalScreen[None]):
    """A text over everything; any of the usual keys closes it."""

    BINDINGS: ClassVar = [("escape,q,enter,question_mark,space", "dismiss", "close")]
    CSS = """
    Note { align: center middle; }
    Note > VerticalScroll {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    """

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self.heading, self.text = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = self.heading
            scroll.border_subtitle = "Esc closes"
            yield Static(self.text)


def keys_note(keys: list[tuple[str, str]]) -> Note:
    """Every key and what it does."""
    text = Text()
    for key, meaning in keys:
        text.append(f"{key:>10}  ", style="bold cyan").append(f"{meaning}\n")
    text.append("\nColours run from dark (small) to bright (large); × is a value that is not finite.", style="dim")
    return Note("keys", text)


def finding_screen(finding: dict[str, Any]) -> Note:
    return Note(str(finding["rule"]), finding_note(finding))
