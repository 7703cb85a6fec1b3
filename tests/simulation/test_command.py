"""`mizzen simulate` and `mizzen what-if`: output, reproducibility, rejection of invalid input, and interruption."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from domain.units import format_duration
from mizzen_client.cli.app import run as mizzen
from tests.simulation.live import snapshot, workload

FLEET = """
regions:
  - name: east
    clusters: [{name: main, machines: [{name: m, count: 2, gpus: 8, gpu_type: a100, cpus: 64, memory: 512GiB}]}]
  - name: west
    clusters: [{name: main, machines: [{name: m, count: 1, gpus: 8, gpu_type: a100, cpus: 64, memory: 512GiB}]}]
"""
HEADER = "workload_id,submit_s,tenant,priority,duration_s,tasks,gpus_per_task,gpu_type"
LISTED = [
    "policy", "seed", "workloads", "finished", "allocation_rate", "saturated_allocation_rate", "objective_miss_rate",
    "waits", "preemptions", "lost_gpu_hours", "decisions", "decisions_per_s", "negative_cache_hit_rate", "hourly",
]  # fmt: skip
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a folder with a fleet of three machines, a trace of 30 gangs in two hours, and a trace with bad rows."""
    monkeypatch.chdir(tmp_path)
    _write_files(tmp_path)
    return tmp_path


def _write_files(folder: Path) -> None:
    (folder / "fleet.yaml").write_text(FLEET)
    tenants = ("vision", "nlp")
    rows = [f"w{k:02d},{k * 240},{tenants[k % 2]},{1 + k % 7},{600 + 97 * k},1,{(2, 4, 8)[k % 3]}," for k in range(30)]
    (folder / "trace.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    bad = ("x,-1,vision,1,1,1,1,", "y,1,nlp,1,1,1,1,h100")
    (folder / "bad.csv").write_text("\n".join([HEADER, *rows[:5], *bad]) + "\n")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """Returns the outcomes of all policies and their report; it is shared, because drawing it takes seconds."""
    folder = tmp_path_factory.mktemp("report")
    _write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        return outcome("--policy", "all", "--report", "out.html"), Path("out.html").read_text()


BASE = ["simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv"]


def run(arguments: list[str]) -> int:
    """Returns the exit code of a command, also of a server command, which ends with `sys.exit`."""
    try:
        return mizzen(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def outcome(*more: str, code: int = 0, base: list[str] = BASE) -> Any:
    """Returns the JSON that a command writes."""
    assert run([*base, *more, "--json", "out.json"]) == code
    return json.loads(Path("out.json").read_text())


def test_one_policy_is_one_object(files: Path, capsys: Capture) -> None:
    """One policy gives one object with all documented figures, their hourly lists, and a summary on stdout."""
    found = outcome("--seed", "3")
    assert list(found)[: len(LISTED)] == LISTED
    assert (found["policy"], found["seed"], found["workloads"], found["finished"]) == ("global", 3, 30, 30)
    hours = found["hourly"]
    assert len(hours["allocation_rate"]) == len(hours["start_s"]) == len(hours["waits"]["within_quota"]["1"]["p95"])
    assert hours["start_s"][:2] == [0, 3600]
    assert sum(hours["preemptions"]) == found["preemptions"] > 0
    for table in (found["objective_miss_rate"], found["waits"]):
        assert list(table) == ["within_quota", "over_quota", "all"]
        assert list(table["all"]) == ["1", "2", "3", "4", "5", "6", "7", "all"]
    assert set(found["waits"]["all"]["all"]) == {"p50", "p95", "p99"}
    out = capsys.readouterr().out
    assert out.startswith("POLICY") and "30 of 30" in out


def test_the_same_command_writes_the_same(files: Path) -> None:
    """The output is equal except for the decisions per second; another seed gives another output."""

    def once(seed: str) -> str:
        outcome("--policy", "global", "--policy", "fifo", "--seed", seed)
        return re.sub(r'"decisions_per_s": [0-9.]+', "", Path("out.json").read_text())

    assert once("1") == once("1") != once("2")


@pytest.mark.long
def test_several_policies_are_a_list(files: Path, report: tuple[Any, str]) -> None:
    """Several policies give a list in the order in which they are named, each once."""
    assert [one["policy"] for one in outcome("--policy", "fifo", "--policy", "global", "--policy", "fifo")] == [
        "fifo",
        "global",
    ]
    assert len(report[0]) == 4


def test_bad_rows_are_refused_or_named_and_skipped(files: Path, capsys: Capture) -> None:
    """By default, bad rows are an error; skipped rows are named on stderr and in the JSON."""
    base = ["simulate", "--fleet", "fleet.yaml", "--trace", "bad.csv"]
    assert run(base) == 2
    err = capsys.readouterr().err
    assert "2 bad rows" in err and "line 7: submit_s: '-1': must be a number of at least 0" in err
    found = outcome("--bad-rows", "skip", base=base)
    assert "line 8: gpu_type: 'h100': must be a GPU type of the fleet: a100" in capsys.readouterr().err
    assert [row["line"] for row in found["run"]["bad_rows"]] == [7, 8]
    assert found["workloads"] == 5


@pytest.mark.long
def test_scale_and_slices(files: Path) -> None:
    """`--scale 2` doubles the arrivals; a slice has its own arrivals and the workloads that run at its start."""
    assert outcome("--scale", "2")["workloads"] == 60
    sliced = outcome("--from", "1h", "--to", "5400", "--measure", "1h..90m", "--until", "90m")
    assert (sliced["run"]["started_s"], sliced["run"]["ended_s"]) == (3600, 5400)
    assert sliced["hourly"]["start_s"] == [3600]
    assert 8 <= sliced["workloads"] < 30
    assert sliced["run"]["measured_to_s"] == 5400


def test_the_report_needs_nothing_else(report: tuple[Any, str]) -> None:
    """The report is one file without external resources, with a chart for every figure and a legend of all policies."""
    _, page = report
    assert not re.search(r'(src|href)="(?!#)', page) and "<script" not in page
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(svgs) == page.count("<figure>") > 12
    for svg in svgs:
        ElementTree.fromstring(svg)
    for shown in ("federated", "Not started in time", "priority level", "simulated time, hours", "P95"):
        assert shown in page


def test_the_report_shows_policies_that_are_equal(report: tuple[Any, str]) -> None:
    """Lines of policies with equal figures alternate in their colours, and the chart says that they are equal."""
    found, page = report
    (bound,) = (one for one in found if one["policy"] == "federated")
    alike = [one["policy"] for one in found if one["hourly"]["allocation_rate"] == bound["hourly"]["allocation_rate"]]
    assert alike == ["federated", "cluster"], "with one cluster per region, these two policies must be equal"
    legend = dict(re.findall(r'background:(#\w+)"></span><b>([^<]+)</b>', page))
    assert sorted(legend.values()) == sorted(one["policy"] for one in found)
    figure = re.findall(r"<figure>.*?</figure>", page, re.S)[0]
    assert "federated and cluster are equal" in figure
    lines = re.findall(r'<path d="[^"]*"[^>]*style="([^"]*stroke: (#\w+)[^"]*)"', figure)
    for colour in (colour for colour, name in legend.items() if name in alike):
        assert any("stroke-dasharray" in style for style, of in lines if of == colour)


@pytest.mark.long
def test_eight_runs_have_eight_colours(files: Path) -> None:
    """All policies, without and with a change, have different colours."""
    Path("live.json").write_text(snapshot(workload("waits")).model_dump_json())
    outcome("--policy", "all", "--drain", "west", "--report", "out.html", base=["what-if", "live.json"])
    keys = re.findall(r'background:(#\w+)"></span><b>([^<]+)</b>', Path("out.html").read_text())
    assert len({colour for colour, _ in keys}) == len({name for _, name in keys}) == 8


def test_the_report_says_waits_as_people_do_and_their_rule(files: Path) -> None:
    """The report gives waits in hours and minutes, and shows the run's objectives next to the misses."""
    found = outcome("--param", "objective_s.2=5400", "--report", "out.html")
    assert found["run"]["objective_s"] == {"1": 300, "2": 5400, "3": 1800, "4": 1800}
    page = Path("out.html").read_text()
    assert not re.search(r'wait[^"]*">[^<]* s<', page)
    detail = page[page.index("Objectives and waits by priority") :]
    assert "priority 2: 1h 30m" in detail and "priority 5, 6 and 7: none" in detail
    waits = re.findall(r'data-label="P95 wait">([^<]+)<', detail)
    assert any(re.fullmatch(r"\d+h( \d+m)?", wait) for wait in waits)
    judged = found["run"]["objectives_judged"]["over_quota"]["all"]
    assert judged and f"{found['run']['objectives_missed']['over_quota']['all']} of {judged}<" in detail


def test_tables_fit_a_narrow_screen(report: tuple[Any, str]) -> None:
    """Tables never scroll sideways: each cell has its column's name, which a narrow screen shows next to it."""
    _, page = report
    assert "overflow-x" not in page and "content:attr(data-label)" in page
    tables = re.findall(r"<table.*?</table>", page, re.S)
    assert len(tables) == 3
    for table in tables:
        columns = re.findall(r"<th>([^<]+)</th>", table)
        assert len(columns) <= 9
        for row in re.findall(r"<tr>(<td.*?)</tr>", table, re.S):
            assert re.findall(r'data-label="([^"]+)"', row) == columns


def test_a_what_if_report_leads_with_the_difference(files: Path) -> None:
    """A what-if report begins with the figures without and with the change, and their difference."""
    live = snapshot(workload("runs", "east"), workload("waits"), workload("more"))
    Path("live.json").write_text(live.model_dump_json())
    base = ["what-if", "live.json"]
    plain, changed = outcome("--drain", "west", "--report", "out.html", base=base)
    page = Path("out.html").read_text()
    assert re.search(r"<h2>([^<]+)</h2>", page)[1] == "Effect of drain west"  # type: ignore[index]
    first = page[: page.index("</table>")]
    rows = [re.findall(r">([^<]+)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", first, re.S)]
    assert ["global", "GPU slots", "16", "8", "−8"] in rows
    assert ["global", "workloads finished", "3", "3", "same"] in rows
    (wait,) = (row for row in rows if row[1] == "P95 wait until awarded, within quota")
    before_s, after_s = (one["waits"]["within_quota"]["all"]["p95"] for one in (plain, changed))
    assert wait[2:] == [format_duration(before_s), format_duration(after_s), "+" + format_duration(after_s - before_s)]


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (3600, "1h"),
        (3725, "1h 2m"),
        (182_896, "2d 2h"),
        (86_400 * 1200, "1,200d"),
    ],
)
def test_durations_are_said_in_two_units(seconds: float, says: str) -> None:
    """A duration is written in its largest unit and the next one, without units that are 0."""
    assert format_duration(seconds) == says


def test_a_snapshot_and_a_change_beside_it(files: Path) -> None:
    """With a snapshot and a change, each policy has two runs: without and with the change."""
    live = snapshot(workload("runs", "east"), workload("waits"), workload("more"))
    Path("live.json").write_text(live.model_dump_json())
    base = ["what-if", "live.json"]
    assert outcome(base=base)["run"]["change"] is None
    plain, changed = outcome("--drain", "west", "--set", "quota.vision.a100=8", base=base)
    assert (plain["run"]["change"], changed["run"]["change"]) == (None, "quota.vision.a100=8, drain west")
    assert (plain["run"]["supply"], changed["run"]["supply"]) == ({"a100": 16}, {"a100": 8})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "--fleet and --trace are required, or --instance"),
        (["what-if"], "Missing argument 'SNAPSHOT'"),
        (["what-if", "live.json", "--policy", "slurm"], "--policy slurm: must be one of global, "),
        (
            [*BASE, "--policy", "best"],
            "--policy best: must be one of global, federated, cluster, fifo, slurm, slurm-qos, kueue, ",
        ),
        ([*BASE, "--scale", "0"], "--scale 0: must be a number above 0"),
        ([*BASE, "--scale", "nan"], "--scale nan: must be a number above 0"),
        ([*BASE, "--from", "soon"], "--from soon: must be a number of seconds, or a duration such as 40d"),
        ([*BASE, "--from", "2h", "--to", "1h"], "must start at 0 or later, and end after its start"),
        ([*BASE, "--measure", "1h"], "--measure 1h: must be FROM..TO"),
        ([*BASE, "--param", "batch=0"], "--param batch: must be at least 1, it is '0'"),
        ([*BASE, "--json", "none/out.json"], "none does not exist"),
        (["simulate", "--fleet", "none.yaml", "--trace", "trace.csv"], "No such file"),
        (["simulate", "--fleet", "fleet.yaml", "--trace", "none.csv"], "No such file"),
        (["simulate", "--fleet", "trace.csv", "--trace", "trace.csv"], "fleet file trace.csv"),
        ([*BASE, "--bad-rows", "guess"], "guess"),
    ],
)
def test_wrong_input_is_2_and_named(files: Path, capsys: Capture, arguments: list[str], says: str) -> None:
    """Invalid input exits with code 2, nothing on stdout, and one line on stderr that says what would be right."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err


def test_a_fleet_with_pools(files: Path, capsys: Capture) -> None:
    """With pools, the run reports machine costs and counts, and policies that do not support pools are rejected."""
    pools = """
providers:
  sim:
    zones: {za: {region: west, counts: [2, 0], gap_s: 1800}}
    machine_types: {p4: {gpus: 8, gpu_type: a100, cpus: 64, memory: 512GiB, usd_per_h: 24}}
pools: [{region: west, name: burst, max_size: 2, idle_s: 300}]
"""
    (files / "fleet.yaml").write_text(FLEET + pools)
    found = outcome("--report", "out.html")
    assert found["run"]["pools"]["launched"] > 1
    assert found["run"]["usd"] == found["run"]["usd_by"]["spot"] > 0
    assert sum(found["hourly"]["usd"]) == pytest.approx(found["run"]["usd"])
    assert f"${found['run']['usd']:,.2f}" in Path("out.html").read_text()
    assert run([*BASE, "--policy", "all"]) == 2
    err = capsys.readouterr().err
    assert "--policy federated: must be one of global, fifo for a fleet with pools" in err


def test_every_bad_field_of_a_fleet_file_is_named(files: Path, capsys: Capture) -> None:
    """Each of three mistakes in a fleet file is reported with its path and value."""
    wrong = FLEET.replace("gpu_type: a100", "gpu_type: a100, size: 3", 1)
    (files / "wrong.yaml").write_text(wrong + "quotas: {of_supply: -1}\nsimulation: {eviction_s: soon}\n")
    assert run(["simulate", "--fleet", "wrong.yaml", "--trace", "trace.csv"]) == 2
    err = capsys.readouterr().err
    for path in (
        "regions[0].clusters[0].machines[0].size: unknown key; valid keys are count, cpus",
        "quotas.of_supply: must be at least 0, it is -1",
        "simulation.eviction_s: must be a number, it is 'soon'",
    ):
        assert path in err


def _long_trace(folder: Path) -> None:
    rows = [f"w{k},{k},vision,{1 + k % 7},{5000 + k % 1000},1,4," for k in range(20_000)]
    (folder / "trace.csv").write_text("\n".join([HEADER, *rows]) + "\n")


def test_an_interrupted_run_says_how_far_it_came(files: Path) -> None:
    """After Ctrl-C the exit code is 130, stderr has the simulated time, and the partial outcome is marked as such."""
    _long_trace(files)
    quick = "from server import progress; progress._LINE_EVERY_S = 0.5; from mizzen.cli.main import main; main()"
    command = [sys.executable, "-c", quick, *BASE, "--json", "out.json", "--policy", "all"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # On a pipe, progress is plain lines.
        assert re.match(r"global: simulated .*, \d+ of 20,000 workloads finished, [\d,]+ queued", first)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 130
    told = re.search(r"interrupted: global: simulated (\S+), ([\d,]+) of 20,000 workloads finished", err)
    assert told is not None
    (found,) = json.loads(Path("out.json").read_text())
    assert found["run"]["interrupted"] is True
    assert found["finished"] == int(told[2].replace(",", "")) < 20_000
    assert found["run"]["workloads_in_all"] == 20_000


def test_a_terminal_gets_a_progress_bar(files: Path) -> None:
    """On a terminal, stderr has one progress bar per policy, which is redrawn."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mizzen.cli.main", *BASE, "--policy", "fifo"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=env) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
        assert process.wait(timeout=150) == 0
    os.close(ours)
    assert "━" in shown.decode() and "of 30 workloads finished" in shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # The other end of the terminal is closed.
        return b""
