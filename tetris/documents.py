"""Reads and writes instances and plans as JSON. Errors name the field, its value, and what would be valid.

`docs/tetris-instances.md` documents the format. Each document contains the version of the format.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from domain.documents import DocumentPart, Stated, json_schema
from domain.ids import split_read
from domain.instance import (
    DOCUMENT_VERSION,
    LEAST_AMOUNT,
    MOST_AMOUNT,
    Homes,
    InstanceRegion,
    JobKind,
    PlacedTable,
    PlanScore,
    Reads,
    RecurringJob,
    TetrisInstance,
    Weights,
)
from domain.instance import instance_document as instance_document  # exported with the readers
from domain.patterns import matching
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL

T = TypeVar("T", bound=BaseModel)
_SHOWN = 8
"""Maximum number of errors and of names in an error message."""
AMOUNT = f"must be 0, or from {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}"
"""The rule for sizes, hours and weights, for error messages."""


def _amount(value: float) -> float:
    if value != 0 and not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        raise ValueError(AMOUNT)
    return value


def _partition(text: str) -> str:
    if not text.partition("/")[2]:
        raise ValueError("must be table/partition")
    return text


_Amount = Annotated[
    float,
    AfterValidator(_amount),
    Stated({"anyOf": [{"const": 0}, {"type": "number", "minimum": LEAST_AMOUNT, "maximum": MOST_AMOUNT}]}),
]
_Level = Annotated[int, Field(ge=HIGHEST_LEVEL, le=LOWEST_LEVEL)]
_LevelName = Literal["1", "2", "3", "4", "5", "6", "7"]
_Name = Annotated[str, Field(min_length=1)]
_Partition = Annotated[_Name, AfterValidator(_partition), Stated(matching(r"^[^/]*/[\s\S]+$"))]
_Version = Annotated[int, Field(ge=DOCUMENT_VERSION, le=DOCUMENT_VERSION)]


class InstanceDocumentError(ValueError):
    """An invalid document. Each line of the message names a field, its value, and what would be valid."""


class _Part(DocumentPart):
    """Base of all models. Types are strict: a string is not accepted as a number, nor true as 1."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=False)


class _Region(_Part):
    name: _Name
    storage_bytes: _Amount
    gpu_hours: dict[_Name, _Amount] = {}
    cpu_hours: dict[_Name, _Amount] = {}


class _Table(_Part):
    name: _Name
    size_bytes: _Amount
    home: _Name
    replicas: list[_Name] = []


class _Job(_Part):
    name: _Name
    kind: JobKind
    app: _Name | None = None
    tables: list[_Name]
    gpu_type: _Name | None = None
    gpu_hours: _Amount = 0.0
    cpu_hours: _Amount = 0.0
    priority: _Level
    weight: _Amount = 1.0


class _JobReads(_Part):
    job: _Name
    partitions: Annotated[list[_Partition], Field(min_length=1)]


class _Reads(_Part):
    version: _Version
    partitions: dict[_Partition, _Amount]
    reads: list[_JobReads]


class _Weights(_Part):
    read: _Amount = 1.0
    gpu: _Amount = 1.0
    storage: _Amount = 1.0
    overload: _Amount = 4.0
    by_priority: dict[_LevelName, _Amount] = {}


class _Head(_Part):
    version: _Version
    weights: _Weights = _Weights()
    home_threshold: Annotated[float, Field(ge=0, le=1)] = 0.9
    move_quota_bytes: _Amount | None = None


class _Instance(_Head):
    """An instance of the data placement problem."""

    rules: ClassVar = (
        "Names of regions, of tables and of jobs are unique",
        "Tables and jobs name regions and tables of the instance, each once, and replicas are not in the home",
    )
    regions: Annotated[list[_Region], Field(min_length=1)]
    tables: list[_Table]
    jobs: list[_Job]


class _Plan(_Part):
    version: _Version
    homes: dict[_Name, _Name]


class ReplicaEntry(_Part):
    """A replica in a document (see `tetris.replicas.replicas_document`)."""

    table: _Name
    region: _Name
    reason: str = ""
    part: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the table's bytes."""
    partitions: Annotated[list[_Partition], Field(min_length=1)] | None = None
    """The partitions in the replica, which `job` reads; None for the whole table."""
    job: _Name | None = None


class _Replicas(_Part):
    version: _Version
    replicas: list[ReplicaEntry]
    unplaced: list[Any] = []


def read_instance(text: str | bytes) -> TetrisInstance:
    """Reads an instance from a JSON document.

    Raises:
        DocumentError: the document is not JSON or has another version; a field is missing, unknown, duplicated, of a
            wrong type or out of range; a name is duplicated; or a region or table is named that does not exist.
    """
    body = _parse(_Instance, text)
    instance = TetrisInstance(
        regions=tuple(InstanceRegion(**dict(r)) for r in body.regions),
        tables=tuple(PlacedTable(**{**dict(t), "replicas": tuple(t.replicas)}) for t in body.tables),
        jobs=tuple(RecurringJob(**{**dict(j), "tables": tuple(j.tables)}) for j in body.jobs),
        weights=Weights(
            **{**dict(body.weights), "by_priority": {int(p): w for p, w in body.weights.by_priority.items()}}
        ),
        home_threshold=body.home_threshold,
        move_quota_bytes=body.move_quota_bytes,
    )
    _raise(check_names(instance))
    return instance


def instance_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of instances."""
    return json_schema(_Instance)


def read_reads(text: str | bytes) -> Reads:
    """Reads the partitions that jobs read. `tetris.pieces` checks them against an instance.

    Raises:
        DocumentError: as for `read_instance`, or a job is duplicated.
    """
    body = _parse(_Reads, text)
    by_job = {entry.job: tuple(entry.partitions) for entry in body.reads}
    if len(by_job) < len(body.reads):
        names = [entry.job for entry in body.reads]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        _raise([f"reads: job {twice!r} appears twice: each job must appear once"])
    return Reads(body.partitions, by_job)


def read_head(text: str | bytes) -> dict[str, Any]:
    """Reads the `instance.json` of a folder: an instance document without the lists of regions, tables and jobs.

    Raises:
        DocumentError: as for `read_instance`.
    """
    return _parse(_Head, text).model_dump()


def check_names(instance: TetrisInstance) -> list[str]:
    """Returns an error line for each duplicate name and each reference to an unknown name in an instance."""
    lists = {
        "regions": [r.name for r in instance.regions],
        "tables": [t.name for t in instance.tables],
        "jobs": [j.name for j in instance.jobs],
    }
    wrong: list[str] = []
    for field, names in lists.items():
        seen: set[str] = set()
        for index, name in enumerate(names):
            if name in seen:
                wrong.append(f"{field}.{index}.name: {name!r} appears twice: names must be unique")
            seen.add(name)
    regions, tables = {r.name for r in instance.regions}, {t.name for t in instance.tables}
    known = _some(r.name for r in instance.regions)
    for index, table in enumerate(instance.tables):
        if table.home not in regions:
            wrong.append(f"tables.{index}.home: {table.home!r} is not a region of the instance; it has {known}")
        wrong += _references(f"tables.{index}.replicas", table.replicas, regions, "region", known)
        if table.home in table.replicas:
            wrong.append(f"tables.{index}.replicas: {table.home!r} is the table's home: replicas must be elsewhere")
    known = _some(t.name for t in instance.tables)
    for index, job in enumerate(instance.jobs):
        wrong += _references(f"jobs.{index}.tables", job.tables, tables, "table", known)
    return wrong


def _references(where: str, names: tuple[str, ...], there: set[str], what: str, known: str) -> list[str]:
    wrong = [f"{where}: {n!r} is not a {what} of the instance; it has {known}" for n in names if n not in there]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        wrong.append(f"{where}: {twice!r} appears twice: each {what} must appear once")
    return wrong


def names_of(instance: TetrisInstance) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the table names and the region names of an instance."""
    return tuple(t.name for t in instance.tables), tuple(r.name for r in instance.regions)


def read_plan(text: str | bytes, table_names: tuple[str, ...], region_names: tuple[str, ...]) -> dict[str, str]:
    """Reads a plan for an instance with the given names; returns a mapping of tables to home regions.

    Raises:
        DocumentError: as for `read_instance`, or the plan names a table or region that is not in the instance.
    """
    homes = _parse(_Plan, text).homes
    regions, tables = set(region_names), set(table_names)
    known_tables, known_regions = _some(table_names), _some(region_names)
    wrong = [f"homes: {t!r} is not a table of the instance; it has {known_tables}" for t in homes if t not in tables]
    wrong += [
        f"homes.{t}: {r!r} is not a region of the instance; it has {known_regions}"
        for t, r in homes.items()
        if r not in regions
    ]
    _raise(wrong)
    return homes


def read_replicas(text: str | bytes, known: Mapping[str, tuple[str, ...]]) -> tuple[ReplicaEntry, ...]:
    """Reads the replicas for an instance. `known` has its names under the keys `table`, `region` and `job`.

    Raises:
        DocumentError: as for `read_instance`; or a replica has an unknown name, has a partition of another table, or is
            a partial replica without partitions.
    """
    replicas = tuple(_parse(_Replicas, text).replicas)
    there = {field: frozenset(names) for field, names in known.items()}
    wrong = [
        f"replicas.{index}.{field}: {name!r} is not a {field} of the instance; it has {_some(known[field])}"
        for index, replica in enumerate(replicas)
        for field in there
        if (name := getattr(replica, field)) is not None and name not in there[field]
    ]
    for index, replica in enumerate(replicas):
        if replica.partitions is None and replica.part < 1:
            wrong.append(f"replicas.{index}.partitions: null: a partial replica must name its partitions")
        wrong += [
            f"replicas.{index}.partitions: {name!r} is not a partition of table {replica.table!r}"
            for name in replica.partitions or ()
            if split_read(name)[0] != replica.table
        ]
    _raise(wrong)
    return replicas


def read_file(path: Path) -> bytes:
    """Reads the content of a document.

    Raises:
        DocumentError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InstanceDocumentError(f"{error.strerror}; give a JSON document") from None


def plan_document(homes: Homes) -> dict[str, Any]:
    """Returns the document of a plan."""
    return {"version": DOCUMENT_VERSION, "homes": dict(sorted(homes.items()))}


def score_document(found: PlanScore) -> dict[str, Any]:
    """Returns the JSON object that `mizzen tetris score` prints."""
    return asdict(found)


def _parse(kind: type[T], text: str | bytes) -> T:
    doubled: list[_Doubled] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            doubled.append(out := _Doubled(pairs))
        return out

    try:
        body = json.loads(text, object_pairs_hook=made, parse_float=_number)
    except ValueError as error:
        raise InstanceDocumentError(f"not JSON: {error}") from None
    except RecursionError:
        raise InstanceDocumentError("not an instance or a plan: lists or objects are nested too deeply") from None
    if not isinstance(body, dict):
        raise InstanceDocumentError(f"document: {_brief(body)}: must be an object")
    version = body.get("version")
    if type(version) is not int or version != DOCUMENT_VERSION:  # The parser reads 1.0 as 1.
        raise InstanceDocumentError(f"version: {_brief(version)}: this program reads version {DOCUMENT_VERSION}")
    if doubled:
        _raise([f"{where}: duplicate field: each field must appear once" for where in _twice(body)])
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        _raise([_said(e) for e in error.errors()])
        raise


def _number(text: str) -> float:
    """Returns a number with a fraction or an exponent. In JSON, 1.0 is an integer."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


class _Doubled(dict[str, Any]):
    """A JSON object with a duplicate field."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.name = next(name for name in names if names.count(name) > 1)


def _twice(body: Any, where: str = "") -> Iterator[str]:
    """Yields the paths of the duplicate fields."""
    if isinstance(body, _Doubled):
        yield f"{where}{body.name}"
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, value in inner:
        if isinstance(value, dict | list):
            yield from _twice(value, f"{where}{name}.")


_WORDS = {
    "missing": "missing: this field is required",
    "extra_forbidden": "unknown field",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_short": "must have at least {min_length}",
    "value_error": "{error}",
}
"""Messages for pydantic's error types."""


def _said(error: Any) -> str:
    """Formats a pydantic error: the field, its value, and what would be valid."""
    where = [str(part) for part in error["loc"] if part != "[key]"]
    words = _WORDS.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    shown = "" if error["type"] == "missing" or error["loc"][-1] == "[key]" else f"{_brief(error['input'])}: "
    return f"{'.'.join(where)}: {shown}{words}"


def _brief(value: Any) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # An integer with thousands of digits.
        return "a very large number"


def _some(names: Iterable[str]) -> str:
    ordered = [name if name.isprintable() else repr(name) for name in sorted(names)]
    return ", ".join(ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "") if ordered else "none"


def _raise(wrong: list[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise InstanceDocumentError("\n".join(wrong[:_SHOWN] + more))
