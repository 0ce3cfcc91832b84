"""The same batch has the same number; others, practically never."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.reduce.inspect.bits import device_hash, device_purity, sampled_bits
from sonde.reduce.inspect.identity import batch_hash, ids_hash, label_purity


def test_the_same_batch_has_the_same_number_below_two_to_53():
    x, y = torch.randn(32, 100), torch.arange(32)
    first, second = batch_hash([x, y]), batch_hash([x.clone(), y.clone()])
    assert first == second
    assert 0 <= first < 2**53
    assert int(float(first)) == first


def test_one_element_the_shape_and_the_dtype_make_a_difference():
    x = torch.zeros(8, 8)
    other = x.clone()
    other[3, 3] = 1
    hashes = [batch_hash([t]) for t in (x, other, x.reshape(4, 16), x.double(), x.int())]
    assert len(set(hashes)) == 5


def _batches(kind: str):
    generator = torch.Generator().manual_seed(0)
    for number in range(4000):
        if kind == "normal":
            yield [torch.randn(16, 40, generator=generator)]
        elif kind == "tokens":
            yield [torch.randint(0, 24, (8, 32), generator=generator)]
        elif kind == "round numbers":
            yield [torch.randint(0, 2, (16, 40), generator=generator).bfloat16()]
        else:
            yield [torch.zeros(4, 4), torch.tensor([number])]


@pytest.mark.parametrize("kind", ["normal", "tokens", "round numbers", "count"])
def test_thousands_of_batches_do_not_collide(kind):
    on_host, on_device = set(), set()
    for tensors in _batches(kind):
        on_host.add(batch_hash(tensors))
        # What is done on a device, here with tensors of the host.
        on_device.add(int(device_hash([torch.from_numpy(sampled_bits(t)) for t in tensors], 1)))
    assert len(on_host) == 4000
    assert len(on_device) == 4000
    assert all(0 <= number < 2**53 for number in on_device)


def test_large_tensors_are_sampled_in_every_column():
    x = torch.zeros(1000, 64)
    x[:, 17] = torch.arange(1000.0)
    assert batch_hash([x]) != batch_hash([torch.zeros(1000, 64)])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.0),
        torch.empty(0),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.eye(3).to_sparse(),
        np.arange(4, dtype=np.uint8),
    ],
)
def test_all_kinds_have_a_number(value):
    assert isinstance(batch_hash([value]), int)


def test_what_has_no_numbers_has_none():
    assert batch_hash([]) is None
    assert batch_hash([np.array(["text"])]) is None
    assert ids_hash(None) is None


def test_ids_may_be_numbers_texts_arrays_or_tensors():
    assert ids_hash([1, 2]) == ids_hash((1, 2)) != ids_hash([12])
    assert ids_hash(["a", "bc"]) != ids_hash(["ab", "c"])
    assert ids_hash("ab") == ids_hash(["ab"])
    assert ids_hash(np.arange(3)) != ids_hash(np.arange(1, 4))
    assert ids_hash(torch.arange(3)) == ids_hash(torch.arange(3))
    assert ids_hash(7) is not None


def test_purity_is_the_share_of_the_commonest_label():
    assert label_purity(torch.tensor([5, 5, 5, 2, -100])) == 0.75
    assert label_purity(np.array([70_000, 70_000, -1])) == pytest.approx(2 / 3)
    assert label_purity(torch.tensor([True, False])) == 0.5
    assert float(device_purity(torch.tensor([5, 5, 5, 2, -100]), -100)) == 0.75
    assert label_purity(torch.ones(3)) is None
    assert label_purity(np.ones(3)) is None
    assert label_purity(torch.tensor([-100])) is None
    assert label_purity(torch.empty(0, dtype=torch.long)) is None
