"""The suite for mirrors: TensorBoard's passes, one that writes lines does, and each planted fault is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sonde.testing import MirrorTests
from sonde.testing.mirrors import Values


class Lines:
    """A tracker that writes JSON lines to a file when it is closed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lines.jsonl"
        self.lines: list[str] = []

    def begin(self, run: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def numbers(self, step: int, values: Any) -> None:
        self.lines.append(json.dumps({"step": step, "values": dict(values)}) + "\n")

    def finding(self, found: Any) -> None: ...

    def close(self, status: str) -> None:
        self.path.write_text("".join(self.lines))


def read_lines(folder: Path) -> Values:
    rows = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    return {(name, row["step"]): value for row in rows for name, value in row["values"].items()}


class LinesTests(MirrorTests):
    made: type[Lines] = Lines

    def sink(self, folder: Path) -> Any:
        return self.made(folder)

    def read(self, folder: Path) -> Values:
        return read_lines(folder)


class TestLines(LinesTests):
    pass


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
class TestTensorBoard(MirrorTests):
    def sink(self, folder: Path) -> Any:
        pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        from sonde.adapters.tensorboard import Sink

        return Sink()

    def read(self, folder: Path) -> Values:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (events,) = {path.parent for path in Path.cwd().rglob("events.out.*")}
        found = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
        return {(tag, one.step): one.value for tag in found.Tags()["scalars"] for one in found.Scalars(tag)}


class DropsTheLast(Lines):
    def numbers(self, step: int, values: Any) -> None:
        if step != 11:
            super().numbers(step, values)


class RoundsNumbers(Lines):
    def numbers(self, step: int, values: Any) -> None:
        super().numbers(step, {name: round(value, 2) for name, value in values.items()})


class LosesWhatWaits(Lines):
    def close(self, status: str) -> None:
        self.path.write_text("".join(self.lines[:-3]))


class Raises(Lines):
    def numbers(self, step: int, values: Any) -> None:
        raise OSError("the server is gone")


class HasNoClose:
    def begin(self, run: Any) -> None: ...

    def numbers(self, step: int, values: Any) -> None: ...

    def finding(self, found: Any) -> None: ...


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (DropsTheLast, "test_what_arrives_is_what_the_run_holds"),
        (RoundsNumbers, "test_what_arrives_is_what_the_run_holds"),
        (LosesWhatWaits, "test_a_training_that_fails_is_closed"),
        (HasNoClose, "test_a_sink_has_every_method"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: type, test: str) -> None:
    broken = type("Broken", (LinesTests,), {"made": fault})()
    if fault is HasNoClose:
        broken.sink = lambda folder: HasNoClose()
    with pytest.raises(AssertionError):
        getattr(broken, test)(tmp_path)


@pytest.mark.filterwarnings("default")
def test_a_mirror_that_raises_is_found(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        type("Broken", (LinesTests,), {"made": Raises})().test_what_arrives_is_what_the_run_holds(tmp_path)
