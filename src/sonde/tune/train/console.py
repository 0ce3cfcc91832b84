"""Console output while a model is tuned: one bar, and a line for each evaluation; in a log file, a few lines.

transformers would print every number of every step, and show a separate bar for each pass over the data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from transformers import TrainerCallback

from sonde.display import is_notebook, message_stream, print_line

_MANY_TEXTS: Final = 20_000
"""Number of texts from which tokenizing takes seconds, so that the progress bars of `datasets` are useful."""
_NUM_LINES: Final = 10
"""Lines about the loss if no bar can be drawn."""


class Console(TrainerCallback):  # type: ignore[misc]
    """Replaces transformers' own bars. `has_bar` is for a terminal; otherwise lines are written."""

    def __init__(self, *, has_bar: bool) -> None:
        self.has_bar = has_bar
        self.bar: Any = None
        self._loss: float | None = None
        self._said = 0
        """Tenths of the training for which a line was written."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._said = _tenth(state)
        if state.global_step:
            left = state.max_steps - state.global_step
            what = f"{left} to go" if left > 0 else "nothing left to do; raise num_epochs or max_steps to continue"
            print_line(f"resuming after {state.global_step} steps, {what}")
        if self.has_bar:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="tuning",
                unit="step",
                dynamic_ncols=True,
                file=message_stream(),
            )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.bar is not None and self.bar.desc != "evaluating: ":
            self.bar.set_description("evaluating")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        found: Mapping[str, Any] = logs or {}
        self._loss = found.get("loss", self._loss)
        if self.bar is not None and self._loss is not None:
            self.bar.set_postfix_str(f"loss {self._loss:.4g}", refresh=False)
        held_out = [
            f"{_words(name)} {value:.4g}"
            for name, value in found.items()
            if name.startswith("eval_") and name.endswith("_loss")
        ]
        if held_out:
            self._say(state, held_out)
        elif self.bar is None and "loss" in found and _tenth(state) > self._said and not control.should_evaluate:
            self._say(state, [])

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.bar is not None:
            self.bar.set_description("tuning")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()

    def close(self) -> None:
        """Also after an exception: the bar's last line stays intact."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _say(self, state: Any, parts: list[str]) -> None:
        self._said = _tenth(state)
        loss = [] if self._loss is None or state.global_step == 0 else [f"loss {self._loss:.4g}"]
        width = len(str(state.max_steps))
        line = f"step {state.global_step:>{width}} of {state.max_steps}  {', '.join([*loss, *parts])}"
        if self.bar is not None:
            self.bar.write(line, file=message_stream())
        else:
            print_line(line)


def is_terminal() -> bool:
    """A notebook also draws bars, but has no terminal: its kernel is detected."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def introduction(model: Any, dataset: Any, max_length: int | None) -> list[str]:
    """The number of trained weights and of texts, and how many texts are truncated."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    num_all, num_trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    num_texts = f"{len(dataset):,} texts" if hasattr(dataset, "__len__") else "texts"
    lines = [f"{num_trained:,} of {num_all:,} weights ({num_trained / max(num_all, 1):.1%}) are trained on {num_texts}"]
    num_cut = _num_cut(dataset, max_length)
    if num_cut:
        lines.append(f"{num_cut:,} of them reach max_length={max_length} tokens and are truncated")
    return lines


def _num_cut(dataset: Any, max_length: int | None) -> int:
    if max_length is None or "input_ids" not in (getattr(dataset, "column_names", None) or ()):
        return 0
    if not hasattr(dataset, "data"):  # streamed
        return 0
    import pyarrow.compute as pc

    lengths = pc.list_value_length(dataset.data.column("input_ids"))
    return int(pc.sum(pc.greater_equal(lengths, max_length)).as_py() or 0)


@contextmanager
def calm(num_texts: int | None) -> Iterator[None]:
    """Hide the bars of `datasets` for passes over a few texts, and restore its setting afterwards."""
    import datasets

    if num_texts is None or num_texts >= _MANY_TEXTS or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _tenth(state: Any) -> int:
    return int(_NUM_LINES * state.global_step / max(state.max_steps, 1))


def _words(name: str) -> str:
    """`eval_loss` -> "held-out loss", `eval_retained_loss` -> "retained loss"."""
    inner = name.removeprefix("eval_")
    return "held-out loss" if inner == "loss" else inner.replace("_", " ")
