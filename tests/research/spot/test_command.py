"""`mizzen spot replay`: its table, its JSON, its reproducibility, and its errors."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from research.spot import runs as spot_runs
from research.spot.commands import spot
from research.spot.policies import POLICIES

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    for zone, period in (("x-1a", 5), ("x-1b", 7), ("y-1a", 3)):
        counts = [2 * (k % period > 0) for k in range(60)]
        body = {"metadata": {"gap_seconds": 300}, "data": counts}
        (tmp_path / "traces" / f"{zone}_v100_1.json").write_text(json.dumps(body))
    return tmp_path


def run(*arguments: str) -> int:
    """Runs the command; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        spot.main(["replay", *arguments])
    return ended.value.code or 0


USUAL = ("--traces", "traces", "--window-h", "2", "--windows", "5")


def test_table_and_json(folder: Path, capsys: Capture) -> None:
    """All policies are in the table and in the document; the same command writes the same bytes."""
    assert run(*USUAL, "--policy", "all", "--json", "out.json") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1 : 1 + len(POLICIES)]] == list(POLICIES)
    body = json.loads((folder / "out.json").read_text())
    assert [one["policy"] for one in body["policies"]] == list(POLICIES)
    assert (body["zones"], body["ticks"], body["unlimited"]) == (["x-1a", "x-1b", "y-1a"], 60, False)
    assert body["windows"] == {"ticks": 24, "count": 5, "seed": 0, "window_s": 7200.0}
    assert not body["interrupted"]
    for one in body["policies"]:
        assert len(one["windows"]) == 5
        mean = sum(window["cost"] for window in one["windows"]) / 5
        assert one["means"]["cost"]["mean"] == pytest.approx(mean)
        short = [window["shortfall"] for window in one["windows"]]
        for window, seconds in zip(one["windows"], short, strict=True):
            assert seconds["total_s"] == pytest.approx((1 - window["availability"]) * 7200)
        assert one["shortfall"] == {field: sum(seconds[field] for seconds in short) for field in short[0]}
    assert run(*USUAL, "--policy", "all", "--json", "again.json") == 0
    assert (folder / "again.json").read_bytes() == (folder / "out.json").read_bytes()


def test_options_change_the_result(folder: Path, capsys: Capture) -> None:
    """Each option has an effect; a policy that is given twice is replayed once."""

    def cost(*arguments: str, policy: str = "spothedge") -> float:
        assert run(*USUAL, "--policy", policy, "--policy", policy, "--json", "-", *arguments) == 0
        (one,) = json.loads(capsys.readouterr().out)["policies"]
        return one["means"]["cost"]["mean"]

    assert cost("--outage-price-s", "12000", policy="spothedge+") > cost("--outage-price-s", "0", policy="spothedge+")
    usual = cost()
    changes = (("--target", "2"), ("--overprovision", "2"), ("--cold-start-s", "200"), ("--od-price-ratio", "2"),
               ("--seed", "1"), ("--unlimited",), ("--refused-after-s", "60"), ("--granted-after-s", "60"),
               ("--refused-share", "0.5"))  # fmt: skip
    assert usual not in [cost(*change) for change in changes]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--traces", "none"), "--traces: none: is not a folder"),
        (("--policy", "best"), "--policy: best: no such policy: give all, or one of spothedge,"),
        (("--window-h", "6"), "--window-h: 6: the trace has 60 ticks of 300 s: give 0.08333 to 5 hours"),
        (("--window-h", "0.05"), "--window-h: 0.05: the trace has 60 ticks"),
        (("--window-h", "nan"), "must be a finite number above 0"),
        (("--cold-start-s", "-1"), "-1.0: must be a finite number, 0 or more"),
        (("--od-price-ratio", "0"), "must be a finite number above 0"),
        (("--refused-after-s", "-1"), "-1.0: must be a finite number, 0 or more"),
        (("--refused-share", "1"), "'--refused-share': 1.0 is not in the range 0<=x<1"),
        (("--outage-price-s", "-1"), "-1.0: must be a finite number, 0 or more"),
        (("--windows", "0"), "'--windows': 0 is not in the range x>=1"),
        (("--target", "0"), "'--target': 0 is not in the range x>=1"),
        (("--json", "missing/out.json"), "--json: missing/out.json: folder"),
    ],
)
def test_errors(folder: Path, capsys: Capture, arguments: tuple[str, ...], said: str) -> None:
    """An invalid option ends the command with exit code 2, and the message names the option and the value."""
    assert run(*USUAL, "--policy", "all", *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_damaged_traces(folder: Path, capsys: Capture) -> None:
    """A damaged file, and files with different ticks, are refused by name."""
    path = folder / "traces" / "x-1b_v100_1.json"
    path.write_text(path.read_text()[:-10])
    assert run(*USUAL, "--policy", "all") == 2
    assert "--traces: traces/x-1b_v100_1.json: is not a valid trace file" in capsys.readouterr().err
    path.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [1]}))
    assert run(*USUAL, "--policy", "all") == 2
    assert "x-1b_v100_1.json: gap_seconds: 60: x-1a_v100_1.json has 300: all files need" in capsys.readouterr().err


def _document(folder: Path, *arguments: str) -> dict:
    assert run(*USUAL, "--json", "out.json", *arguments) == 0
    return json.loads((folder / "out.json").read_text())


@pytest.mark.long
def test_requests(folder: Path, capsys: Capture) -> None:
    """Latency has a table and is in the document; availability and cost stay the same; each option has an effect."""
    plain = _document(folder, "--policy", "spothedge", "--policy", "even-spread")
    usual = ("--policy", "spothedge", "--policy", "even-spread", "--requests", "poisson:2")
    found = _document(folder, *usual)
    capsys.readouterr()
    assert found["requests"] == {
        "form": "poisson", "rate_per_s": 2.0, "service_s": 10.0, "concurrency": 4, "timeout_s": 100.0,
    }  # fmt: skip
    for before, after in zip(plain["policies"], found["policies"], strict=True):
        latency = after.pop("latency")
        assert after == before
        assert len(latency["windows"]) == 5
        assert latency["means"]["requests"]["mean"] == pytest.approx(2 * 7200, rel=0.05)
        for one in latency["windows"]:
            assert 0 < one["p50_s"] <= one["p90_s"] <= one["p99_s"] <= 100
            assert one["failed_share"] == (one["failed_waiting"] + one["failed_running"]) / one["requests"]
    assert _document(folder, *usual, "--windows", "5") == _document(folder, *usual)
    out = capsys.readouterr().out
    assert "P99 S" in out
    assert "a failed request counts as 100 s" in out

    def p50_s(*arguments: str) -> float:
        body = _document(folder, "--policy", "spothedge", "--requests", "poisson:2", "--windows", "1", *arguments)
        return body["policies"][0]["latency"]["means"]["p50_s"]["mean"]

    changes = (("--service-s", "5"), ("--concurrency", "8"), ("--timeout-s", "50"), ("--seed", "1"))
    assert p50_s() not in [p50_s(*change) for change in changes]


def test_request_files(folder: Path, capsys: Capture) -> None:
    """Both forms of files, with the defaults of the documentation."""
    (folder / "rate.csv").write_text("Time (min),Requests\n" + "".join(f"{k},{k % 7 * 10_000}\n" for k in range(50)))
    (folder / "llm.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:{k // 60:02}:{k % 60:02}.0000001,400,30\n" for k in range(600))
    )
    usual = ("--policy", "on-demand", "--requests")
    rates = _document(folder, *usual, "rate.csv")
    assert rates["requests"] == {
        "form": "requests per minute", "file": "rate.csv", "request_scale": 1e-4, "request_cap": 90.0,
        "service_s": 10.0, "concurrency": 4, "timeout_s": 100.0,
    }  # fmt: skip
    assert rates["policies"][0]["latency"]["means"]["requests"]["mean"] == pytest.approx(360, rel=0.05)
    capped = _document(folder, *usual, "rate.csv", "--request-scale", "1", "--request-cap", "1")
    assert capped["policies"][0]["latency"]["means"]["requests"]["mean"] == pytest.approx(120 * 6 / 7, rel=0.05)
    tokens = _document(folder, *usual, "llm.csv")
    assert tokens["requests"] == {
        "form": "tokens", "file": "llm.csv", "request_scale": 1.0, "prefill_tokens_per_s": 4000.0,
        "decode_tokens_per_s": 30.0, "concurrency": 16, "timeout_s": 100.0,
    }  # fmt: skip
    assert tokens["policies"][0]["latency"]["means"]["p50_s"]["mean"] == pytest.approx(1.1)
    slow = _document(folder, *usual, "llm.csv", "--prefill-tokens-per-s", "400", "--decode-tokens-per-s", "15")
    assert slow["policies"][0]["latency"]["means"]["p50_s"]["mean"] == pytest.approx(3)
    thin = _document(folder, *usual, "llm.csv", "--request-scale", "0.5")["policies"][0]["latency"]["means"]
    assert thin["requests"]["mean"] == pytest.approx(3600, rel=0.1)


def test_sweeps(folder: Path, capsys: Capture) -> None:
    """Each case of a sweep has the results of the same command with that value.

    A policy that does not use the setting has one case, without a value.
    """
    usual = ("--policy", "spothedge", "--policy", "round-robin")
    found = _document(folder, *usual, "--sweep", "cold-start-s=0,60,120,60", "--sweep", "overprovision=0,2",
                      "--sweep", "od-price-ratio=2", "--sweep", "refused-after-s=0,60")  # fmt: skip
    out = capsys.readouterr().out
    for header in ("POLICY       COLD-START-S ", "POLICY       OVERPROVISION ", "POLICY       OD-PRICE-RATIO "):
        assert header in out
    fields = {one["field"]: one["cases"] for one in found["sweeps"]}
    assert [(one["policy"], one["value"]) for one in fields["cold-start-s"]] == [
        (policy, value) for policy in ("spothedge", "round-robin") for value in (0, 60, 120)
    ]
    assert [(one["policy"], one["value"]) for one in fields["overprovision"]] == [
        ("spothedge", 0), ("spothedge", 2), ("round-robin", None),
    ]  # fmt: skip
    for field, cases in fields.items():
        for one in cases:
            value = one.pop("value")
            changed = () if value is None else (f"--{field}", f"{value:g}")
            (same,) = _document(folder, "--policy", one["policy"], *changed)["policies"]
            assert one == same


@pytest.mark.long  # `test_report` has sweeps, and the other files the values of the policies.
def test_the_frontier(folder: Path, capsys: Capture) -> None:
    """A sweep of the outage price: a row for each price, and one for each policy without it and for each optimum."""
    usual = ("--policy", "spothedge+", "--policy", "spothedge", "--policy", "on-demand")
    optimum = ("--optimum", "--optimum-availability", "90")
    found = _document(folder, *usual, *optimum, "--sweep", "outage-price-s=0,4800,120000", "--report", "out.html")
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    (sweep,) = found["sweeps"]
    cases = sweep["cases"]
    points = [("spothedge+", 0), ("spothedge+", 4800), ("spothedge+", 120000), ("spothedge", None), ("on-demand", None)]
    assert [(one["policy"], one["value"]) for one in cases] == points
    assert "OUTAGE-PRICE-S" in table[0] and table[0].endswith("OVER OPTIMUM")
    for one, line in zip(cases, table[1:6], strict=True):
        row = line.split()
        short = one["shortfall"]
        shares = [100 * short[field] / short["total_s"] for field in ("first_s", "used_fell_s", "all_fell_s")]
        assert row[:2] == [one["policy"], "-" if one["value"] is None else f"{one['value']:g}"]
        assert row[-4:-1] == [f"{share:.1f}" for share in shares]
        assert row[-1] == f"{one['cost_over_optimum']['by zone']:.2f}"
    assert [line.split("  ")[0] for line in table[6:8]] == ["optimum, by zone", "optimum, aggregate"]
    costs = [one["means"]["cost"]["mean"] for one in cases[:3]]
    assert costs[0] < costs[1] < costs[2]
    usual_price = [one for one in cases if one["value"] in (4800, None)]
    assert usual_price == [
        {"value": one["value"], **of} for one, of in zip(usual_price, found["policies"], strict=True)
    ]
    page = (folder / "out.html").read_text()
    (chart,) = (one for one in page.split("<figure>") if "Availability and cost by outage-price-s" in one)
    assert all(f">{value}</text>" in chart for value in ("0", "4800", "120000", "optimum"))


@pytest.mark.long
def test_the_optimum_of_other_settings(folder: Path, capsys: Capture) -> None:
    """A sweep that changes the optimum is not compared with the optimum of the main table."""
    optimum = ("--optimum", "--optimum-availability", "90", "--windows", "2")
    found = _document(folder, "--policy", "spothedge", *optimum, "--sweep", "cold-start-s=60,120")
    assert "OVER OPTIMUM" not in capsys.readouterr().out
    assert "cost_over_optimum" in found["policies"][0]
    assert all("cost_over_optimum" not in one for one in found["sweeps"][0]["cases"])


@pytest.mark.long
def test_the_optimum(folder: Path, capsys: Capture) -> None:
    """Both readings are printed beside the cost of each policy over them."""
    usual = ("--policy", "all", "--optimum", "--optimum-availability", "90")
    found = _document(folder, *usual)
    by_zone, aggregate = found["optimum"]["readings"]
    assert (found["optimum"]["availability"], by_zone["reading"], aggregate["reading"]) == (0.9, "by zone", "aggregate")
    assert len(by_zone["windows"]) == len(aggregate["windows"]) == 5
    assert aggregate["means"]["cost"]["mean"] <= by_zone["means"]["cost"]["mean"] * 1.01
    for one in by_zone["windows"]:
        assert one["availability"] >= 0.9 - 1e-6
        assert one["gap"] <= 0.01
    for one in found["policies"]:
        ratio = one["means"]["cost"]["mean"] / by_zone["means"]["cost"]["mean"]
        assert one["cost_over_optimum"]["by zone"] == pytest.approx(ratio)
    out = capsys.readouterr().out
    assert "COST %, BY ZONE" in out
    assert "cheapest plan with at least 90 % availability" in out


@pytest.mark.long
def test_report(folder: Path, capsys: Capture) -> None:
    """One file without links to others, with the same bytes each time; a chart for each policy's window and sweep."""
    usual = ("--policy", "spothedge", "--policy", "on-demand", "--requests", "poisson:0.5", "--optimum",
             "--optimum-availability", "90", "--sweep", "cold-start-s=60,120", "--windows", "2")  # fmt: skip
    assert run(*USUAL, *usual, "--report", "out.html") == 0
    page = (folder / "out.html").read_text()
    # Availability and cost, latency, failures, a window for each policy, and four charts of the sweep.
    assert page.count("<figure>") == 3 + 2 + 4
    for words in ("Availability by cold-start-s", "P99 latency by cold-start-s", "<h2>Optimum</h2>", "INTERRUPTED"):
        assert words in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "NaN" not in page
    assert run(*USUAL, *usual, "--report", "again.html") == 0
    assert (folder / "again.html").read_bytes() == (folder / "out.html").read_bytes()
    assert run(*USUAL, "--policy", "even-spread", "--report", "small.html") == 0
    small = (folder / "small.html").read_text()
    assert small.count("<figure>") == 2
    assert "failed requests" not in small


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--requests", "none.csv"), "--requests: none.csv: No such file or directory"),
        (("--requests", "traces"), "--requests: traces: Is a directory"),
        (("--requests", "bad.csv"), "--requests: bad.csv: columns: minute, requests: the first line must have"),
        (("--requests", "poisson:-1"), "--requests: poisson:-1: the rate must be a number of requests per second"),
        (("--requests", "poisson:1e9"), "--requests: poisson:1e9: about 7.2e+12 requests in each window: at most"),
        (("--requests", "poisson"), "--requests: poisson: the rate must be"),
        (("--requests", "poisson:1", "--timeout-s", "0"), "must be a finite number above 0"),
        (("--requests", "poisson:1", "--concurrency", "0"), "'--concurrency': 0 is not in the range"),
        (("--requests", "poisson:1", "--request-scale", "2"), "--request-scale: 2: has no effect with poisson:RATE"),
        (("--requests", "llm.csv", "--service-s", "2"), "--service-s: 2: has no effect with a trace of"),
        (("--requests", "llm.csv", "--request-scale", "2"), "--request-scale: 2: a trace of single requests can only"),
        (("--timeout-s", "2"), "--timeout-s: 2: has no effect without --requests: give --requests as well"),
        (("--sweep", "target=1,2"), "--sweep: target: no such field: give FIELD=VALUE,... with one of overprovision,"),
        (("--sweep", "cold-start-s"), "--sweep: cold-start-s: no value: give numbers of seconds, 0 or more"),
        (("--sweep", "cold-start-s=60,-1"), "--sweep: cold-start-s: -1: give numbers of seconds, 0 or more"),
        (("--sweep", "overprovision=1.5"), "--sweep: overprovision: 1.5: give whole numbers, 0 or more"),
        (("--sweep", "outage-price-s=-1"), "--sweep: outage-price-s: -1: give numbers of seconds, 0 or more"),
        (("--sweep", "od-price-ratio=0"), "--sweep: od-price-ratio: 0: give numbers above 0"),
        (("--sweep", "od-price-ratio=2", "--sweep", "od-price-ratio=3"), "--sweep: od-price-ratio: is given twice"),
        (("--optimum",), "first cold start: give at most 98.33"),
        (("--optimum", "--optimum-availability", "101"), "101.0 is not in the range"),
        (("--optimum-availability", "90"), "--optimum-availability: 90: has no effect without --optimum"),
        (("--report", "missing/out.html"), "--report: missing/out.html: folder"),
        (("--json", "a", "--report", "a"), "--report: a: is also --json"),
    ],
)  # fmt: skip
def test_errors_of_requests_sweeps_and_reports(
    folder: Path, capsys: Capture, arguments: tuple[str, ...], said: str
) -> None:
    """An invalid option ends the command with exit code 2 before anything is replayed or written."""
    (folder / "bad.csv").write_text("minute,requests\n0,1\n")
    (folder / "llm.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4,4\n2023-11-16 18:15:47,4,4\n"
    )
    assert run(*USUAL, "--policy", "all", *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["bad.csv", "llm.csv", "traces"]


@pytest.mark.parametrize(
    ("windows", "policies", "cases", "missing"),
    [
        (3, [], 0, "spothedge, round-robin, the sweep of cold-start-s, the optimum"),
        (7, ["spothedge"], 0, "round-robin, the sweep of cold-start-s, the optimum"),
        (18, ["spothedge", "round-robin"], 1, "the sweep of cold-start-s, the optimum"),
        (20, ["spothedge", "round-robin"], 2, "the optimum"),
    ],
)
def test_ctrl_c(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, windows: int, policies: list[str], cases: int,
    missing: str,
) -> None:  # fmt: skip
    """What is complete is printed and written; the message and the report name what is missing."""
    replayed = 0

    def replay_one(*arguments):
        nonlocal replayed
        replayed += 1
        if replayed == windows:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    original = spot_runs.replay_one
    monkeypatch.setattr(spot_runs, "replay_one", replay_one)
    usual = ("--policy", "spothedge", "--policy", "round-robin", "--sweep", "cold-start-s=60", "--optimum",
             "--optimum-availability", "90", "--json", "out.json", "--report", "out.html")  # fmt: skip
    assert run(*USUAL, *usual) == 130
    captured = capsys.readouterr()
    assert captured.err == f"mizzen: interrupted: not complete, and not shown: {missing}\n"
    body = json.loads((folder / "out.json").read_text())
    assert body["interrupted"]
    assert [one["policy"] for one in body["policies"]] == policies
    assert sum(len(one["cases"]) for one in body.get("sweeps", [])) == cases
    assert "optimum" not in body
    assert bool(captured.out) == (folder / "out.html").exists() == bool(policies)
    if policies:
        assert f"Interrupted: not complete, and not shown: {missing}" in (folder / "out.html").read_text()
