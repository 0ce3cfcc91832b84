"""The test suite for mirrors. To test a new one, write one class that opens its sink and reads back what arrived.

class TestMyTracker(MirrorTests):
    def sink(self, folder):
        return MySink(folder)

    def read(self, folder):
        return {(name, step): value for name, step, value in MyTracker(folder).rows()}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from sonde.run import Run
from sonde.run import open as open_run
from sonde.session import Mirror, init
from sonde.session.observers.delivery import Sink

NUM_STEPS = 12
Values = dict[tuple[str, int], float]


class MirrorTests:
    """Subclass it, open the sink, and read back what arrived."""

    rtol: ClassVar[float] = 1e-6
    """Some trackers store float32."""

    def sink(self, folder: Path) -> Sink:
        """A sink that stores in this folder."""
        raise NotImplementedError

    def read(self, folder: Path) -> Values:
        """Every number that arrived, by name and step; called when the run has ended."""
        raise NotImplementedError

    def record(self, folder: Path, sink: Any, error: BaseException | None = None) -> Run:
        """Train a small net with this mirror; `error` ends the training after half of the steps."""
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mirrors = None if sink is None else Mirror(to=sink, stats=["grad/*/norm"], scalars="mine/*", every=4)
        session = init(project="suite", name="run", dir=folder / "runs", config={"lr": 0.1}, verbose=False)
        path = session.path
        assert path is not None
        try:
            with session:
                session.watch(net, optimizer, mirror=mirrors)
                for step in range(NUM_STEPS):
                    if error is not None and step == NUM_STEPS // 2:
                        raise error
                    loss = net(torch.randn(4, 3)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    session.log({"mine/loss": loss, "mine/large": 1e30 + step})
        except RuntimeError as caught:
            if caught is not error:
                raise
        return open_run(path)

    def test_a_sink_has_every_method(self, tmp_path: Path) -> None:
        assert isinstance(self.sink(tmp_path), Sink)

    def test_what_arrives_is_what_the_run_holds(self, tmp_path: Path) -> None:
        run = self.record(tmp_path, self.sink(tmp_path))
        scalars = run.scalars("mine/*").to_pylist()
        wanted = {(row["name"], row["step"]): row["value"] for row in scalars}
        stats = run.stats("grad/*/norm").to_pylist()
        wanted |= {(f"grad/{row['site']}/norm", row["step"]): row["value"] for row in stats if row["step"] % 4 == 0}
        found = self.read(tmp_path)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=self.rtol, err_msg=str(key))
        assert run.warnings == []
        assert "mirror" not in set(run.events()["type"].to_pylist())

    def test_a_training_that_fails_is_closed(self, tmp_path: Path) -> None:
        run = self.record(tmp_path, self.sink(tmp_path), RuntimeError("planted"))
        assert run.status == "crashed"
        steps = {step for name, step in self.read(tmp_path) if name == "mine/loss"}
        assert steps == set(range(NUM_STEPS // 2))

    def test_the_training_is_the_same_without_it(self, tmp_path: Path) -> None:
        runs = self.record(tmp_path / "with", self.sink(tmp_path)), self.record(tmp_path / "without", None)
        with_it, without = (run.scalars("mine/loss")["value"].to_pylist() for run in runs)
        assert with_it == without
