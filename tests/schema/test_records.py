"""Records and their bytes: what was encoded is decoded, and nothing damaged is ever decoded as something else."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import FormatError
from sonde.schema.records import (
    FRAME_MAGIC,
    LOG_HEADER_SIZE,
    LOG_MAGIC,
    STATS_FRAME,
    Event,
    Frame,
    ScalarsRecord,
    Site,
    StatsRecord,
    SystemSample,
    check_log_header,
    decode_frames,
    encode_frame,
    log_header,
    to_json,
)
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS

BITS = st.integers(0, 2**32 - 1)


@st.composite
def stats_records(draw: st.DrawFn) -> StatsRecord:
    """Any bit pattern may sit in a column: NaN payloads and denormals must survive."""
    num_rows = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(BITS))
    index = np.sort(rng.permutation(num_rows)[: draw(st.integers(0, num_rows))])
    return StatsRecord(
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(st.floats(allow_nan=False)),
        rng.integers(0, 2**31, num_rows, dtype=np.int32),
        rng.integers(0, 2**64, (num_rows, NUM_FIELDS), dtype=np.uint64).view(np.float64),
        index.astype(np.int32),
        rng.integers(0, 2**32, (len(index), NUM_BINS), dtype=np.uint32).view(np.float32),
    )


@st.composite
def scalars_records(draw: st.DrawFn) -> ScalarsRecord:
    num = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(BITS))
    return ScalarsRecord(
        rng.integers(0, 2**31, num, dtype=np.int32),
        rng.integers(-(2**63), 2**63, num, dtype=np.int64),
        rng.standard_normal(num),
        rng.integers(0, 2**64, num, dtype=np.uint64).view(np.float64),
    )


RECORDS = st.one_of(stats_records(), scalars_records())


def columns(record: StatsRecord | ScalarsRecord) -> list[object]:
    """A record as comparable bytes."""
    values = [getattr(record, name) for name in type(record).__dataclass_fields__]
    return [v.tobytes() if isinstance(v, np.ndarray) else v for v in values]


def a_log(num_frames: int = 3) -> bytes:
    record = StatsRecord.without_hist(7, 1.5, np.arange(2, dtype=np.int32), np.ones((2, NUM_FIELDS)))
    return b"".join(encode_frame(i, record) for i in range(num_frames))


@given(st.lists(RECORDS, max_size=4), st.integers(0, 2**63))
def test_what_was_encoded_is_decoded_bit_by_bit(records: list[StatsRecord | ScalarsRecord], first: int) -> None:
    log = b"".join(encode_frame(first + i, record) for i, record in enumerate(records))
    frames = list(decode_frames(log))
    assert [frame.sequence for frame in frames] == [first + i for i in range(len(records))]
    assert [columns(frame.record) for frame in frames] == [columns(record) for record in records]
    assert not frames or frames[-1].end == len(log)


def test_decoding_starts_after_the_header_and_says_where_each_frame_ends() -> None:
    log = log_header() + a_log(2)
    first, second = decode_frames(log, LOG_HEADER_SIZE)
    assert [frame.sequence for frame in decode_frames(log, first.end)] == [1]
    assert second.end == len(log)


def test_a_log_cut_at_any_byte_gives_exactly_the_frames_before_the_cut() -> None:
    log = a_log(3)
    ends = [frame.end for frame in decode_frames(log)]
    for cut in range(len(log) + 1):
        assert [frame.end for frame in decode_frames(log[:cut])] == [end for end in ends if end <= cut]


def test_one_flipped_bit_anywhere_ends_the_log_before_the_damage() -> None:
    log = a_log(2)
    ends = [frame.end for frame in decode_frames(log)]
    for bit in range(0, len(log) * 8, 3):
        damaged = bytearray(log)
        damaged[bit // 8] ^= 1 << bit % 8
        frames = list(decode_frames(bytes(damaged)))
        assert [frame.end for frame in frames] == [end for end in ends if end <= bit // 8]


@given(st.binary(max_size=200))
def test_random_bytes_hold_no_frames(noise: bytes) -> None:
    assert list(decode_frames(noise)) == []


@given(st.binary(max_size=80), st.integers(0, 255))
def test_a_right_checksum_over_a_wrong_body_ends_the_log_without_a_crash(payload: bytes, kind: int) -> None:
    body = struct.pack("<QB", 0, kind) + payload
    frame = FRAME_MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body
    for found in decode_frames(frame):
        assert isinstance(found, Frame)


def crafted(kind: int, payload: bytes) -> bytes:
    body = struct.pack("<QB", 0, kind) + payload
    return FRAME_MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body


def test_a_frame_that_claims_more_rows_than_it_holds_is_refused() -> None:
    assert list(decode_frames(crafted(STATS_FRAME, struct.pack("<qdII", 0, 0.0, 2**31, 0)))) == []


def test_a_histogram_of_a_row_that_is_not_there_is_refused() -> None:
    record = StatsRecord(
        0,
        0.0,
        np.zeros(1, np.int32),
        np.ones((1, NUM_FIELDS)),
        np.array([5], np.int32),
        np.ones((1, NUM_BINS), np.float32),
    )
    assert list(decode_frames(encode_frame(0, record))) == []


def test_a_type_of_frame_that_a_later_version_added_is_passed_over() -> None:
    log = crafted(200, b"from the future") + a_log(1)
    assert len(list(decode_frames(log))) == 1


def test_header_is_recognised_and_its_damage_too() -> None:
    header = log_header()
    assert check_log_header(header)
    for cut in range(len(header)):
        assert not check_log_header(header[:cut])
    for i in range(len(header)):
        assert not check_log_header(header[:i] + bytes([header[i] ^ 1]) + header[i + 1 :])


def test_a_log_of_a_newer_format_is_refused_with_the_remedy() -> None:
    newer = struct.pack("<8sII", LOG_MAGIC, 99, zlib.crc32(LOG_MAGIC + (99).to_bytes(4, "little")))
    with pytest.raises(FormatError, match="pip install -U sonde-ml"):
        check_log_header(newer)


JSON_LIKE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None))),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


def refuse(constant: str) -> float:
    raise AssertionError(f"bare {constant} is not JSON")


@given(JSON_LIKE)
def test_any_config_becomes_strict_json_in_utf8(value: object) -> None:
    text = to_json(value)
    text.encode("utf-8")
    json.loads(text, parse_constant=refuse)


def test_json_keeps_what_it_can_and_names_the_rest() -> None:
    loaded = json.loads(
        to_json({"lr": np.float32(0.5), "n": np.int64(3), "path": Path("a/b"), "s": {1}, "x": math.nan, 1: (2,)})
    )
    assert loaded == {"lr": 0.5, "n": 3, "path": "a/b", "s": [1], "x": "nan", "1": [2]}


def test_a_config_that_contains_itself_ends() -> None:
    config: dict[str, object] = {"lr": 1}
    config["self"] = [config, config]
    assert json.loads(to_json(config)) == {"lr": 1, "self": ["…", "…"]}


def test_records_of_one_kind_have_sensible_defaults() -> None:
    assert Site(kind="grad", name="0.weight").shape == ()
    assert Event(type="skipped", message="inf", step=3, time=0.0).severity == "info"
    assert SystemSample(time=0.0, step=0, values={"cpu": 1.0}).values == {"cpu": 1.0}


def test_a_frame_has_the_documented_bytes() -> None:
    """Built by hand from docs/run-folder.md, with columns that are neither contiguous nor of the stored type."""
    rows = np.asfortranarray(np.arange(2.0 * NUM_FIELDS).reshape(2, NUM_FIELDS))
    hist = np.arange(2.0 * NUM_BINS).reshape(2, NUM_BINS)[::2]
    record = StatsRecord(7, 1.5, np.array([3, 4]), rows, np.array([1]), hist)  # type: ignore[arg-type]
    payload = struct.pack("<qdII", 7, 1.5, 2, 1) + struct.pack("<2i", 3, 4)
    payload += struct.pack(f"<{2 * NUM_FIELDS}d", *range(2 * NUM_FIELDS)) + struct.pack("<i", 1)
    payload += struct.pack(f"<{NUM_BINS}f", *range(NUM_BINS))
    body = struct.pack("<QB", 9, 1) + payload
    assert encode_frame(9, record) == b"SNDF" + struct.pack("<II", len(body), zlib.crc32(body)) + body
