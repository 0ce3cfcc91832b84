"""Host transfers and tables in flight: what arrives, in any order of opening, and what is left out as wrong."""

from __future__ import annotations

import threading

import numpy as np
import torch

from sonde.reduce import transfer as handover
from sonde.reduce.scalars import PendingScalars
from sonde.reduce.table import Check, Table, resolve_all
from sonde.reduce.transfer import HostTransfer
from sonde.schema.sketch import NUM_FIELDS, empty_rows


def test_pieces_arrive_as_they_were_when_sent():
    pieces = [torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor(7, dtype=torch.int64), torch.zeros(0)]
    transfer = HostTransfer(pieces)
    pieces[0].fill_(-1)
    assert [piece.tolist() for piece in transfer.open()] == [[0, 1, 2, 3, 4, 5], [7], []]


def test_opened_twice_it_holds_the_same():
    transfer = HostTransfer([torch.ones(3)])
    assert transfer.open() is transfer.open()


def test_memory_goes_round():
    for number in range(50):
        first, second = (
            HostTransfer([torch.full((700,), float(number))]),
            HostTransfer([torch.full((900,), -float(number))]),
        )
        assert second.open()[0].tolist() == [-number] * 900
        assert first.open()[0].tolist() == [number] * 700
    assert all(len(known) <= 8 for known in handover._free.values())


def test_one_that_is_late_is_waited_for():
    transfer = HostTransfer([torch.ones(2)])
    transfer._host[-1] = 0.0  # as if the copy had not been made yet
    threading.Timer(0.05, lambda: transfer._host[-1:].fill_(1.0)).start()
    assert transfer.open()[0].tolist() == [1.0, 1.0]


def test_scalars_of_every_kind():
    values = [torch.tensor(1.5), torch.tensor([2], dtype=torch.int64), torch.tensor(3.0, dtype=torch.bfloat16)]
    pending = PendingScalars(values)
    values[0].fill_(9.0)
    assert pending.resolve() == [1.5, 2.0, 3.0]


def test_rows_that_were_wrong_are_left_out_and_reported():
    told = []
    rows = empty_rows(3)
    rows[:, 0] = [10, 11, 12]
    errors = torch.tensor([[0.0, 1.0], [9.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    table = Table(
        np.array([1, 2, 3], np.int32), rows, check=Check(errors, lambda keys, worst: told.append((keys, worst)))
    )
    keys, found, _, _ = resolve_all([table])
    assert keys.tolist() == [1, 3]
    assert found.shape == (2, NUM_FIELDS)
    assert found[:, 0].tolist() == [10, 12]
    assert told == [([2], 3.0)]
