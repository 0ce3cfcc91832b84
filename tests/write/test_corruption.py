"""A flipped bit is noticed, in a segment and in a log, and costs no more than what it hit."""

from __future__ import annotations

import hashlib
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sonde.schema.records import LOG_HEADER_SIZE, decode_frames
from sonde.write.stats.log import recover
from sonde.write.writer import Writer, WriterOptions

LOG_ONLY = WriterOptions(flush_interval_s=0.01, seal_steps=10_000, system_interval_s=0)


@pytest.fixture
def sealed(bench, run, quick):
    writer = Writer(run, quick)
    bench.put_steps(writer, range(200))
    writer.close("finished", deadline_s=20)
    return bench.contents(run).segments[0]


@pytest.fixture
def unsealed(bench, run, tmp_path):
    """A run whose writer was killed: a copy of one that is still being written."""
    writer = Writer(run, LOG_ONLY)
    bench.put_steps(writer, range(20))
    assert writer.flush(20)
    bench.put_steps(writer, range(20, 40))
    assert writer.flush(20)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.tmp"))
    writer.close("finished", deadline_s=20)
    return copy


def flip(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def test_a_flipped_bit_in_a_page_is_an_error_and_not_a_number(run, tmp_path, sealed):
    whole = (run / sealed["file"]).read_bytes()
    truth = pq.read_table(pa.BufferReader(whole), page_checksum_verification=True)
    metadata = pq.read_metadata(pa.BufferReader(whole))
    chunk = metadata.row_group(0).column(metadata.schema.names.index("sum"))
    first, size = chunk.data_page_offset, chunk.total_compressed_size
    chance, num_noticed = random.Random(0), 0
    for _ in range(200):
        damaged = flip(whole, first + chance.randrange(size), chance.randrange(8))
        try:
            table = pq.read_table(pa.BufferReader(damaged), page_checksum_verification=True)
        except (OSError, pa.ArrowException):
            num_noticed += 1
        else:
            assert table.equals(truth)
        assert hashlib.sha256(damaged).hexdigest() != sealed["sha256"]
    assert num_noticed > 150


def test_a_flipped_bit_in_a_log_ends_what_a_reader_takes(unsealed):
    whole = (unsealed / "stats/rank-0000/live.log").read_bytes()
    truth = [(frame.sequence, frame.record.rows.tobytes()) for frame in decode_frames(whole, LOG_HEADER_SIZE)]
    assert len(truth) == 40
    chance = random.Random(0)
    for _ in range(200):
        damaged = flip(whole, chance.randrange(LOG_HEADER_SIZE, len(whole)), chance.randrange(8))
        seen = [(frame.sequence, frame.record.rows.tobytes()) for frame in decode_frames(damaged, LOG_HEADER_SIZE)]
        assert len(seen) < 40
        assert seen == truth[: len(seen)]


def test_resuming_steps_over_damage_and_says_so(bench, unsealed):
    path = unsealed / "stats/rank-0000/live.log"
    whole = path.read_bytes()
    ends = [LOG_HEADER_SIZE, *(frame.end for frame in decode_frames(whole, LOG_HEADER_SIZE))]
    path.write_bytes(flip(whole, (ends[7] + ends[8]) // 2, 3))
    writer = Writer(unsealed, LOG_ONLY, resume=True)
    assert writer.next_step == 40
    writer.close("finished", deadline_s=20)
    found = bench.contents(unsealed)
    bench.check_values(found)
    assert found.steps() == set(range(40)) - {7}
    assert {"damaged", "lost"} <= {event["type"] for event in found.events}


def test_resuming_drops_a_torn_frame_and_keeps_the_rest(bench, unsealed):
    path = unsealed / "stats/rank-0000/live.log"
    path.write_bytes(path.read_bytes()[:-10])
    writer = Writer(unsealed, LOG_ONLY, resume=True)
    assert writer.next_step == 40  # the scalars of that step are whole
    bench.put_steps(writer, range(40, 45))
    writer.close("finished", deadline_s=20)
    found = bench.contents(unsealed)
    assert found.steps() == set(range(39)) | set(range(40, 45))
    assert "damaged" not in {event["type"] for event in found.events}


@pytest.mark.parametrize("size", [0, 5, LOG_HEADER_SIZE])
def test_a_log_that_was_hardly_begun_does_not_matter(bench, unsealed, size):
    path = unsealed / "stats/rank-0000/live.log"
    path.write_bytes(path.read_bytes()[:size])
    writer = Writer(unsealed, LOG_ONLY, resume=True)
    bench.put_steps(writer, range(40, 45))
    writer.close("finished", deadline_s=20)
    assert bench.contents(unsealed).steps() == set(range(40, 45))


def test_random_damage_to_a_log_never_stops_recovery(unsealed):
    path = unsealed / "stats/rank-0000/live.log"
    whole = path.read_bytes()
    truth = {frame.sequence: frame.record.rows.tobytes() for frame in decode_frames(whole, LOG_HEADER_SIZE)}
    chance = random.Random(1)
    for _ in range(100):
        data = bytearray(whole[: chance.randrange(len(whole))])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        for sequence, frame in recover(path.parent).frames.items():
            assert frame.record.rows.tobytes() == truth[sequence]
