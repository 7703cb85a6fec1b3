"""A name has one meaning: public classes, and files by their subjects."""

import ast
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = {"tests", "tests_integrations", "examples", "docs"}
"""Rooms whose names only their own files use."""
_GENERATED = "client/mizzen_client/views.py"
"""Generated from the API's views: each class is the client's form of the thing of the same name."""
_CLASSES = {
    "FieldError": "one entry of a problem: the API writes it, the client reads it",
    "Job": "an entry of a trace; submitit's name, which its users import",
    "ResilientCallback": "the callback of one framework each; users import it from the module of their framework",
}
_GERUNDS = {
    "annealing": "simulated annealing, the algorithm",
    "bursting": "cloud bursting, the field's term",
    "disk_recording": "a recording of a disk",
    "gaming": "gaming of the queue, the field's term",
    "housekeeping": "a noun",
    "kill_training": "the training that is killed",
    "lightning": "the library",
    "masking": "masking of secrets, the field's term",
    "pacing": "pacing of flows, the field's term",
    "packing": "bin packing",
    "paging": "paging of lists, the field's term",
    "routing": "routing of requests, the field's term",
    "s3_reading": "ranged reads from S3",
    "scaling": "scaling of pools, the field's term",
    "scheduling": "a noun",
    "shaping": "traffic shaping",
    "staging": "staging of files, the field's term",
    "stepwise_training": "a training",
    "tetris_annealing": "simulated annealing, the algorithm",
}
_OF_ANY_ROOM = {
    "errors", "values", "settings", "state", "views", "documents", "report", "charts", "tables", "metrics", "commands",
    "layout", "files", "outcome", "scenario", "engine", "launch", "policies", "traces", "data",
}  # fmt: skip
"""What many rooms have: the room's name completes the file's."""
_IN_EACH_LAYER = {
    "archives", "buckets", "clusters", "fleet", "instance", "instances", "keys", "logs",
    "machines", "moves", "placement_runs", "pool_plans", "pools", "provider", "removal", "replicas",
    "scheduling", "service", "services", "tenants", "traffic", "usage", "workloads",
}  # fmt: skip
"""Subjects that more than two layers have a part of: the table, the activities, the routes, the commands."""


def files() -> list[Path]:
    """Returns the Python files outside tests, examples and docs; the data folders of demos are not among them."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.splitlines() if "/" in name]
    files = [ROOT / name for name in names if name.split("/")[0] not in _SKIPPED and name[0] != "."]
    assert len(files) > 700
    return files


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in files():
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and name != _GENERATED:
                found[node.name].append(name)
    twice = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in _CLASSES} == {}
    assert _CLASSES.keys() <= twice.keys()


def test_files_are_named_for_their_subjects() -> None:
    stems = {path.stem for path in files()}
    assert {stem for stem in stems if stem.endswith("ing")} == _GERUNDS.keys()


def test_few_file_names_are_used_in_many_rooms() -> None:
    counts = Counter(path.stem for path in files() if not path.stem.startswith("__"))
    many = {stem for stem, count in counts.items() if count > 2}
    assert many == _OF_ANY_ROOM | _IN_EACH_LAYER
