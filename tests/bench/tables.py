"""Figures of several servers side by side, as Markdown: medians over the runs, and how ours compares."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    title: str
    field: str
    digits: int = 1
    compared: bool = True
    """Whether other servers' cells say what the reference's figure is as a multiple of theirs."""


def comparison(records: Sequence[Record], group: str, title: str, columns: Sequence[Column], reference: str) -> str:
    """One row per value of the field `group` and server, the server `reference` first.

    A cell is the median over the records that have the figure, `-` if none has. In brackets: the reference's median
    over this one's.
    """
    names = [title, "server", *(column.title for column in columns), "runs"]
    lines = [_line(names), _line(["---"] * len(names))]
    for value in _distinct(record[group] for record in records):
        rows = [record for record in records if record[group] == value]
        ours = [record for record in rows if record["server"] == reference]
        for server in sorted(_distinct(record["server"] for record in rows), key=lambda name: name != reference):
            theirs = [record for record in rows if record["server"] == server]
            cells = [_cell(theirs, ours if server != reference else [], column) for column in columns]
            lines.append(_line([str(value), server, *cells, str(len(theirs))]))
    return "\n".join(lines)


def median(records: Iterable[Record], field: str) -> float | None:
    found = [record[field] for record in records if record.get(field) is not None]
    return statistics.median(found) if found else None


def _cell(theirs: Sequence[Record], ours: Sequence[Record], column: Column) -> str:
    value = median(theirs, column.field)
    if value is None:
        return "-"
    text, reference = f"{value:,.{column.digits}f}", median(ours, column.field)
    if not column.compared or reference is None or not value:
        return text
    return f"{text} ({reference / value:.2f})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
