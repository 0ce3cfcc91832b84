"""Draw the figures of docs/concepts.md into docs/pictures/, for light and dark pages:  python docs/figures.py

`tests/test_docs.py` fails if a picture is out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
LIGHT = {"ink": "#1f2328", "soft": "#59636e", "line": "#8c959f", "fill": "#f3f5f8", "mark": "#0b62c4", "hot": "#b3261e"}
DARK = {"ink": "#e6edf3", "soft": "#9aa4af", "line": "#6b7480", "fill": "#1b212a", "mark": "#6cb2ff", "hot": "#ff8a80"}


@dataclass
class Drawing:
    """An SVG picture in the colours of a page."""

    width: int
    height: int
    colours: dict[str, str]
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = "ink",
        size: int = 14,
        at: str = "middle",
        mono: bool = False,
    ) -> None:
        font = "ui-monospace, Menlo, Consolas, monospace" if mono else "system-ui, sans-serif"
        self.parts.append(
            f'<text x="{x}" y="{y}" font-family="{font}" font-size="{size}" text-anchor="{at}" '
            f'fill="{self.colours[colour]}" xml:space="preserve">{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        colour: str = "line",
        mono: bool = False,
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'fill="{self.colours["fill"]}" stroke="{self.colours[colour]}" stroke-width="1.5"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, mono=mono)

    def line(self, x: float, y: float, to_x: float, to_y: float, *, colour: str = "line", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" '
            f'stroke="{self.colours[colour]}" stroke-width="1.5"{dash}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, colour: str = "line") -> None:
        """A line to the right or straight down, with a head."""
        self.line(x, y, to_x, to_y, colour=colour)
        head = [(to_x, to_y)] + (
            [(to_x - 8, to_y - 4), (to_x - 8, to_y + 4)] if y == to_y else [(to_x - 4, to_y - 8), (to_x + 4, to_y - 8)]
        )
        points = " ".join(f"{a},{b}" for a, b in head)
        self.parts.append(f'<polygon points="{points}" fill="{self.colours[colour]}"/>')

    def dot(self, x: float, y: float, *, colour: str = "mark", radius: float = 4) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{self.colours[colour]}"/>')

    def svg(self) -> str:
        inside = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}">\n{inside}\n</svg>\n'
        )


def step(colours: dict[str, str]) -> Drawing:
    """One step: the micro-batches up to a call of the optimizer."""
    draw = Drawing(720, 170, colours)
    for i in range(2):
        left = 20 + 350 * i
        for j in range(2):
            draw.box(left + 106 * j, 30, 96, 44, "micro-batch")
        draw.box(left + 212, 30, 118, 44, "optimizer.step()", colour="mark")
        draw.line(left, 100, left + 330, 100, colour="soft")
        draw.text(left + 165, 124, f"step {i}", colour="mark", size=16)
        draw.text(left + 165, 148, "one value per series", colour="soft", size=13)
    return draw


def series(colours: dict[str, str]) -> Drawing:
    """The parts of a series name."""
    draw = Drawing(720, 150, colours)
    places = [
        (110, "grad", "kind", "what was measured"),
        (330, "layers.3.mlp.weight", "site", "where"),
        (590, "rms", "stat", "which number"),
    ]
    for (x, word, name, meaning), width in zip(places, (100, 240, 100), strict=True):
        draw.box(x - width / 2, 20, width, 40, word, mono=True)
        draw.text(x, 92, name, colour="mark", size=16)
        draw.text(x, 116, meaning, colour="soft", size=13)
    draw.text(185, 46, "/", size=20, mono=True)
    draw.text(495, 46, "/", size=20, mono=True)
    return draw


def sketch(colours: dict[str, str]) -> Drawing:
    """Tensors become sketches, sketches merge, stats are computed when read."""
    draw = Drawing(720, 190, colours)
    for i, name in enumerate(("tensor, micro-batch 1", "tensor, micro-batch 2")):
        y = 30 + 70 * i
        draw.box(20, y, 170, 44, name)
        draw.arrow(190, y + 22, 250, y + 22)
        draw.box(250, y, 90, 44, "sketch", colour="mark")
        draw.line(340, y + 22, 375, y + 22)
    draw.line(375, 52, 375, 122)
    draw.arrow(375, 87, 410, 87)
    draw.box(410, 65, 110, 44, "merged sketch", colour="mark")
    draw.arrow(520, 87, 580, 87)
    draw.box(580, 65, 120, 44, "norm, rms, …")
    draw.text(295, 172, "on the device, while training", colour="soft", size=13)
    draw.text(640, 172, "when you read it", colour="soft", size=13)
    return draw


def budget(colours: dict[str, str]) -> Drawing:
    """Steps recorded in a run: all of them first, then as many as the budget allows."""
    draw = Drawing(720, 150, colours)
    draw.arrow(20, 80, 700, 80)
    for i in range(24):
        draw.dot(30 + 9 * i, 80)
    for i in range(8):
        draw.dot(250 + 56 * i, 80)
    draw.line(240, 30, 240, 130, dashed=True)
    draw.text(130, 48, "every scheduled step", colour="mark")
    draw.text(470, 48, "every few steps", colour="mark")
    draw.text(130, 118, "half of the 5 seconds are left", colour="soft", size=13)
    draw.text(470, 118, "recording takes 1 % of the time", colour="soft", size=13)
    return draw


def attempts(colours: dict[str, str]) -> Drawing:
    """A run that returned to an older checkpoint."""
    draw = Drawing(720, 160, colours)
    draw.line(20, 50, 330, 50, colour="mark")
    draw.line(330, 50, 600, 50, colour="hot", dashed=True)
    draw.text(20, 34, "attempt 0", at="start", colour="mark")
    draw.text(470, 34, "abandoned, still readable", colour="hot")
    draw.arrow(330, 50, 330, 102)
    draw.text(342, 82, "rewind(1000)", at="start", mono=True, size=13)
    draw.arrow(330, 106, 690, 106, colour="mark")
    draw.text(510, 132, "attempt 1: what sonde shows from step 1000 on", colour="mark")
    for x, name in ((20, "0"), (330, "1000"), (600, "1800")):
        draw.dot(x, 50, colour="ink")
        draw.text(x, 72 if x != 330 else 34, name, colour="soft", size=13)
    return draw


FIGURES: dict[str, Callable[[dict[str, str]], Drawing]] = {
    function.__name__: function for function in (step, series, sketch, budget, attempts)
}


def pictures() -> dict[Path, str]:
    """Every figure in both colours, by its path."""
    return {
        PICTURES / f"concept-{name}-{mode}.svg": figure(colours).svg()
        for name, figure in FIGURES.items()
        for mode, colours in (("light", LIGHT), ("dark", DARK))
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text, "utf-8")
