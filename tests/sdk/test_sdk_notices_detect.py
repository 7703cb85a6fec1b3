"""Detection of the platform of a process, also if metadata servers do not respond."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mizzen.cadence import PLATFORMS as PRIORS
from mizzen.notices import FileWatcher, Kind, MetadataError, Notice, detect
from mizzen.notices.detection import PLATFORM_OF_PRIOR, PLATFORMS
from tests.sdk.clouds import (
    Aws,
    Azure,
    Cloud,
    Fixed,
    Gcp,
    blackhole,
    dripping,
    refusing,
    says,
    serving,
    silent,
    talking,
)

Where = Callable[..., dict[str, str]]


@pytest.fixture
def at() -> Iterator[Where]:
    """Returns a function that builds an environment with all three metadata servers at one address, as in reality."""
    with ExitStack() as stack:

        def where(cloud: Cloud | str, **more: str) -> dict[str, str]:
            base = cloud if isinstance(cloud, str) else stack.enter_context(serving(cloud))
            return {f"MIZZEN_{name}_METADATA": base for name in ("AWS", "GCP", "AZURE")} | more

        yield where


@pytest.mark.parametrize(
    ("variable", "platform"),
    [
        ("MIZZEN_GRACE_S", "mizzen"),
        ("SLURM_JOB_ID", "slurm"),
        ("RUNPOD_POD_ID", "runpod"),
        ("VAST_CONTAINERLABEL", "vast"),
        ("KUBERNETES_SERVICE_HOST", "kubernetes"),
        ("MIZZEN_NOTICE_FILE", "file"),
    ],
)
def test_the_environment_comes_first(at: Where, variable: str, platform: str) -> None:
    """A variable of a platform determines it without a request to a server. An empty variable is ignored."""
    cloud = Aws()
    assert detect(at(cloud, **{variable: "7"})).platform == platform
    assert cloud.asked == []
    assert detect(at(refusing(), **{variable: ""})).platform == "sigterm"


def test_who_starts_the_process_comes_before_where_it_runs(at: Where) -> None:
    """If variables of several platforms are set, the first in the order of `PLATFORMS` is used."""
    given = {
        "KUBERNETES_SERVICE_HOST": "x", "VAST_CONTAINERLABEL": "x", "RUNPOD_POD_ID": "x", "SLURM_JOB_ID": "x",
        "MIZZEN_GRACE_S": "3",
    }  # fmt: skip
    found = []
    while given:
        found.append(detect(at(refusing(), **given)).platform)
        given.popitem()
    assert tuple(found) == PLATFORMS[:5]


@pytest.mark.parametrize(("cloud", "platform"), [(Aws(), "aws"), (Gcp(), "gcp"), (Azure(), "azure")])
def test_clouds_are_told_apart_at_one_address(at: Where, cloud: Cloud, platform: str) -> None:
    """Each cloud is detected by its protocol, and the returned watcher can be polled immediately."""
    watcher = detect(at(cloud), timeout_s=30)
    assert watcher.platform == platform
    assert watcher.poll() is None


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_user_can_name_the_platform(at: Where, platform: str) -> None:
    """`MIZZEN_PLATFORM` takes precedence over everything else, and no server receives a request."""
    cloud = Gcp()
    assert detect(at(cloud, MIZZEN_PLATFORM=platform, SLURM_JOB_ID="7", MIZZEN_NOTICE_FILE="x")).platform == platform
    assert cloud.asked == []


def test_a_name_of_how_often_a_platform_interrupts_says_who_gives_notices() -> None:
    """`aws-spot` selects AWS, `spot` leads to detection, and in a task of mizzen's agent the agent's notices apply."""
    assert set(PLATFORM_OF_PRIOR) <= set(PRIORS) <= {*PLATFORM_OF_PRIOR, *PLATFORMS}
    assert detect({"MIZZEN_PLATFORM": "aws-spot"}).platform == "aws"
    assert detect({"MIZZEN_PLATFORM": "spot", "SLURM_JOB_ID": "7"}).platform == "slurm"
    assert detect({"MIZZEN_PLATFORM": "aws-spot", "MIZZEN_GRACE_S": "5"}).platform == "mizzen"


def test_a_bad_platform_is_named() -> None:
    """For an invalid MIZZEN_PLATFORM, the error has the variable, its value and the valid values."""
    with pytest.raises(ValueError, match=r"MIZZEN_PLATFORM='moon': must be one of mizzen, slurm, .*, sigterm"):
        detect({"MIZZEN_PLATFORM": "moon"})


def impostor() -> Aws:
    """Returns a server with AWS's protocol but without an AWS instance id, like another cloud's compatible service."""
    cloud = Aws()
    cloud.instance = "vm-1234"
    return cloud


@pytest.mark.parametrize(
    "cloud",
    [
        Fixed(200, "yes"),
        Fixed(200, "1234"),
        Fixed(200, "{}"),
        Fixed(200, '{"name": "x", "vmId": 5, "azEnvironment": "y"}'),
        Fixed(200, "[1]", Metadata_Flavor="Google"),
        Fixed(404, ""),
        Fixed(302, "", Location="/"),
        Fixed(500, ""),
        Fixed(200, "<html></html>", Content_Type="text/html"),
        impostor(),
    ],
    ids=["yes", "number", "object", "no machine", "list", "404", "302", "500", "html", "impostor"],
)
def test_another_server_at_the_address_is_no_cloud(at: Where, cloud: Cloud) -> None:
    """A server whose responses do not match a cloud's protocol is not detected as that cloud."""
    assert detect(at(cloud)).platform == "sigterm"


@pytest.mark.parametrize("talk", [silent, dripping, says(b"\xff\x00\r\n\r\n"), says(b"")])
def test_a_server_that_does_not_answer_is_left_behind(at: Where, talk: Callable[..., None]) -> None:
    """`detect` returns after its timeout although the server never completes a valid response."""
    with talking(talk) as (base, freed):
        assert detect(at(base), timeout_s=0.3).platform == "sigterm"
        assert not freed.is_set()


def test_nothing_at_the_address_is_no_cloud(at: Where) -> None:
    """If connections are refused or time out, the platform is `sigterm`."""
    assert detect(at(refusing())).platform == "sigterm"
    with blackhole() as base:
        assert detect(at(base), timeout_s=0.3).platform == "sigterm"


def test_servers_are_asked_at_the_same_time(at: Where) -> None:
    """The three platforms are probed concurrently: the server responds only after all three have sent a request."""
    cloud = Azure()
    waiting: list[str] = []
    before = set(threading.enumerate())

    def look() -> None:
        waiting.extend(t.name for t in set(threading.enumerate()) - before if t.name.startswith("mizzen-probe-"))

    first = threading.Barrier(3, look)
    answer = cloud.answer

    def together(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        first.wait(30)
        return answer(method, path, headers, body)

    cloud.answer = together  # type: ignore[method-assign]
    assert detect(at(cloud), timeout_s=30).platform == "azure"
    assert sorted(waiting) == ["mizzen-probe-aws", "mizzen-probe-azure", "mizzen-probe-gcp"]


def test_the_platforms_own_variables_are_followed(at: Where) -> None:
    """The address variables of AWS's and Google's SDKs are used unless mizzen's are set; AWS can be disabled."""
    nowhere = refusing()
    with serving(Aws()) as aws, serving(Gcp()) as gcp:
        elsewhere = {"MIZZEN_AZURE_METADATA": nowhere, "GCE_METADATA_HOST": gcp.removeprefix("http://")}
        both = {**elsewhere, "AWS_EC2_METADATA_SERVICE_ENDPOINT": aws}
        assert detect(both, timeout_s=30).platform == "aws"
        assert detect({**both, "AWS_EC2_METADATA_DISABLED": "true"}, timeout_s=30).platform == "gcp"
        assert detect({**both, "MIZZEN_AWS_METADATA": nowhere}, timeout_s=30).platform == "gcp"
        assert detect({**both, "MIZZEN_AWS_METADATA": nowhere, "MIZZEN_GCP_METADATA": nowhere}).platform == "sigterm"


def test_a_bad_address_is_an_error(at: Where) -> None:
    """An invalid address of a metadata server is an error that has the address."""
    with pytest.raises(ValueError, match="metadata address 'ftp://x'"):
        detect(at("ftp://x"))


def test_a_file_says_that_the_machine_goes(tmp_path: Path) -> None:
    """A missing file is no notice. A file gives the notice; kind and end default to preemption after the window."""
    path = tmp_path / "notice"
    watcher = FileWatcher({"MIZZEN_NOTICE_FILE": str(path)}, clock=lambda: 100.0)
    assert watcher.poll() is None
    path.write_text("{}")
    assert watcher.poll() == Notice("file", Kind.PREEMPT, 100.0, 130.0, True, "")
    path.write_text('{"kind": "walltime", "ends_at": 107.5, "words": "lent until now"}')
    assert watcher.poll() == Notice("file", Kind.WALLTIME, 100.0, 107.5, True, "lent until now")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting"),
        ("[]", "must be a JSON object"),
        ('{"kind": "soon"}', "kind='soon': must be one of preempt"),
        ('{"ends_at": "noon"}', "ends_at='noon': must be seconds"),
        ('{"ends_at": true}', "ends_at=True: must be seconds"),
    ],
)
def test_a_file_that_says_nothing_clear_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    """For an invalid notice file, the error has the invalid field; a missing variable is also an error."""
    path = tmp_path / "notice"
    path.write_text(text)
    with pytest.raises(MetadataError, match=says):
        FileWatcher({"MIZZEN_NOTICE_FILE": str(path)}).poll()
    with pytest.raises(ValueError, match="MIZZEN_NOTICE_FILE"):
        FileWatcher({})
