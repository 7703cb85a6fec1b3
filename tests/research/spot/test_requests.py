"""Requests of windows, and the files that they are read from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.spot.request_files import (
    RATE_COLUMNS,
    TOKEN_COLUMNS,
    RateForm,
    RequestError,
    TokenForm,
    columns_of,
    read_rates,
    read_tokens,
)
from research.spot.requests import PoissonRequests, RateRequests, RequestSource, TokenRequests

_SOURCES = (
    PoissonRequests(0.5, 3.0),
    RateRequests((0.0, 2.5, 60.0), 3.0),
    TokenRequests(np.array([0.0, 1.0, 1.0, 8.0]), np.array([1.0, 2.0, 3.0, 4.0]), 10.0, 0.5),
)


@pytest.mark.parametrize("source", _SOURCES)
@given(st.floats(0, 1000), st.floats(1, 500))
def test_any_window(source: RequestSource, start_s: float, length_s: float) -> None:
    """Arrivals are sorted and within the window, and depend on nothing but the arguments."""
    found, again = (source.draw(start_s, length_s, "3 requests 7") for _ in range(2))
    assert found.arrival_s.size == found.service_s.size
    assert (np.diff(found.arrival_s) >= 0).all()
    assert ((found.arrival_s >= 0) & (found.arrival_s < length_s)).all()
    assert (found.service_s > 0).all()
    assert np.array_equal(found.arrival_s, again.arrival_s)
    assert np.array_equal(found.service_s, again.service_s)


@pytest.mark.parametrize("source", _SOURCES)
def test_windows_differ(source: RequestSource) -> None:
    """Another seed gives other requests."""
    one, other = (source.draw(0.0, 1000.0, f"{seed} requests 0") for seed in (-1, 1))
    assert not np.array_equal(one.arrival_s, other.arrival_s)


def test_means() -> None:
    """Rates and service times have the means that were asked for; fractions of requests are not lost."""
    poisson = PoissonRequests(0.5, 3.0).draw(0.0, 1e5, "0")
    assert poisson.arrival_s.size == pytest.approx(5e4, rel=0.02)
    assert PoissonRequests(0.5, 3.0).expected(1e5) == pytest.approx(5e4)
    assert RateRequests((0.0, 0.5), 3.0).expected(6e5) == pytest.approx(2500)
    assert TokenRequests(np.array([0.0, 1.0]), np.array([1.0, 1.0]), 2.0, 0.25).expected(1e5) == pytest.approx(25_000)
    assert poisson.service_s.mean() == pytest.approx(3.0, rel=0.03)
    rates = RateRequests((0.25,), 3.0).draw(0.0, 60 * 1e4, "0")
    assert rates.arrival_s.size == pytest.approx(2500, rel=0.1)
    tokens = TokenRequests(np.array([0.0, 1.0]), np.array([1.0, 1.0]), 2.0, 0.25).draw(0.0, 1e5, "0")
    assert tokens.arrival_s.size == pytest.approx(25_000, rel=0.03)


def test_a_trace_repeats_from_the_window_s_offset() -> None:
    """A window takes its own part of a longer trace; a shorter one is repeated."""
    source = TokenRequests(np.array([0.0, 3.0, 8.0]), np.array([1.0, 2.0, 3.0]), 10.0)
    found = source.draw(2.0, 5.0, "")
    assert (found.arrival_s.tolist(), found.service_s.tolist()) == ([1.0], [2.0])
    found = source.draw(25.0, 20.0, "")
    assert found.arrival_s.tolist() == [3.0, 5.0, 8.0, 13.0, 15.0, 18.0]
    assert found.service_s.tolist() == [3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    minutes = RateRequests((0.0, 5.0, 0.0), 1.0).draw(150.0, 180.0, "").arrival_s
    # Minute 4 of the repeated trace is from 240 s to 300 s.
    assert minutes.size == 5
    assert minutes.min() >= 90
    assert minutes.max() < 150


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_reading_rates(tmp_path: Path) -> None:
    """Counts are scaled and then capped; a missing minute has none; empty lines and other columns are ignored."""
    path = _file(tmp_path / "r.csv", "Requests,x,Time (min)\n30000,,5\n2000000,,6\n\n500,,8\n")
    assert columns_of(path) == RATE_COLUMNS
    assert read_rates(path, RateForm()) == RateRequests((3.0, 90.0, 0.0, 0.05), 10.0)
    assert read_rates(path, RateForm(1.0, 1e6, 2.0)) == RateRequests((3e4, 1e6, 0.0, 500.0), 2.0)


def test_reading_tokens(tmp_path: Path) -> None:
    """Service times are those of prefill and decoding; the trace is one mean distance longer than its last request."""
    path = _file(
        tmp_path / "t.csv",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,400,44\n2023-11-16 18:15:50.6805900,0,300\n2023-11-16 18:15:52.6805900,8000,0\n",
    )
    assert columns_of(path) == TOKEN_COLUMNS
    found = read_tokens(path, TokenForm(decode_per_s=10.0, share=0.5))
    assert isinstance(found, TokenRequests)
    assert found.arrival_s.tolist() == [0.0, 4.0, 6.0]
    assert found.service_s.tolist() == pytest.approx([4.5, 30.0, 2.0])
    assert (found.length_s, found.share) == (9.0, 0.5)


_RATES, _TOKENS = "Time (min),Requests\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", r"columns: a, b: the first line must have the columns Time \(min\),Requests or TIMESTAMP,"),
        ("", "columns: none"),
        (_RATES, "has no rows: give at least one minute"),
        (_RATES + "0,1\n0,1\n", r"line 3: Time \(min\): 0: give whole minutes in increasing order"),
        (
            _RATES + "1e12,1\n",
            r"line 2: Time \(min\): 1e12: give whole minutes in increasing order, up to 10000000",
        ),
        (_RATES + "0.5,1\n", r"line 2: Time \(min\): 0.5: give whole minutes"),
        (_RATES + "0,-4\n", "line 2: Requests: -4: give a number, 0 or more"),
        (_RATES + "0,nan\n", "line 2: Requests: nan: give a number, 0 or more"),
        (_RATES + "0\n", "line 2: has 1 fields: needs Time"),
        (_TOKENS + "today,1,1\n", "line 2: TIMESTAMP: today: give times such as"),
        (
            _TOKENS + "2023-01-01T00:00:00Z,1,1\n2023-01-01T00:00:01,1,1\n",
            "line 3: TIMESTAMP: .*all with or all without",
        ),
        (_TOKENS + "2023-01-02,1,1\n2023-01-01,1,1\n", "line 3: TIMESTAMP: 2023-01-01: is before the row above"),
        (_TOKENS + "2023-01-02,1,1\n2023-01-02,1,1\n", "TIMESTAMP: give requests at two different times"),
        (_TOKENS + "2023-01-02,x,1\n", "line 2: ContextTokens: x: give a number"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    """Each error names the file, the line, the field and the value."""
    path = _file(tmp_path / "r.csv", text)
    with pytest.raises(RequestError, match=f"r.csv: {said}"):
        if columns_of(path) == RATE_COLUMNS:
            read_rates(path, RateForm())
        else:
            read_tokens(path, TokenForm())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, and a file that is not text."""
    with pytest.raises(RequestError, match=r"none.csv: No such file or directory: give a readable CSV file"):
        columns_of(tmp_path / "none.csv")
    with pytest.raises(RequestError, match="Is a directory"):
        columns_of(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match=r"b\.csv: is not text in UTF-8"):
        columns_of(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_bytes(_RATES.encode() + b"0,1\n\xff,1\n")
    with pytest.raises(RequestError, match=r"c\.csv: is not text in UTF-8"):
        read_rates(tmp_path / "c.csv", RateForm())
