"""Workload documents: parsing, normalisation, and an error with a path for each kind of mistake."""

import json
from typing import Any

import pytest
from sqlalchemy import delete

from api.documents.document_of import document_of
from api.documents.syntax import MAX_NODES, Malformed, load_json, load_yaml
from api.documents.workload import read_workload
from domain.spec import CheckpointSpec, JobSpec, LimitsSpec, ResourceSpec, WorkloadSpec
from infra.db.tenants import ApiKey, Archive, Secret, Tenant
from tests.api.documents import JOB, job, resources
from tests.api.world import ARCHIVE_SHA256, FOLDERS_SHA256, GIB, ApiWorld, as_yaml, document


def errors_of(answer: Any) -> dict[str, str]:
    """Returns the error messages by path."""
    return {e["path"]: e["message"] for e in answer.json()["errors"]}


async def refusal(world: ApiWorld, body: object, key: str = "operator") -> dict[str, str]:
    async with world.client(key) as client:
        answer = await client.post("/v1/workloads", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:mizzen:problem:invalid-document"
    return errors_of(answer)


def test_example_becomes_this_specification() -> None:
    """Reading the example document normalises its durations, sizes and preferences."""
    draft = read_workload(load_yaml(as_yaml(document())), None)
    assert draft.problems == []
    assert draft.spec() == WorkloadSpec(
        name="digits",
        tenant="vision",
        labels={"team": "demo"},
        tables=("digits",),
        checkpoint=CheckpointSpec(interval_s=5, grace_s=10, keep=2),
        limits=LimitsSpec(max_runtime_s=3600, max_silence_s=120, retries=1),
        jobs=(
            JobSpec(
                name="trainer",
                role="trainer",
                tasks=2,
                resources=ResourceSpec(gpus=1, gpu_types=("a100", "v100"), cpus_milli=1000, memory_bytes=512 << 20),
                argv=("python3", "train.py"),
                env={"EPOCHS": "10"},
                secrets={"HF_TOKEN": "hf-token"},
            ),
        ),
    )


def test_smallest_document_has_the_documented_defaults() -> None:
    """If the key has a tenant, a document needs only a name and a job with a command; the rest has defaults."""
    draft = read_workload(load_yaml(b"name: a\njobs: [{name: main, run: 'echo hi'}]"), "vision")
    assert draft.problems == []
    assert draft.spec() == WorkloadSpec(
        name="a", tenant="vision", jobs=(JobSpec(name="main", role="main", tasks=1, resources=ResourceSpec(),
                                                 script="echo hi"),),
    )  # fmt: skip


def test_elastic_jobs_have_a_range_of_tasks() -> None:
    """A range becomes the fewest and the most tasks; a range of one number is that number."""

    def sizes(tasks: object) -> tuple[int, int | None]:
        draft = read_workload(job(tasks=tasks), None)
        assert draft.problems == []
        (one,) = draft.spec().jobs
        assert read_workload(document_of(draft.spec()), None).spec().jobs == draft.spec().jobs
        return one.tasks, one.most_tasks

    assert sizes({"min": 2, "max": 16}) == (2, 16)
    assert sizes({"min": 2, "max": 2}) == (2, None)
    assert sizes(3) == (3, None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("10m", 600.0), ("1h30m", 5400.0), ("1.5h", 5400.0), ("1d", 86400.0), (90, 90.0), ("500ms", 0.5)],
)
def test_durations(text: object, seconds: float) -> None:
    """A duration is a string with units, or a number of seconds."""
    draft = read_workload(document(checkpoint={"interval": text}), None)
    assert draft.problems == []
    assert draft.spec().checkpoint.interval_s == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("16GB", 16 * 10**9), ("2Gi", 2 * GIB), ("1.5GiB", 3 * GIB // 2), (4 * GIB, 4 * GIB),
     ("1048576", 1 << 20), ("10M", 10**7)],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    """A size is a string with a unit of powers of 1000 or 1024, or a number of bytes."""
    draft = read_workload(resources(memory=text), None)
    assert draft.problems == []
    assert draft.spec().jobs[0].resources.memory_bytes == size


def test_accelerators_as_one_text() -> None:
    """`a100:8` means eight GPUs of type a100, and `a100` means one."""
    assert read_workload(resources(accelerators="a100:8"), None).spec().jobs[0].resources.gpus == 8
    assert read_workload(resources(accelerators="a100"), None).spec().jobs[0].resources.gpus == 1
    assert read_workload(resources(accelerators=[]), None).spec().jobs[0].resources.gpus == 0


def test_null_is_as_if_left_out() -> None:
    """A null value means the default of its key, as some generators write it."""
    draft = read_workload(document(recurring="x") | {"recurring": None, "tables": None, "limits": None}, None)
    assert draft.problems == []
    assert draft.spec().tables == ()


FORMS: list[tuple[str, object, str, str]] = [
    ("no mapping", [1], "", "must be a mapping"),
    ("nothing", None, "", "empty"),
    ("unknown key", document(tabels=["digits"]), "tabels", "did you mean tables?"),
    ("unknown key in a job", job(tsks=3), "jobs[0].tsks", "did you mean tasks?"),
    ("unknown key in resources", resources(accelerator="a100:1"), "jobs[0].resources.accelerator", "accelerators?"),
    ("unknown key like no other", document(zzzzzz=1), "zzzzzz", "the known keys are version, name"),
    ("no name", document(name=None), "name", "missing"),
    ("no jobs", document(jobs=None), "jobs", "missing"),
    ("empty jobs", document(jobs=[]), "jobs", "at least one"),
    ("jobs as a mapping", document(jobs={"a": 1}), "jobs", "must be a list of jobs"),
    ("no tenant", document(tenant=None), "tenant", "missing"),
    ("another version", document(version=2), "version", "must be 1"),
    ("version as boolean", document(version=True), "version", "must be 1"),
    ("name with capitals", document(name="Digits"), "name", "lower-case letters"),
    ("name with a line end", document(name="digits\n"), "name", "lower-case letters"),
    ("name as number", document(name=7), "name", "put it in quotes"),
    ("name with NUL", document(name="a\0b"), "name", "NUL"),
    ("half a surrogate pair", document(labels={"a": "\ud800"}), "labels.a", "surrogate"),
    ("label as boolean", document(labels={"gpu": False}), "labels.gpu", "YAML reads yes, no, on, off"),
    ("label as number", document(labels={"gpu": 1.5}), "labels.gpu", "put it in quotes"),
    ("label key", document(labels={"a b": "c"}), "labels.'a b'", "label's key"),
    ("label value too long", document(labels={"a": "x" * 257}), "labels.a", "at most 256 characters"),
    ("too many labels", document(labels={f"l{i}": "" for i in range(65)}), "labels", "at most 64"),
    ("labels as list", document(labels=["a"]), "labels", "must be a mapping"),
    ("two jobs of one name", document(jobs=[JOB, JOB]), "jobs[1].name", "another job has this name"),
    ("too many jobs", document(jobs=[{**JOB, "name": f"j{i}"} for i in range(33)]), "jobs", "at most 32"),
    ("too many tasks", document(jobs=[{**JOB, "tasks": 60_000}, {**JOB, "name": "b", "tasks": 60_000}]),
     "jobs.tasks", "100000 tasks"),
    ("no tasks", job(tasks=0), "jobs[0].tasks", "from 1 to 100000"),
    ("half a task", job(tasks=1.5), "jobs[0].tasks", "must be an integer"),
    ("tasks as boolean", job(tasks=True), "jobs[0].tasks", "it is a boolean"),
    ("tasks beyond all bounds", job(tasks=10**30), "jobs[0].tasks", "from 1 to 100000"),
    ("spans perhaps", job(span_clusters="perhaps"), "jobs[0].span_clusters", "must be true or false, it is a string"),
    ("tasks as a word", job(tasks="2"), "jobs[0].tasks", "as in {min: 2, max: 16}, it is a string"),
    ("fewer at most", job(tasks={"min": 4, "max": 2}), "jobs[0].tasks.max",
     "must be at least min, which is 4, it is 2"),
    ("no most", job(tasks={"min": 4}), "jobs[0].tasks.max", "missing: give the most tasks"),
    ("elastic and another job", document(jobs=[JOB | {"tasks": {"min": 1, "max": 3}}, JOB | {"name": "b"}]),
     "jobs[0].tasks", "only possible with one job, not with 2: give one number, such as 3"),
    ("an elastic array", {**job(tasks={"min": 1, "max": 3}), "array": "0-3"}, "jobs[0].tasks",
     "not possible with array"),
    ("elastic slices", job(tasks={"min": 2, "max": 4}, topology={"slice": {"tasks": 2, "level": "rack"}}),
     "jobs[0].topology.slice", "not possible with min and max in tasks"),
    ("topology as a word", job(topology="rack"), "jobs[0].topology", "must be a mapping"),
    ("unknown level", job(topology={"required": "row"}), "jobs[0].topology.required", "machine, rack, cluster, zone"),
    ("two levels", job(topology={"required": "rack", "preferred": "rack"}), "jobs[0].topology.preferred",
     "not possible with required"),
    ("a rack of several clusters", job(span_clusters=True, topology={"required": "rack"}),
     "jobs[0].topology.required", "must be zone if span_clusters is true, it is rack"),
    ("slices that do not divide", job(tasks=6, topology={"slice": {"tasks": 4, "level": "rack"}}),
     "jobs[0].topology.slice.tasks", "must divide the 6 tasks of the job, it is 4"),
    ("slices of no tasks", job(topology={"slice": {"tasks": 0, "level": "rack"}}), "jobs[0].topology.slice.tasks",
     "from 1 to 100000"),
    ("slices without a level", job(topology={"slice": {"tasks": 1}}), "jobs[0].topology.slice.level", "missing"),
    ("slices of zones", job(topology={"slice": {"tasks": 1, "level": "zone"}}), "jobs[0].topology.slice.level",
     "must be one of machine, rack"),
    ("slices as large as all", job(tasks=4, topology={"required": "rack", "slice": {"tasks": 2, "level": "rack"}}),
     "jobs[0].topology.slice.level", "must be below rack"),
    ("no run", job(run=None), "jobs[0].run", "missing"),
    ("image in capitals", job(image="Lab/Train"), "jobs[0].image", "must be [HOST/]NAME[:TAG][@sha256:DIGEST]"),
    ("image with a scheme", job(image="https://ghcr.io/lab/train"), "jobs[0].image", "must be [HOST/]NAME"),
    ("image with a short digest", job(image="a@sha256:12"), "jobs[0].image", "must be [HOST/]NAME"),
    ("image with an option", job(image="--privileged"), "jobs[0].image", "must be [HOST/]NAME"),
    ("image with setup", job(image="a/b:1", setup="true"), "jobs[0].setup", "not possible with image"),
    ("login without image", job(image_pull_secret="hf-token"), "jobs[0].image_pull_secret", "only possible with image"),
    ("setup as a list", job(setup=["pip", "install"]), "jobs[0].setup", "must be a shell script"),
    ("blank setup", job(setup=" "), "jobs[0].setup", "must not be empty"),
    ("setup too long", job(setup="x" * 100_000), "jobs[0].setup", "at most 98304 bytes"),
    ("empty command", job(run=[]), "jobs[0].run", "must not be empty"),
    ("blank script", job(run=" \n"), "jobs[0].run", "must not be empty"),
    ("command with a boolean", job(run=["true", True]), "jobs[0].run[1]", "put it in quotes"),
    ("command as mapping", job(run={"a": 1}), "jobs[0].run", "list of strings"),
    ("script too long", job(run="x" * 100_000), "jobs[0].run", "at most 98304 bytes"),
    ("arguments too long", job(run=["x" * 50_000, "y" * 50_000]), "jobs[0].run", "at most 98304 bytes"),
    ("argument with NUL", job(run=["a\0"]), "jobs[0].run[0]", "NUL"),
    ("accelerators without sense", resources(accelerators="8 x a100"), "jobs[0].resources.accelerators", "a100:8"),
    ("accelerators as mapping", resources(accelerators={"a100": 8}), "jobs[0].resources.accelerators", "a100:8"),
    ("different counts", resources(accelerators=["a100:1", "v100:2"]), "jobs[0].resources.accelerators[1]",
     "same number"),
    ("a type twice", resources(accelerators=["a100:1", "a100:1"]), "jobs[0].resources.accelerators[1]", "twice"),
    ("no GPUs of a type", resources(accelerators="a100:0"), "jobs[0].resources.accelerators", "1 to 62"),
    ("63 GPUs", resources(accelerators="a100:63"), "jobs[0].resources.accelerators", "1 to 62"),
    ("no CPUs", resources(cpus=0), "jobs[0].resources.cpus", "from 0.001"),
    ("CPUs as text", resources(cpus="4"), "jobs[0].resources.cpus", "must be a number"),
    ("memory without sense", resources(memory="lots"), "jobs[0].resources.memory", "512MiB"),
    ("memory of fractions of bytes", resources(memory=1.5), "jobs[0].resources.memory", "512MiB"),
    ("memory too small", resources(memory="1KB"), "jobs[0].resources.memory", "from 1MiB"),
    ("memory too large", resources(memory="65TiB"), "jobs[0].resources.memory", "64TiB"),
    ("duration without unit", document(checkpoint={"interval": "30"}), "checkpoint.interval", "30s"),
    ("negative duration", document(checkpoint={"interval": -1}), "checkpoint.interval", "from 0.1"),
    ("endless grace", document(checkpoint={"grace": "2h"}), "checkpoint.grace", "3600 seconds"),
    ("no failing saves", document(checkpoint={"max_failures": 0}), "checkpoint.max_failures", "from 1 to 100000"),
    ("failing for no time", document(checkpoint={"max_failing": 0}), "checkpoint.max_failing", "from 1"),
    ("keep nothing", document(checkpoint={"keep": 0}), "checkpoint.keep", "from 1 to 100"),
    ("endless retries", document(limits={"retries": 10**9}), "limits.retries", "from 0 to 1000"),
    ("limits as list", document(limits=[1]), "limits", "must be a mapping"),
    ("reserved variable", job(env={"MIZZEN_RANK": "1"}), "jobs[0].env.MIZZEN_RANK", "are reserved"),
    ("variable that every task gets", job(env={"RANK": "1"}), "jobs[0].env.RANK", "set by mizzen"),
    ("variable with a dash", job(env={"A-B": "1"}), "jobs[0].env.A-B", "letters, digits and underscores"),
    ("variable as boolean", job(env={"DEBUG": True}), "jobs[0].env.DEBUG", "put it in quotes"),
    ("variable as fraction", job(env={"LR": 0.1}), "jobs[0].env.LR", "put it in quotes"),
    ("too much environment", job(env={f"V{i}": "x" * 30_000 for i in range(3)}), "jobs[0].env", "65536 bytes"),
    ("secret with a reserved name", job(secrets={"MIZZEN_KEY": "hf-token"}), "jobs[0].secrets.MIZZEN_KEY", "reserved"),
    ("secret and variable", job(env={"A": "1"}, secrets={"A": "hf-token"}), "jobs[0].secrets.A", "also set in env"),
    ("secret's name", job(secrets={"A": "a b"}), "jobs[0].secrets.A", "lower-case"),
    ("absolute file", document(files={"/etc/passwd": "x"}), "files./etc/passwd", "relative path"),
    ("escaping file", document(files={"a/../../b": "x"}), "files.a/../../b", "stays in"),
    ("file path with dots", document(files={"./a": "x"}), "files../a", "normalised"),
    ("file that is a folder", document(files={"a": "x", "a/b": "y"}), "files.a", "as a folder"),
    ("too much text", document(files={"a": "x" * 200_000, "b": "y" * 100_000}), "files", "262144 bytes"),
    ("file of bytes", document(files={"a": 7}), "files.a", "put it in quotes"),
    ("workdir as path", document(workdir="./src"), "workdir", "does not accept a path"),
    ("workdir without archive", document(workdir={}), "workdir.archive", "missing"),
    ("workdir without sense", document(workdir={"archive": "abc"}), "workdir.archive", "64 hexadecimal"),
    ("tables as text", document(tables="digits"), "tables", "must be a list"),
    ("a table twice", document(tables=["digits", "digits"]), "tables[1]", "twice"),
    ("priority out of bounds", document(priority=8), "priority", "from 1 to 7"),
    ("regions as list", document(regions=["north"]), "regions", "must be a mapping"),
    ("no kind of capacity", document(capacity=[]), "capacity", "at least one of reserved, on_demand, spot, voluntary"),
    ("capacity as text", document(capacity="spot"), "capacity", "must be a list"),
    ("unknown kind", document(capacity=["spot", "cheap"]), "capacity[1]", "must be one of reserved, on_demand, spot"),
    ("a kind twice", document(capacity=["spot", "spot"]), "capacity[1]", "is given twice"),
    ("no region allowed", document(regions={"allow": []}), "regions.allow", "at least one"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path", "message"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
async def test_wrong_form(shared_world: ApiWorld, body: object, path: str, message: str) -> None:
    """A document with an invalid form is an error with the path and the valid values."""
    text = json.dumps(body).encode()  # ASCII, because half a surrogate pair must be escaped
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    found = errors_of(answer)
    assert list(found) == [path]
    assert message in found[path]


FACTS: list[tuple[str, str, object, str, str]] = [
    ("unknown tenant", "operator", document(tenant="visoin"), "tenant", "did you mean vision?"),
    ("another tenant", "vision", document(tenant="speech"), "tenant", "may only submit for tenant vision"),
    ("another tenant that there is not", "vision", document(tenant="nobody"), "tenant", "submit for tenant vision"),
    ("unknown table", "operator", document(tables=["digit"]), "tables[0]", "did you mean digits?"),
    ("unknown region", "operator", document(regions={"allow": ["nrth"]}), "regions.allow[0]", "did you mean north?"),
    ("unknown region excluded", "operator", document(regions={"exclude": ["mars"]}), "regions.exclude[0]",
     "existing: north, south"),
    ("no region left", "operator", document(regions={"exclude": ["north", "south"]}), "regions.exclude[1]",
     "no region is left"),
    ("allowed and excluded", "operator", document(regions={"allow": ["north"], "exclude": ["north"]}),
     "regions.exclude[0]", "no region is left"),
    ("unknown GPU type", "operator", resources(accelerators="a10:1"), "jobs[0].resources.accelerators",
     "did you mean a100?"),
    ("unknown GPU type in a list", "operator", resources(accelerators=["a100:1", "tpu:1"]),
     "jobs[0].resources.accelerators[1]", "there are a100, v100"),
    ("more GPUs than a machine has", "operator", resources(accelerators="a100:16"), "jobs[0].resources",
     "the largest has 8 a100, 64 CPUs and 256 GiB"),
    ("more GPUs than a machine of this type has", "operator", resources(accelerators="v100:8"), "jobs[0].resources",
     "the largest has 4 v100"),
    ("more CPUs than a machine has", "operator", resources(cpus=65), "jobs[0].resources", "no machine can hold"),
    ("more memory than a machine has", "operator", resources(accelerators=None, memory="1TiB"), "jobs[0].resources",
     "256 GiB"),
    ("unknown secret", "operator", job(secrets={"A": "hf-tokn"}), "jobs[0].secrets.A", "did you mean hf-token?"),
    ("no secret at all", "operator", {**job(secrets={"A": "hf-token"}), "tenant": "speech"},
     "jobs[0].secrets.A", "none exists: `mizzen tenants secrets set TENANT NAME` creates one"),
    ("archive that was not uploaded", "operator", document(workdir={"archive": "0" * 64}), "workdir", "upload it"),
    ("file over a folder of the archive", "operator", document(workdir=FOLDERS_SHA256, files={"src": "x"}), "workdir",
     "file 'src': files and archive collide: a folder of this path exists"),
    ("file below a file of the archive", "operator", document(workdir=FOLDERS_SHA256, files={"src/a.py/b": "x"}),
     "workdir", "files and archive collide: a file of this path is also the folder"),
    ("priority upwards", "operator", document(priority=2), "priority", "level from 3 to 7"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "body", "path", "message"), [f[1:] for f in FACTS], ids=[f[0] for f in FACTS])
async def test_wrong_facts(shared_world: ApiWorld, key: str, body: object, path: str, message: str) -> None:
    """A document with unknown names, or with more than any machine has, is an error at submission."""
    found = await refusal(shared_world, body, key)
    assert list(found) == [path]
    assert message in found[path]


async def test_a_document_for_a_new_installation(world: ApiWorld) -> None:
    """If there is no tenant, the error names the command that creates one."""
    with world.session() as session:
        for own in (Secret, Archive, ApiKey):
            session.execute(delete(own).where(own.tenant.is_not(None)))
        session.execute(delete(Tenant))
    assert (await refusal(world, document(), "operator"))["tenant"] == (
        "unknown tenant; none exists: `mizzen tenants set NAME --level 3` creates one"
    )


FITTING: list[tuple[str, object]] = [
    ("a list of which only one type can hold it", resources(accelerators=["v100:8", "a100:8"])),
    ("a lower priority", document(priority=7)),
    ("its tenant's priority", document(priority=3)),
    ("files over an archive", document(workdir=FOLDERS_SHA256, files={"src/a.py": "x", "src/b/c": "y"})),
    ("an uploaded archive", document(workdir={"archive": ARCHIVE_SHA256})),
    ("an uploaded archive by its checksum alone", document(workdir=ARCHIVE_SHA256)),
    ("kinds of capacity", document(capacity=["spot", "reserved"])),
    ("one region excluded", document(regions={"exclude": ["south"]})),
    ("variables that are integers", job(env={"EPOCHS": 10}, run=["sleep", 30])),
    ("no resources at all", job(resources=None)),
]


@pytest.mark.parametrize("body", [f[1] for f in FITTING], ids=[f[0] for f in FITTING])
async def test_what_fits_is_taken(shared_world: ApiWorld, body: object) -> None:
    """A document whose names exist and whose tasks fit some machine is accepted."""
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", json=body)
    assert answer.status_code == 202, answer.text


async def test_every_problem_at_once(shared_world: ApiWorld) -> None:
    """One response lists all problems in all parts of the document, with their values."""
    bad = document(
        nmae="digits",
        tenant="visoin",
        tables=["digit"],
        labels={"nightly": True},
        checkpoint={"interval": "soon"},
        jobs=[{**JOB, "tasks": -1, "resources": {"accelerators": "a10:1"}, "env": {"1A": "x"}}],
    )
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=as_yaml(bad), headers={"content-type": "application/yaml"})
    found = {e["path"]: e for e in answer.json()["errors"]}
    assert set(found) == {
        "nmae", "tenant", "tables[0]", "labels.nightly", "checkpoint.interval", "jobs[0].tasks",
        "jobs[0].resources.accelerators", "jobs[0].env.1A",
    }  # fmt: skip
    assert found["nmae"]["suggestion"] == "name"
    assert found["tenant"] == {
        "path": "tenant",
        "value": "visoin",
        "message": "unknown tenant; did you mean vision?",
        "suggestion": "vision",
    }
    assert found["checkpoint.interval"]["value"] == "soon"
    assert found["jobs[0].tasks"]["value"] == -1


async def test_fleet_without_machines_refuses_no_size(world: ApiWorld) -> None:
    """Before any machine has registered, resources of any size are accepted."""
    with world.session() as session:
        session.connection().exec_driver_sql("delete from machine")
    async with world.client() as client:
        answer = await client.post("/v1/workloads", json=resources(accelerators="h100:8"))
    assert answer.status_code == 202


async def test_machines_lost_for_good_do_not_count(world: ApiWorld) -> None:
    """A machine that has been lost for more than a day does not count for what the fleet can hold."""
    big = resources(accelerators="a100:8")
    async with world.client() as client:
        for lost_for, status in (("1 hour", 202), ("2 days", 422)):
            with world.session() as session:
                lost_at = f"now() - interval '{lost_for}'"
                session.connection().exec_driver_sql(
                    f"update machine set state = 'lost', lost_at = {lost_at} where gpu_type = 'a100'"
                )
            assert (await client.post("/v1/workloads", json=big)).status_code == status


PLAIN = [
    ("no", False), ("On", True), ("TRUE", True), ("nO", "nO"), ("~", None), ("", None), ("12", 12), ("-3", -3),
    ("010", "010"), ("1_000", "1_000"), ("0x10", "0x10"), ("12:30", "12:30"), ("1.50", 1.5), ("1e3", 1000.0),
    ("2024-01-02", "2024-01-02"), (".inf", ".inf"), ("12e", "12e"), ("9" * 5000, float("inf")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), PLAIN, ids=[p[0][:12] or "empty" for p in PLAIN])
def test_yaml_scalars(text: str, value: object) -> None:
    """Only null, booleans and decimal numbers are not strings among plain scalars; quoted scalars are strings."""
    assert load_yaml(f"a: {text}".encode()) == {"a": value}
    assert load_yaml(f"a: '{text}'".encode()) == {"a": text}


def test_yaml_keys_are_texts() -> None:
    """Keys of YAML mappings are always strings, such as NO and 1."""
    assert load_yaml(b"NO: a\n1: b\n~: c") == {"NO": "a", "1": "b", "~": "c"}


MALFORMED: list[tuple[str, bytes, str]] = [
    ("anchors", b"a: &x [1]\nb: *x", "anchors"),
    ("an alias bomb", b"a: &a [x, x]\nb: &b [*a, *a]", "anchors"),
    ("merge keys", b"a: {<<: {b: 1}}", "merge keys"),
    ("tags", b"a: !!python/object/apply:os.system ['true']", "tags"),
    ("tags of scalars", b"a: !!int '3'", "tags"),
    ("a list as key", b"? [a]\n: b", "key must be a string"),
    ("two documents", b"a: 1\n---\nb: 2", "second document"),
    ("a syntax error", b"a: [1", "line 2, column 1: not YAML"),
    ("tabs", b"a:\n\tb: 1", "line 2"),
    ("no UTF-8", b"a: \xff", "byte 3: not UTF-8"),
    ("control characters", b"a: \x01", "not YAML"),
    ("an escape beyond Unicode", b'a: "\\UFFFFFFFF"', "not YAML"),
    ("deep flow", b"[" * 100_000, "nested more than"),
    ("deep blocks", b"".join(b" " * i + b"a:\n" for i in range(30)), "nested more than"),
    ("many values", b"[" + b"1," * (MAX_NODES + 1) + b"]", "more than"),
]


@pytest.mark.parametrize(("body", "message"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_yaml(body: bytes, message: str) -> None:
    """Unsupported, invalid and oversized YAML is an error, with the line if there is one."""
    with pytest.raises(Malformed, match=message):
        load_yaml(body)


MALFORMED_JSON: list[tuple[str, bytes, str]] = [
    ("a syntax error", b'{"a": }', "line 1, column 7"),
    ("nothing", b"", "not JSON"),
    ("NaN", b'{"a": NaN}', "NaN"),
    ("infinity", b'{"a": -Infinity}', "-Infinity"),
    ("deep lists", b"[" * 50_000 + b"]" * 50_000, "nested more than"),
    ("quite deep lists", b"[" * 30 + b"]" * 30, "nested more than"),
    ("many values", b"[" + b"1," * MAX_NODES + b"1]", "more than"),
    ("UTF-16", '{"a": 1}'.encode("utf-16"), "not UTF-8"),
]


@pytest.mark.parametrize(("body", "message"), [m[1:] for m in MALFORMED_JSON], ids=[m[0] for m in MALFORMED_JSON])
def test_malformed_json(body: bytes, message: str) -> None:
    """Invalid and oversized JSON is an error."""
    with pytest.raises(Malformed, match=message):
        load_json(body)


@pytest.mark.parametrize("media", ["application/json", "application/yaml"])
async def test_keys_given_twice(shared_world: ApiWorld, media: str) -> None:
    """A duplicate key is an error with its path, in JSON and in YAML."""
    text = b'{"name": "a", "tenant": "vision", "jobs": [{"name": "m", "run": "x", "env": {"A": "1", "A": "2"}}]}'
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=text, headers={"content-type": media})
    assert errors_of(answer) == {"jobs[0].env.A": "this key is given twice"}
