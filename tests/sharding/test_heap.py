from pathlib import Path

from sharding import heap

CHUNK_BYTES, NUM_CHUNKS = 4_096, 10_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


def test_what_was_freed_below_what_is_held_goes_back_to_the_system():
    chunks = [bytes(CHUNK_BYTES) for _ in range(NUM_CHUNKS)]
    held = chunks[::64]
    del chunks
    before = resident_bytes()
    heap.give_back()
    assert before - resident_bytes() > CHUNK_BYTES * NUM_CHUNKS // 2
    assert len(held) == -(-NUM_CHUNKS // 64)
