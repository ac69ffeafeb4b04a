"""What `tests.bench.peers` wrote down, as the tables that it prints."""

from collections.abc import Sequence

from tests.bench.mixed import SLO_TPOT_S, SLO_TTFT_S
from tests.bench.tables import Column, Record, comparison

REFERENCE = "podstream"
OTHERS = Column("others' cores", "others_cores", 2, compared=False)
LATENCIES = (
    Column("ttft p50 ms", "ttft_p50_ms", 0),
    Column("ttft p95 ms", "ttft_p95_ms", 0),
    Column("itl p50 ms", "itl_p50_ms"),
    Column("itl p95 ms", "itl_p95_ms"),
)
TOKENS = Column("output tokens/s", "output_tokens_per_s")
LEVELS = (TOKENS, *LATENCIES, Column("tpot p50 ms", "tpot_p50_ms"), OTHERS)
PREFIX = (Column("requests/s", "requests_per_s", 2), *LATENCIES, OTHERS)
PROTECTED = (
    Column("itl p99 ms alone", "alone_itl_p99_ms"),
    Column("disturbed", "itl_p99_ms"),
    Column("ratio", "itl_p99_ratio", 2, compared=False),
    Column("ttft p50 ms alone", "alone_ttft_p50_ms", 0),
    Column("disturbed", "ttft_p50_ms", 0),
    Column("ratio", "ttft_p50_ratio", 2, compared=False),
    OTHERS,
)
MIXED = (
    Column("good answers/s", "goodput_per_s", 3),
    Column("share good", "good_share", 2),
    TOKENS,
    *LATENCIES[:2],
    Column("tpot p50 ms", "tpot_p50_ms"),
    OTHERS,
)
START = (
    Column("first start s", "first_s"),
    Column("later starts s", "later_s"),
    Column("memory GiB", "resident_gib", 2),
)
MACHINE = (
    Column("GEMM GFLOP/s", "gemm_gflops", 0, compared=False),
    Column("read GB/s", "read_gb_per_s", 1, compared=False),
    Column("cores busy before", "busy_cores_before", 2, compared=False),
)


def all_tables(records: Sequence[Record]) -> str:
    """Those parts that were measured; in brackets is podstream's figure over the other server's."""
    parts = [
        ("prompt 128, output 128", "level", "streams", "streams", LEVELS),
        ("shared 512-token prefix", "prefix", "streams", "streams", PREFIX),
        ("4 interactive streams beside batch work", "protected", "size", "slots x tokens", PROTECTED),
        (f"mixed load, good: ttft <= {SLO_TTFT_S} s, tpot <= {SLO_TPOT_S} s", "mixed", "rate", "requests/s", MIXED),
    ]
    found = []
    for dtype in dict.fromkeys(record["dtype"] for record in records):
        mine = [record for record in records if record["dtype"] == dtype]
        for title, kind, group, name, columns in parts:
            if rows := [record for record in mine if record["kind"] == kind]:
                found.append(f"### {dtype}: {title}\n\n{comparison(rows, group, name, columns, REFERENCE)}")
        found.append(f"### {dtype}: start to first token, memory\n\n{_start_table(mine)}")
        starts = [record for record in mine if record["kind"] == "start"]
        found.append(f"### {dtype}: the machine\n\n{comparison(starts, 'size', 'slots x tokens', MACHINE, REFERENCE)}")
        found += [_failure(record) for record in mine if record["kind"] == "failure"]
    return "\n\n".join(found)


def _start_table(records: Sequence[Record]) -> str:
    """One row of a start and the memory before its stop: that of all its processes, what they share counted once."""
    rows: list[dict[str, object]] = []
    latest: dict[tuple[str, str], dict[str, object]] = {}
    for record in records:
        server = (record["server"], record["size"])
        if record["kind"] == "start":
            name = "later_s" if server in latest else "first_s"  # the first may compile
            latest[server] = {**record, name: record["first_token_s"]}
            rows.append(latest[server])
        elif record["kind"] == "memory":
            latest[server]["resident_gib"] = record["resident_gib"]
    return comparison(rows, "size", "slots x tokens", START, REFERENCE)


def _failure(record: Record) -> str:
    return f"{record['server']} ({record['size']}) failed in round {record['round']}: {record['error']}"
