"""Settings and fleet files with mistakes: every error names the field, the value and what would be right."""

from pathlib import Path

import pytest

from domain.ids import NAME_RULE
from infra.config.settings import Settings, load_settings
from infra.errors import ConfigurationError
from infra.stack.fleet import load_fleet
from server.up import run_up

FLEET = """
regions:
  - name: East!
    buckt: x
    clusters:
      - name: a
        machines: [{name: n, count: lots, gpus: 70, gpu_typ: a100}, {name: m, gpus: 1}]
"""
TYPED = "gpus and gpu_type go together: set gpu_type if gpus is above 0, and only then"
BROKEN = {
    "no YAML": (b"regions: [1,\nb: 2", "line 2, column "),
    "no text": (b"\xff\xfe", "is not text (byte 0xff at position 0 is not UTF-8)"),
    "no mapping": (b"- 1", "must be a mapping of keys to values, it is [1]"),
    "nothing": (b"", "regions: is missing"),
}


def test_a_fleet_files_mistakes_are_all_named(tmp_path: Path) -> None:
    """Each error has the field's path, its value and what would be right, without text of the parser library."""
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    with pytest.raises(ConfigurationError) as caught:
        load_fleet(file)
    head, *lines = str(caught.value).splitlines()
    assert head == f"fleet file {file}:"
    assert [line.strip() for line in lines] == [
        f"regions[0].name: must be {NAME_RULE}, it is 'East!'",
        "regions[0].clusters[0].machines[0].gpus: must be at most 62, it is 70",
        "regions[0].clusters[0].machines[0].count: must be a whole number, it is 'lots'",
        "regions[0].clusters[0].machines[0].gpu_typ: unknown key; did you mean 'gpu_type'?",
        f"regions[0].clusters[0].machines[1]: {TYPED}",
        "regions[0].buckt: unknown key; did you mean 'bucket'?",
    ]


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_files_that_are_no_mapping(tmp_path: Path, body: bytes, message: str) -> None:
    """A file that is not YAML, text or a mapping is reported as such, with the position."""
    file = tmp_path / "fleet.yaml"
    file.write_bytes(body)
    with pytest.raises(ConfigurationError) as caught:
        load_fleet(file)
    assert message in str(caught.value) and "codec" not in str(caught.value)


async def test_a_wrong_store_of_a_cluster_is_named(tmp_path: Path) -> None:
    """`mizzen up` names the cluster and the forms of URLs, and starts nothing."""
    file = tmp_path / "fleet.yaml"
    file.write_text("regions: [{name: e, clusters: [{name: a, store_url: /srv/a, machines: [{name: m}]}]}]\n")
    with pytest.raises(ConfigurationError, match=r"cluster e/a: store_url: bucket URL '/srv/a': the scheme must be"):
        await run_up(Settings(fleet=file, data_dir=tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_on_is_a_key(tmp_path: Path) -> None:
    """It needs no quotes, although YAML 1.1 reads it as true; it stays true as a value."""
    file = tmp_path / "mizzen.yaml"
    file.write_text(
        "notify: {smtp: {host: a, sender: a@b.c}, alerts: [{email: a@b.c, on: [machine.lost]}]}\ntrust_tenants: on\n"
    )
    settings = load_settings(file)
    assert settings.notify.alerts[0].on == ("machine.lost",) and settings.trust_tenants


def test_a_settings_files_mistakes_are_all_named(tmp_path: Path) -> None:
    """Settings files are reported like fleet files, and no error repeats a value that may be a password."""
    file = tmp_path / "mizzen.yaml"
    file.write_text(
        "scheduler: {scan_intervl_s: 3, batch: -1}\napi: 7\nlimits: {streams: x}\ntemporal: {api_key: [hunter2]}\n"
        "database: {url: hunter2}\n"
    )
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file)
    text = str(caught.value)
    for line in (
        "api: must be a mapping of keys to values, it is 7",
        "limits.streams: must be a whole number, it is 'x'",
        "scheduler.batch: must be greater than 0, it is -1",
        "scheduler.scan_intervl_s: unknown key; did you mean 'scan_interval_s'?",
        "temporal.api_key: must be text",
        "database: must be text",
    ):
        assert line in text
    assert "hunter2" not in text
