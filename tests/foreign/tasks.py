"""Endless batches that a small model learns from within some forty steps. No two are alike; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
Batches = Iterator[Batch]
VOCABULARY = 40
FIRST_WORD = 6
"""Below are tokens with a meaning: padding, beginning, end, mask."""
MASK = 4
CLASSES = 4


def _fixed(seed: int) -> torch.Generator:
    """For what is the same in every batch: the rule to be learned."""
    return torch.Generator().manual_seed(seed)


def chain(made: torch.Generator, rows: int, length: int, *, successors: int) -> Tensor:
    """Words of which each is followed by one of a few."""
    words = VOCABULARY - FIRST_WORD
    rule = torch.stack([torch.randperm(words, generator=_fixed(word))[:successors] for word in range(words)])
    tokens = [torch.randint(words, (rows,), generator=made)]
    for _ in range(length - 1):
        tokens.append(rule[tokens[-1], torch.randint(successors, (rows,), generator=made)])
    return torch.stack(tokens, 1) + FIRST_WORD


def causal(rows: int = 8, length: int = 16) -> Batches:
    """Predict the next word."""
    made = _fixed(1000)
    while True:
        ids = chain(made, rows, length, successors=2)
        yield {"input_ids": ids, "labels": ids.clone()}


def masked(rows: int = 8, length: int = 16) -> Batches:
    """Guess a quarter of the words from their neighbours."""
    made = _fixed(1001)
    while True:
        ids = chain(made, rows, length, successors=1)
        is_hidden = torch.rand(ids.shape, generator=made) < 0.25
        is_hidden[:, 0] = True
        yield {
            "input_ids": ids.masked_fill(is_hidden, MASK),
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(~is_hidden, -100),
        }


def translation(rows: int = 8, length: int = 12) -> Batches:
    """Words of a chain, each replaced by another."""
    made = _fixed(1002)
    dictionary = torch.randperm(VOCABULARY - FIRST_WORD, generator=_fixed(7)) + FIRST_WORD
    while True:
        ids = chain(made, rows, length, successors=2)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": dictionary[ids - FIRST_WORD]}


def pictures(rows: int = 12, size: int = 32, channels: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    """Noise of unit scale in which the class is a stripe, at one of four heights and of one of four colours."""
    made = _fixed(1003)
    colours = 1.5 * torch.randn(CLASSES, channels, generator=_fixed(8))
    while True:
        y = torch.randint(CLASSES, (rows,), generator=made)
        x = torch.randn(rows, channels, size, size, generator=made)
        high = size // CLASSES
        for row, kind in enumerate(y.tolist()):
            x[row, :, kind * high : (kind + 1) * high] += colours[kind, :, None, None]
        yield x, y


def image_classification(**sizes: int) -> Batches:
    return ({"pixel_values": x, "labels": y} for x, y in pictures(**sizes))


def segmentation(rows: int = 6, size: int = 32) -> Batches:
    """Where the stripe is, and which."""
    for x, y in pictures(rows, size):
        labels = torch.zeros(rows, size, size, dtype=torch.long)
        high = size // CLASSES
        for row, kind in enumerate(y.tolist()):
            labels[row, kind * high : (kind + 1) * high] = kind
        yield {"pixel_values": x, "labels": labels}


def boxes(rows: int = 4, size: int = 32) -> Batches:
    """One bright square of two kinds in each picture."""
    made = _fixed(1004)
    while True:
        x = 0.3 * torch.randn(rows, 3, size, size, generator=made)
        labels = []
        for row in range(rows):
            kind = int(torch.randint(2, (1,), generator=made))
            side = size // 3
            top, left = torch.randint(size - side, (2,), generator=made).tolist()
            x[row, kind, top : top + side, left : left + side] += 2.0
            box = torch.tensor([[left + side / 2, top + side / 2, side, side]]) / size
            labels.append({"class_labels": torch.tensor([kind]), "boxes": box})
        yield {"pixel_values": x, "labels": labels}


def waves(rows: int = 8, length: int = 800) -> Iterator[tuple[Tensor, Tensor]]:
    """Tones in noise; the class is the pitch."""
    made = _fixed(1005)
    time = torch.arange(length) / length
    while True:
        y = torch.randint(CLASSES, (rows,), generator=made)
        phase = 6.28 * torch.rand(rows, 1, generator=made)
        x = torch.sin(6.28 * (20.0 * 2.0 ** y[:, None]) * time + phase)
        yield 1.3 * x + 0.3 * torch.randn(rows, length, generator=made), y


def wave_classification(**sizes: int) -> Batches:
    return ({"input_values": x, "labels": y} for x, y in waves(**sizes))


def wave_transcription(rows: int = 8, length: int = 800) -> Batches:
    """The pitch, written as two letters."""
    for x, y in waves(rows, length):
        yield {"input_values": x, "labels": torch.stack([y + 1, y + 1 + CLASSES], 1)}


def spectra(rows: int, bands: int, frames: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A band of a spectrogram is loud; the class is which."""
    made = _fixed(1006)
    while True:
        y = torch.randint(CLASSES, (rows,), generator=made)
        x = torch.randn(rows, bands, frames, generator=made)
        for row, kind in enumerate(y.tolist()):
            x[row, kind * bands // CLASSES : (kind + 1) * bands // CLASSES] += 1.5
        yield x, y


def speech(rows: int = 8, bands: int = 8, frames: int = 64, length: int = 8) -> Batches:
    """A chain of words that begins with the class of the spectrogram."""
    made = _fixed(1007)
    for x, y in spectra(rows, bands, frames):
        words = chain(made, rows, length, successors=1)
        words[:, 0] = FIRST_WORD + y
        yield {"input_features": x, "labels": words}


def captions(rows: int = 8, size: int = 32, length: int = 8) -> Batches:
    """Pictures, and words that say which they are."""
    made = _fixed(1008)
    for x, y in pictures(rows, size):
        ids = FIRST_WORD + CLASSES * torch.randint(8, (rows, length), generator=made) + y[:, None]
        ids[:, -1] = VOCABULARY - 1  # the end, where CLIP looks
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": x}


def questions(rows: int = 8, size: int = 32, length: int = 6) -> Batches:
    """The same with a label: the class."""
    for batch in captions(rows, size, length):
        y = (batch["input_ids"][:, 0] - FIRST_WORD) % CLASSES
        yield {**batch, "labels": torch.nn.functional.one_hot(y, CLASSES).float()}


def curves(rows: int = 16, length: int = 32, channels: int = 2) -> Iterator[Tensor]:
    """Sine waves of random pitch and phase with a little noise: (rows, length, channels)."""
    made = _fixed(1009)
    time = torch.arange(length)[None, :, None]
    while True:
        pitch, phase = torch.rand(2, rows, 1, channels, generator=made)
        x = torch.sin((0.2 + 0.3 * pitch) * time + 6.28 * phase)
        yield x + 0.05 * torch.randn(rows, length, channels, generator=made)


def forecasts(rows: int = 16, past: int = 24, future: int = 8, lags: int = 4) -> Batches:
    """For transformers' probabilistic forecasters: one channel, two features of time."""
    for x in curves(rows, past + lags + future, 1):
        series = x[..., 0] + 1.0
        time = torch.arange(past + lags + future).float().repeat(rows, 1)
        features = torch.stack([torch.sin(0.3 * time), time / 30 - 0.5], -1)
        cut = past + lags
        yield {
            "past_values": series[:, :cut],
            "past_time_features": features[:, :cut],
            "past_observed_mask": torch.ones(rows, cut),
            "future_values": series[:, cut:],
            "future_time_features": features[:, cut:],
        }


def patches(rows: int = 16, past: int = 32, future: int = 8) -> Batches:
    for x in curves(rows, past + future):
        yield {"past_values": x[:, :past], "future_values": x[:, past:]}
