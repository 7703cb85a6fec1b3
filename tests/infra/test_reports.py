"""The parts of reports: tables in three forms, the page, charts; and the demo's report, which is made of them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from infra.reports.charts import panels
from infra.reports.page import page
from infra.reports.tables import ALL, ReportTable, write_between
from server.demo.checks import Check
from server.demo.facts import AttemptFact, Facts, Hold
from server.demo.report import render


def test_a_table_has_three_forms() -> None:
    """The same table for a terminal, for Markdown and for a page, which escapes texts and names each cell's column."""
    table = ReportTable(["NAME", "A < B"], [["x & y", "1"], ["z", "20"]], "first\nsecond", texts=ALL)
    assert str(table) == "NAME   A < B\nx & y  1\nz      20\nfirst\nsecond"
    assert table.markdown() == "| NAME | A < B |\n| --- | --- |\n| x & y | 1 |\n| z | 20 |"
    html = table.html()
    assert html.startswith('<table class="texts9"><tr><th>NAME</th><th>A &lt; B</th></tr>')
    assert '<td data-label="NAME">x &amp; y</td><td data-label="A &lt; B">1</td>' in html
    assert html.endswith('<p class="muted">first<br>second</p>')
    assert str(ReportTable(["A"], [])) == "A" and ReportTable(["A"], []).html().endswith("</table>")


def test_text_around_the_markers_stays(tmp_path: Path) -> None:
    """The generated part of a document is replaced, also in a document that does not exist yet."""
    path = tmp_path / "new" / "page.md"
    for text in ("one", "two"):
        write_between(path, "<!-- a -->", "<!-- b -->", text)
    assert path.read_text() == "# Experiments\n\n<!-- a -->\n\ntwo\n\n<!-- b -->\n"


def test_charts_have_one_legend() -> None:
    """Several charts are one picture with the title of each, and one legend for all."""
    svg = panels({name: lambda axes: axes.plot([1], label="shared") for name in ("left", "right", "below")}, 2.0)
    texts = [one.text for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("}text")]
    assert [texts.count(text) for text in ("left", "right", "below", "shared")] == [1, 1, 1, 1]


def test_the_report_of_the_demo() -> None:
    """One page without links to others: bars with names and explanations, stops, moves, losses, checks and attempts."""
    holds = [
        Hold(f"{region}/a/m", slot, "wl-1", "digits & co", "vision", attempt, "train/0", begin_s, begin_s + 20.0)
        for region, attempt, begin_s in (("east", 1, 100.0), ("west", 2, 130.0))
        for slot in (0, 1)
    ]
    attempts = tuple(
        AttemptFact("wl-1", "digits & co", attempt, region, 0, 7, None, begin_s, begin_s + 20.0, outcome)
        for region, attempt, begin_s, outcome in (("east", 1, 100.0, "machine_lost"), ("west", 2, 130.0, "completed"))
    )
    lost = {"at_s": 121.0, "kind": "machine.lost", "machine": "east/a/m"}
    machines = (("east/a/m", "east", "a100", 2), ("west/a/m", "west", "a100", 2), ("west/a/n", "west", None, 0))
    workloads = {"wl-1": {"tenant": "vision", "submitted_s": 99.0, "finished_s": 150.0}}
    checks = [Check("nothing is lost", True, "0 <"), Check("all end", False, "1 of 2")]
    found = render(Facts(workloads, tuple(holds), attempts, (lost,), machines), checks)
    assert not re.search(r'(src|href)="(?!#)', found) and "<script" not in found
    svg = re.findall(r"<svg.*?</svg>", found, re.S)[0]
    titles = [one.text for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("svg}title")]
    assert {title: titles.count(title) for title in titles if title} == {
        "digits & co attempt 1, train/0: 20.0 s on east/a/m slot 0": 1,
        "digits & co attempt 1, train/0: 20.0 s on east/a/m slot 1": 1,
        "digits & co attempt 2, train/0: 20.0 s on west/a/m slot 0": 1,
        "digits & co attempt 2, train/0: 20.0 s on west/a/m slot 1": 1,
        "digits & co attempt 1: machine_lost": 1,
        "digits & co moves from east to west": 1,
        "east/a/m lost": 1,
    }
    for shown in ("digits &amp; co #2", "a/m (a100)  0", "a/n (cpu)", "east", "seconds"):
        assert f">{shown}</text>" in svg
    assert '<td class="fails" data-label="">fails</td>' in found and ">0 &lt;</td>" in found
    assert ">31.0 to 51.0 s</td>" in found
    assert page("demo", []).count("@media (max-width:900px)") == 1


def test_processes_elsewhere_use_the_checkout(checkout: Path, tmp_path: Path) -> None:
    """A process that starts in another folder imports research and references of the checkout, not an older copy."""
    code = "import research, reference; print(research.__file__, reference.__file__)"
    path = os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [str(checkout / name / "__init__.py") for name in ("research", "reference")]
