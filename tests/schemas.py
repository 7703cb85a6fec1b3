"""Generates documents from a JSON Schema, and damaged ones, for tests that compare a schema with a reader.

Only the keywords that the schemas of this repository use are supported.
"""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.depth import examples

HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]
Read = Callable[[Any], list[str | None]]
"""Reads a document and returns the rule of each problem; None for a problem that the schema itself must state."""
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_TEXT, inner, max_size=2)),
    max_leaves=4,
)
_ODD = [
    None, True, False, 0, 1, 2, -1, 0.0, 1.0, 2.0, 0.5, 1.5, 63, 64, 1e9, 1e18, 10**18, 2**53, -0.0, 1e300, "", " ",
    "0", "1", "a", "A", "a\n", "a b", "é", "x" * 64, "x" * 300, "\0", "\u2028", "a.b", "default.a", "a/b", "/a", "../a",
    "a/../b", ".", "..", "a100:0", "a100:01", "a100:62", "a100:63", "A100", ":1", "0s", "1ms", "0.05s", "5s", "1h30m",
    "30m1h", "1h90m", "3600s", "3601s", "366d", "367d", "1.0001s", "05s", "1e3", "inf", "NaN", "0B", "1MiB", "1 MiB",
    "1  MiB", " 1MiB", "64TiB", "65TiB", "1048575", "1048576", "4+", "4++", "64+", "4x", "80", "080", "65536",
    "aws/us/*", "a/b/c/d", "*", "$A", "/$A", "yes", "ROUND_ROBIN", "SpotHedge", "\u212a", "MIZZEN_A", "RANK",
    "2026-03-02", "2026-03-02T10:00:00Z", "east/a", [], {}, [None], [1, 1], ["a", "a"], ["a100:1", "a100:1"], [""],
    [" "], [[]], [{}], {"a": 1}, {"a": "b"}, {"a": None}, {"": "a"}, {"a\n": "b"}, {"A B": "c"}, {"RANK": "1"},
    {"1": 1}, {"A100": 8}, {"A100:8": None}, {"Host\n": "a"}, {"a/..": "b"}, {" 1": 1}, {"01": 1}, {"8": 0.5},
    {"cpu": 0.5},
]  # fmt: skip


def documents(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Returns a strategy of values that a schema without references accepts; a few may break it, such as a `not`."""
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of([documents(one) for one in schema["anyOf"]])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return st.one_of([documents({**schema, "type": kind}) for kind in kinds])
    if kinds == "object":
        return _objects(schema)
    if kinds == "array":
        items = documents(schema.get("items", {}))
        most = min(schema.get("maxItems", 3), 3)
        first = [documents(one) for one in schema.get("prefixItems", [])]
        if first:
            return st.tuples(*first, st.lists(items, max_size=most)).map(lambda parts: [*parts[:-1], *parts[-1]])
        by = json.dumps if schema.get("uniqueItems") else None
        return st.lists(items, min_size=schema.get("minItems", 0), max_size=most, unique_by=by)
    if kinds == "string":
        if "pattern" not in schema:
            return _TEXT
        never = schema.get("not", {}).get("pattern", "(?!)")
        return st.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: not re.search(never, text))
    if kinds == "integer":
        low, high = schema.get("minimum", -(10**6)), schema.get("maximum", 10**6)
        if high > 100_000:  # A document with a million machines takes seconds.
            return st.integers(low, low + 1000)
        return st.one_of(st.sampled_from([low, high]), st.integers(low, high))
    if kinds == "number":
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e6)), schema.get("maximum", 1e6)
        return st.one_of(st.sampled_from([low, high]), st.floats(low, high))
    return {"null": st.none(), "boolean": st.booleans()}.get(str(kinds), _ANY)


def _objects(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    fields = {key: documents(one) for key, one in schema.get("properties", {}).items()}
    required = {key: fields.pop(key) for key in schema.get("required", []) if key in fields}
    for pattern, one in schema.get("patternProperties", {}).items():
        return st.dictionaries(st.from_regex(pattern, fullmatch=True), documents(one), max_size=2)
    if fields or required:
        return st.fixed_dictionaries(required, optional=fields)
    more = schema.get("additionalProperties", True)
    keys = documents({"type": "string", **schema.get("propertyNames", {})})
    return st.dictionaries(keys, documents(more) if isinstance(more, dict) else _ANY, max_size=2)


def damaged(document: Any, keys: list[str], random: Random) -> Any:
    """Returns a copy of a document with one to three random changes. `keys` are names for new keys."""
    document = deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = list(_places(document))
        if not places:
            return random.choice(_ODD)
        parent, key = random.choice(places)
        change, value = random.randrange(7), parent[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if change == 0:
            del parent[key]
        elif change == 1 and isinstance(parent, dict):
            parent[random.choice(keys)] = deepcopy(random.choice(_ODD))
        elif change == 1 or (change == 2 and isinstance(parent, list)):
            parent.append(deepcopy(value))
        elif change in (2, 3) and is_number:
            parent[key] = value + random.choice([1, -1, 0.5, 1000, 0.0])
        elif change in (2, 3) and isinstance(value, str):
            at = random.choice([len(value), random.randint(0, len(value))])
            parent[key] = (
                value[:at] + random.choice(["\n", " ", "0", "s", "-", ".", "A", "\0", "/", value]) + value[at:]
            )
        elif change == 4:
            other, name = random.choice(places)
            parent[key] = deepcopy(other[name]) if other is not parent else None
        else:
            parent[key] = None if random.random() < 0.2 else deepcopy(random.choice(_ODD))
    return document


def _places(value: Any) -> Any:
    """Yields each container in a value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        yield value, key
        yield from _places(value[key])


def _keys(schema: Any) -> Any:
    for key, one in schema.items() if isinstance(schema, dict) else []:
        if key == "properties":
            yield from one
        for inner in one if isinstance(one, list) else [one]:
            yield from _keys(inner)


def without_references(schema: Any, root: Any = None) -> Any:
    """Returns a schema with its definitions in the place of the references to them."""
    root = root or schema
    if isinstance(schema, list):
        return [without_references(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: without_references(one, root) for key, one in schema.items() if key not in ("$ref", "$defs")}
    if "$ref" in schema:
        own = {**without_references(root["$defs"][schema["$ref"].rpartition("/")[2]], root), **own}
    return own


def check_equal(schema: dict[str, Any], read: Read, document: Any, validator: Any = None) -> None:
    """Fails if the schema and the reader disagree about a document.

    The reader may find more errors, of rules that a description in the schema states.
    """
    rules = read(document)
    accepts = (validator or jsonschema.Draft202012Validator(schema)).is_valid(document)
    assert accepts == (None not in rules), f"schema {accepts}, reader {rules}: {json.dumps(document)}"
    stated = json.dumps(schema, ensure_ascii=False)
    for rule in rules:
        assert rule is None or json.dumps(rule, ensure_ascii=False)[1:-1] in stated, f"no description states {rule!r}"


def compare(schema: dict[str, Any], read: Read, valid: list[Any], number: int) -> None:
    """Compares the schema with the reader on `number` documents (`examples`): a tenth from the schema, others damaged.

    `valid` are documents that are damaged, besides those from the schema.
    """
    validator = jsonschema.Draft202012Validator(schema)
    schema = without_references(schema)
    keys = sorted({*_keys(schema), "a", ""})

    # A failure is one document, which is printed; shrinking it takes minutes.
    generated = settings(max_examples=examples(number // 10), phases=[Phase.generate], suppress_health_check=HEALTH)

    @settings(generated, derandomize=True, deadline=None, database=None, report_multiple_bugs=False)
    @given(document=documents(schema), seed=st.integers(0, 1 << 32))
    def run(document: Any, seed: int) -> None:
        random = Random(seed)
        check_equal(schema, read, document, validator)
        for _ in range(9):
            changed = damaged(random.choice([document, *valid]), keys, random)
            check_equal(schema, read, changed, validator)

    run()
