"""Output of data as tables, texts, JSON and YAML."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mizzen.cli.printer import Column, cell, dump, measure, table
from mizzen_client.cli import formats
from mizzen_client.cli.formats import visible
from mizzen_client.cli.pages import _gpu_lines, left_lines
from mizzen_client.cli.submit import plan_page

COLUMNS = (
    Column("ID", lambda i: i["id"]),
    Column("NAME", lambda i: i["name"], flexible=True),
    Column("PLACE", lambda i: i["place"], drop=2),
    Column("AGE", lambda i: i["age"], drop=1, right=True),
)
ITEMS = [
    {"id": "wl-1", "name": "a-rather-long-name-of-a-workload", "place": "north", "age": "3m"},
    {"id": "wl-2", "name": "短い", "place": None, "age": "10h"},
]


def test_the_least_busy_gpus_are_shown_first() -> None:
    """`show` lists what running tasks use of their GPUs; nothing about those of an attempt that has ended."""
    used = [{"job": "t", "task": n, "gpus": 1 + n % 2, "percent": 95 - 5 * n, "used_bytes": n << 30} for n in range(10)]
    attempt = {"gpu_use": used, "released_at": None}
    lines = _gpu_lines({"attempts": [attempt]})
    assert lines[:3] == [
        "",
        "use of GPUs",
        "  t/9: 2 GPUs 50 % busy, with 9.0 GiB of memory in use",
    ]
    assert (len(lines), lines[-1]) == (11, "  and 2 more tasks")
    assert _gpu_lines({"attempts": [{**attempt, "released_at": "2026-01-01T00:00:00Z"}]}) == []
    assert _gpu_lines({"attempts": []}) == []


def test_files_in_working_directories_are_shown_with_a_warning() -> None:
    """`show` says where a task's files are and until when; a workload that has ended gets a warning above 1 MB."""
    until = datetime.now(UTC) + timedelta(hours=1)
    one = {"job": "t", "task": 0, "machine": "local/main/m1", "path": "/state/work", "bytes": 1_000_001}
    attempt = {"left": [{**one, "until": until.isoformat()}]}
    lines = left_lines({"attempts": [{"left": []}, attempt], "finished_at": until.isoformat()})
    assert lines[2:4] == [
        "  t/0: 977 KiB in /state/work",
        f"    on local/main/m1 until {formats.clock(until.isoformat())}",
    ]
    assert lines[4].startswith("  warning: they are deleted then")
    assert left_lines({"attempts": [attempt], "finished_at": None}) == lines[:4]
    attempt["left"][0]["until"] = (until - timedelta(hours=2)).isoformat()
    assert left_lines({"attempts": [attempt], "finished_at": until.isoformat()}) == []


def test_a_table_is_as_wide_as_its_contents_where_nothing_limits_it() -> None:
    """Without a width limit no cell is truncated, columns are aligned, and lines have no trailing blanks."""
    assert table(ITEMS, COLUMNS, None) == [
        "ID    NAME                              PLACE  AGE",
        "wl-1  a-rather-long-name-of-a-workload  north   3m",
        "wl-2  短い                              -      10h",
    ]


@given(st.integers(16, 80))
def test_a_table_fits_the_terminal(width: int) -> None:
    """No line is wider than the terminal, and the identifying columns are never dropped."""
    lines = table(ITEMS, COLUMNS, width)
    assert all(measure(line) <= width for line in lines)
    assert lines[1].startswith("wl-1  a-rather")


def test_the_least_important_columns_go_first() -> None:
    """A narrow table drops whole columns in the order of their `drop` number; ids are not truncated."""
    assert table(ITEMS, COLUMNS, 24)[0].split() == ["ID", "NAME", "AGE"]
    assert table(ITEMS, COLUMNS, 18)[0].split() == ["ID", "NAME"]


@given(st.text())
def test_no_value_can_command_the_terminal(text: str) -> None:
    """A cell is one line without control characters, for any value."""
    shown = cell(text + "\x1b[31m")
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59, "59s"), (61, "1m"), (3600, "1h"), (4800, "1h 20m"), (90000, "1d 1h"), (86400 * 400, "1y 35d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """A duration of less than an hour has one unit, a longer one at most two."""
    assert formats.duration(seconds) == text


def test_times_are_relative_and_sizes_have_units() -> None:
    """Past times are printed as `3m ago`, and sizes in units of powers of 1024."""
    assert formats.ago((datetime.now(UTC) - timedelta(seconds=200)).isoformat()) == "3m ago"
    sizes = [formats.size(n) for n in (0, 1023, 1536, 300 << 20, 5 << 50, 5 << 60)]
    assert sizes == ["0 B", "1023 B", "1.5 KiB", "300 MiB", "5.0 PiB", "5120 PiB"]


def test_reasons_and_resources_read_as_one_line() -> None:
    """A reason is printed as code and sentence; resources are printed with the acceptable GPU types."""
    assert formats.reason({"code": "held", "detail": {}, "sentence": "held by ann"}) == "held: held by ann"
    resources = {"gpus": 8, "gpu_types": ["a100", "h100"], "cpus": 1.5, "memory_bytes": 2 << 30}
    assert formats.resources(resources) == "a100|h100:8, 1.5 cpus, 2.0 GiB"


def test_a_dry_run_reads_as_a_sentence_and_its_reasons() -> None:
    """A dry run prints where the workload would start and the victims, or that it would wait and the reasons."""
    plan = {
        "document": "a.yaml",
        "rank": 3,
        "over_quota": False,
        "region": "north",
        "machines": ["north/a/m1", "north/a/m2"],
        "victims": ["wl-1"],
        "other_victims": 0,
        "reasons": [],
    }
    assert plan_page(plan) == "a.yaml: would start in north on north/a/m1, north/a/m2, evicting wl-1 (level 3)"
    waits = {"region": None, "over_quota": True, "reasons": [{"code": "no_hardware", "detail": {}, "sentence": "none"}]}
    assert "evicting wl-1 and 1 workload of other tenants (" in plan_page(plan | {"other_victims": 1})
    assert "evicting 2 workloads of other tenants (" in plan_page(plan | {"victims": [], "other_victims": 2})
    assert plan_page(plan | waits) == "a.yaml: would wait (over its tenant's quota)\n  no_hardware: none"


HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\u2028c"


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_data_that_would_command_a_terminal_is_escaped_and_whole(form: str) -> None:
    """JSON and YAML output has no control characters and parses to the same value."""
    text = dump({"label": HOSTILE, "name": "短い"}, form)
    assert visible(text) == text
    assert yaml.safe_load(text) == {"label": HOSTILE, "name": "短い"}


def test_tables_never_pass_controls_on() -> None:
    """Lines of a table have no control characters, for any item."""
    columns = [Column("NAME", lambda item: item)]
    for line in table([HOSTILE, "two\nlines"], columns, None):
        assert visible(line) == line and "\n" not in line
    assert visible("\x1b[31m\x7f\u202e\tok\n") == "^[[31m^?<202e>\tok\n"
