"""Every dtype, layout and shape a tensor can have, against the specification in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import MAX, MIN, SUM, ZERO, N

pytestmark = pytest.mark.usefixtures("each_kernel")

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
SIZES = [1, 2, 511, 512, 513, 5000]


def values(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    x[::7] = 0.0
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(check, dtype):
    check([values(size, size).to(dtype) for size in SIZES])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_with_nan_inf_and_negative_zero(check, dtype):
    x = values(3000)
    x[5], x[600], x[601], x[602], x[2999] = float("nan"), float("inf"), -float("inf"), -0.0, float("nan")
    check([x.to(dtype), torch.full((700,), float("nan"), dtype=dtype), torch.full((3,), -float("inf"), dtype=dtype)])


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_every_bit_pattern(check, dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    check([every, every.repeat(9), every[1:2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_every_bit_pattern(check, dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    check([every, every.view(256, 256).t()])


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(check, dtype):
    x = (values(2000) * 40).abs() if dtype.is_signed is False else values(2000) * 40
    check([x.to(dtype), torch.zeros(600, dtype=dtype), torch.ones(3, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32], ids=str)
def test_largest_integers_are_rounded_as_float64_does(check, dtype):
    limits = torch.iinfo(dtype)
    check([torch.tensor([limits.max, limits.min, limits.max - 1, 2**24 + 1], dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parts_count_as_two_elements(check, dtype):
    x = torch.complex(values(1300), values(1300, 1)).to(dtype)
    x[3] = complex(float("nan"), 1.0)
    check([x, x.conj(), x.t() if x.dim() == 2 else x.view(26, 50).t(), x.conj().view(26, 50).t(), torch._neg_view(x)])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_half(check):
    x = torch.complex(values(700), values(700, 1)).to(torch.complex32)
    check([x, x.conj()], [x.to(torch.complex64).numpy(), x.conj().to(torch.complex64).resolve_conj().numpy()])


def test_imaginary_part_of_a_conjugate_is_a_lazily_negated_view(check):
    x = torch.complex(values(1300), values(1300, 1))
    assert x.conj().imag.is_neg()
    check([x.conj().imag, torch._neg_view(values(1300)), torch._neg_view(values(1300).float().view(130, 10).t())])


def test_0_size_and_0_dim(ways, check):
    check(
        [
            torch.empty(0),
            torch.tensor(3.5),
            torch.empty(3, 0, 2),
            torch.tensor(-2),
            torch.empty(0, dtype=torch.complex64),
        ]
    )
    for way in ways.names:
        row = ways.rows(way, [torch.empty(0)])[0]
        assert (row.n, row.rows[MIN], row.rows[MAX]) == (0, np.inf, -np.inf)


def test_shapes_in_memory(check):
    x = values(8 * 6 * 10 * 10).float().view(8, 6, 10, 10)
    check(
        [
            x.to(memory_format=torch.channels_last),
            x.permute(3, 1, 0, 2),
            x[:, ::2],
            x[..., 3],
            x[1:2].expand(5, 6, 10, 10),
            values(1)[0].float().expand(1000),
            x.flip(0)[::3],
            x.transpose(0, 1)[1:],
            torch.as_strided(x, (40, 40), (1, 1)),  # elements that share memory
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_sparse_coo_counts_the_zeros_it_does_not_store(check, dtype):
    dense = torch.zeros(40, 50, dtype=dtype)
    dense[3, 4], dense[0, 0], dense[39, 49] = 3, 2, 1
    check([dense.to_sparse()], [ways_array(dense)])


def test_uncoalesced_duplicates_add_up_and_the_gradient_is_left_uncoalesced(check):
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1, 2], [1, 1, 2, 2]]), torch.tensor([1.0, 2.0, -4.0, 0.0]), (5, 5), check_invariants=True
    )
    assert not sparse.is_coalesced()
    check([sparse], [sparse.to_dense().numpy()])
    assert not sparse.is_coalesced()
    assert sparse._nnz() == 4


def test_hybrid_sparse_as_embeddings_have_it(check):
    embedding = torch.nn.Embedding(30, 8, sparse=True)
    embedding(torch.tensor([1, 1, 5])).square().sum().backward()
    check([embedding.weight.grad], [embedding.weight.grad.to_dense().numpy()])


def test_sparse_with_nothing_stored_is_all_zeros(check, ways):
    empty = torch.zeros(4, 5).to_sparse()
    check([empty], [np.zeros((4, 5))])
    assert ways.rows("add", [empty])[0].rows[ZERO] == 20


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|CSC|BSC) tensor support is in beta")
def test_compressed_sparse_layouts(check):
    dense = torch.zeros(8, 12)
    dense[0, 1], dense[7, 3], dense[5, 5] = 1.0, 2.0, float("nan")
    layouts = [dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 3)), dense.to_sparse_bsc((4, 4))]
    check(layouts, [dense.numpy()] * 4)


@pytest.mark.filterwarnings("ignore:.*quantize.*")
@pytest.mark.filterwarnings("ignore:.*quantized.*")
def test_quantized_tensors_are_what_they_stand_for(check):
    x = values(900).float()
    per_tensor = torch.quantize_per_tensor(x, 0.05, 3, torch.qint8)
    per_channel = torch.quantize_per_channel(
        x.view(9, 100), torch.rand(9) + 0.1, torch.zeros(9), axis=0, dtype=torch.qint8
    )
    check([per_tensor, per_channel], [per_tensor.dequantize().numpy(), per_channel.dequantize().numpy()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_nested_tensors(check, layout, dtype):
    parts = [values(6).view(2, 3).to(dtype), values(1800, 1).view(600, 3).to(dtype), torch.ones(1, 3, dtype=dtype)]
    whole = torch.cat([p.reshape(-1) for p in parts]).numpy()
    check([torch.nested.nested_tensor(parts, layout=layout)], [whole])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_jagged_tensor_with_holes_counts_only_its_parts(check):
    padded = torch.full((3, 10), 777.0)
    lengths = torch.tensor([2, 10, 5])
    for row, length in enumerate(lengths.tolist()):
        padded[row, :length] = values(length).float() + 1
    jagged = torch.nested.narrow(padded, 1, torch.zeros(3, dtype=torch.int64), lengths, layout=torch.jagged)
    check([jagged], [torch.cat([padded[r, :n] for r, n in enumerate(lengths.tolist())]).numpy()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensor_without_parts_is_empty(check):
    check([torch.nested.nested_tensor([])], [np.zeros(0)])


def unreadable() -> dict[str, torch.Tensor]:
    raw = torch.zeros(8, dtype=torch.uint8)
    return {
        "int4": raw.view(torch.int4),
        "uint4": raw.view(torch.uint4),
        "float4_e2m1fn_x2": raw.view(torch.float4_e2m1fn_x2),
        "bits8": raw.view(torch.bits8),
        "meta": torch.empty(3, device="meta"),
        "_mkldnn": torch.ones(4, 4).to_mkldnn(),
    }


@pytest.mark.parametrize("kind", ["int4", "uint4", "float4_e2m1fn_x2", "bits8", "meta", "_mkldnn"])
@pytest.mark.parametrize("way", ["add", "add_all"])
def test_unreadable_kind_is_named_and_the_others_are_not_disturbed(ways, kind, way):
    told: list[tuple[int, str]] = []
    reducer = Reducer(on_unreadable=lambda key, why: told.append((key, why)))
    tensors = [torch.ones(4), unreadable()[kind], torch.full((5,), 2.0)]
    found = ways.resolved(ways.reduced(reducer, way, tensors, histogram=True))
    assert sorted(found) == [0, 2]
    assert (found[0].rows[SUM], found[2].rows[SUM]) == (4.0, 10.0)
    assert len(told) == 1
    assert told[0][0] == 1
    assert kind in told[0][1]


def test_nothing_but_unreadable_tensors_resolves_to_nothing():
    reducer = Reducer()
    reducer.add(1, unreadable()["int4"])
    keys, rows, index, hist = resolve_all(reducer.take())
    assert (len(keys), rows.shape[0], len(index), hist.shape[0]) == (0, 0, 0, 0)


def test_mixed_list_keeps_keys_and_rows_together(ways):
    tensors = [
        torch.full((3,), 1.0),
        torch.full((200_000,), 2.0),
        torch.full((4,), 3.0, dtype=torch.float64),
        torch.empty(0),
        torch.full((5,), 4.0).to_sparse(),
        torch.full((140_000,), 5.0, dtype=torch.bfloat16),
        torch.full((6,), 6, dtype=torch.int64),
        torch.full((2,), 7.0, dtype=torch.complex64),
        torch.full((7,), 8.0),
    ]
    for way in ways.names:
        found = ways.rows(way, tensors)
        assert {key: found[key].n for key in found} == {
            0: 3, 1: 200_000, 2: 4, 3: 0, 4: 5, 5: 140_000, 6: 6, 7: 4, 8: 7,
        }  # fmt: skip
        for key in (0, 1, 2, 4, 5, 6, 7, 8):
            assert found[key].rows[MAX] == (key + 1 if key < 3 else key)
        assert found[7].rows[N] == 4


def ways_array(dense: torch.Tensor) -> np.ndarray:
    return dense.to(torch.float32).numpy() if dense.dtype == torch.bfloat16 else dense.numpy()
