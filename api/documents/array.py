"""The field `array` of a workload document, and the braces that it allows in the document's strings."""

import re
from math import prod
from typing import Any

from api.documents.after import ON_ARRAY, SAME_INDEX
from api.documents.forms import (
    MOST_WORD,
    TRUTH,
    Field,
    Form,
    Keys,
    Schema,
    cases,
    integer,
    is_integer,
    is_number,
    list_of,
    map_of,
    one_of,
    section,
    text,
)
from api.documents.position import At, listed
from domain.array_elements import INDEX, UnknownParameter, combinations, fill, indexes, options, size
from domain.spec import ArraySpec, IndexRange, RunnersSpec

MOST_ELEMENTS = 100_000
_MOST_FILLED_BYTES = 512 << 10
_NUMBER = "(0|[1-9][0-9]{0,8})"
_RANGE = f"{_NUMBER}(-{_NUMBER}(:[1-9][0-9]{{0,8}})?)?"
_INDEXES = f"{_RANGE}(,{_RANGE})*"
_MOST_CHARACTERS = 60_000
"""Maximum length of the indexes of an array: enough for a list of any 10,000 elements, such as those that failed."""
_WANTED = "indexes such as 0-999 or 0-9,20-29:2"
_SHORT = f"{_WANTED}, and the number of elements that run at a time, as in 0-999%50"
_ORDER = "A range ends at its start or later, and no index is given twice"
_MOST = f"An array has at most {MOST_ELEMENTS} elements"
_MOST_LISTED_BYTES = 512 << 10
_NEEDED = (
    "Needed without a matrix or a list. With one, an index is the number of a combination or an entry; default: all of"
    " them"
)
_IN_MATRIX = "With a matrix, indexes are below the number of its combinations, and at least one combination is left"
_IN_LIST = "With several entries of list, indexes are below their number; a single entry is that of all indexes"
_SAME_NAMES = "All entries of list have the same parameters"
_LIST_SIZE = f"The names and values of list have at most {_MOST_LISTED_BYTES} bytes together"
_NOT_BOTH = "An array has a matrix or a list, not both"
_EXCLUDED = "exclude has parameters of the matrix and their values"
_ONE_VARIABLE = "No two parameters have the same name in capital letters"
_BRACES = (
    "With an array, {{ index }} and {{ NAME }} of a parameter stand for the values of the element in run, setup, env"
    " and files, and {{{{ stands for {{"
)
_FILLED = f"With the longest values, run, setup, env and files have at most {_MOST_FILLED_BYTES} bytes together"
_NO_EXPIRY = "Not possible with array"
_ONE_TASK = "With array.runners there is one job of one task, without an image, outputs and a separate stderr"
_ONCE = "With array.runners.at_most_once, limits.retries is 0"
_SAME = "with array.runners, setup and files are the same for all elements"


def _ranges(at: At, given: str) -> tuple[IndexRange, ...]:
    found = [tuple(map(int, re.findall("[0-9]+", part))) for part in given.split(",")]
    ranges = tuple(_range(*numbers) for numbers in found)
    for numbers, part in zip(found, given.split(","), strict=True):
        if len(numbers) > 1 and numbers[1] < numbers[0]:
            at.wrong(f"the range {part} ends before its start", rule=_ORDER)
            return ()
    count = size(ranges)
    if count > MOST_ELEMENTS:
        at.wrong(f"an array may have at most {MOST_ELEMENTS} elements, these are {count}", rule=_MOST)
        return ()
    if len(set(indexes(ranges))) < count:
        at.wrong("an index is given twice", rule=_ORDER)
    return ranges


def _range(first: int, last: int | None = None, step: int = 1) -> IndexRange:
    last = first if last is None else last
    return first, last - (last - first) % step, step if last - first >= step else 1


def _short(at: At, given: str) -> ArraySpec:
    written, _, throttle = given.partition("%")
    return ArraySpec(ranges=_ranges(at, written), throttle=int(throttle) if throttle else None)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if is_integer(value) else str(value)


def _value(at: At) -> Any:
    given = at.value
    if isinstance(given, bool) or (is_number(given) and abs(given) <= MOST_WORD):
        return _value_text(given)
    return _VALUE_TEXT.read(at)


_VALUE_TEXT = text("a string, a number or a boolean", 256)
_VALUE_SCHEMA: Schema = {
    "anyOf": [
        _VALUE_TEXT.schema,
        {"type": "number", "minimum": -MOST_WORD, "maximum": MOST_WORD},
        {"type": "boolean"},
    ]
}
_VALUE = Form(_VALUE_SCHEMA, _value)
_PARAMETER = Keys(
    "^[A-Za-z_][A-Za-z0-9_]{0,62}$",
    "a parameter's name must have letters, digits and underscores, and not begin with a digit",
    {f"^{INDEX}$": "{} stands for the index of the element"},
)
_MATRIX = map_of(
    _PARAMETER,
    list_of(_VALUE, "values", 10_000, empty="must have at least one value").to(tuple),
    "a mapping of parameters to lists of values",
    16,
)
_ENTRIES = list_of(
    map_of(_PARAMETER, _VALUE, "a mapping of parameters to values", 16),
    "mappings of parameters to values",
    10_000,
    empty="must have at least one entry",
).checked(lambda at, entries: _entries(at, entries), _SAME_NAMES, _LIST_SIZE)
_EXCLUDE = list_of(map_of(_PARAMETER, _VALUE, "a mapping of parameters to values", 16), "combinations", 1000)


def _entries(at: At, entries: list[dict[str, str]]) -> tuple[dict[str, str], ...]:
    given = at.value if len(entries) == len(at.value) else []
    for number, entry in enumerate(given):
        place = at.child(number, entry)
        for name in sorted(given[0].keys() - entry.keys()):
            place.missing(name, "all entries of the list have the same parameters", rule=_SAME_NAMES)
        for name in sorted(entry.keys() - given[0].keys()):
            place.get(name).wrong("the first entry of the list has no such parameter", rule=_SAME_NAMES)
    found = sum(len(name) + len(value.encode()) for entry in entries for name, value in entry.items())
    if found > _MOST_LISTED_BYTES:
        message = f"its names and values may have at most {_MOST_LISTED_BYTES} bytes together, these are {found}; with"
        at.wrong(f"{message} more, let each task read those of its index from a file", rule=_LIST_SIZE)
    return tuple(entries)


def _checked(at: At, array: ArraySpec) -> ArraySpec | None:
    if array.matrix and array.entries:
        at.get("list").wrong("not possible with a matrix", rule=_NOT_BOTH)
        return array
    if array.exclude and not array.matrix:
        at.get("exclude").wrong("only possible with a matrix", rule=_EXCLUDED)
        return array
    if not array.matrix and not array.entries:
        if at.get("indexes").value is None:
            at.missing("indexes", f"give {_WANTED}, or a matrix or a list of parameters", rule=_NEEDED)
        return array
    names = options(array)
    if len({name.upper() for name in names}) < len(names):
        place = at.get("matrix" if array.matrix else "list")
        place.wrong("two parameters have the same name in capital letters", rule=_ONE_VARIABLE)
    for number, entry in enumerate(array.exclude):
        for name, value in entry.items():
            if value not in array.matrix.get(name, ()):
                known = f"values of {name}" if name in array.matrix else f"parameters {listed(array.matrix)}"
                place = at.get("exclude").child(number, entry).child(name, value)
                place.wrong(f"must be one of the {known}", rule=_EXCLUDED)
    return _with_indexes(at, array)


def _with_indexes(at: At, array: ArraySpec) -> ArraySpec | None:
    product = prod(map(len, array.matrix.values()))
    if product > MOST_ELEMENTS:
        at.get("matrix").wrong(f"may have at most {MOST_ELEMENTS} combinations, these are {product}", rule=_MOST)
        return None
    count = combinations(array)
    if not count:
        return at.get("exclude").wrong("leaves no combination of the matrix", rule=_IN_MATRIX)  # type: ignore[no-any-return]
    if at.get("indexes").value is None:
        return array.model_copy(update={"ranges": ((0, count - 1, 1),)})
    most = max((last for _, last, _ in array.ranges), default=0)
    if most >= count and array.matrix:
        at.get("indexes").wrong(f"the matrix has the combinations 0-{count - 1}, not {most}", rule=_IN_MATRIX)
    elif most >= count > 1:
        at.get("indexes").wrong(f"the list has the entries 0-{count - 1}, not {most}", rule=_IN_LIST)
    return array


_RUNNERS = Form({"anyOf": [TRUTH.schema, (_RUNNERS_SECTION := section({
    "interrupt": Field(one_of(("after_element", "now"), "when a runner that is to stop interrupts its element"),
                       "When a runner is asked to stop: wait for the running element, for at most half of the grace"
                       " period, or send the element its notice immediately"),
    "at_most_once": Field(TRUTH, "Whether an element that may have been started is never started again: it fails"),
}, model=RunnersSpec)).schema]}, lambda at: _runners(at))  # fmt: skip


def _runners(at: At) -> RunnersSpec | None:
    if isinstance(at.value, bool):
        return RunnersSpec() if at.value else None
    return _RUNNERS_SECTION.read(at)  # type: ignore[no-any-return]


_SECTION = section({
    "indexes": Field(
        text(_WANTED, _MOST_CHARACTERS, f"^{_INDEXES}$", f"must be {_WANTED}").checked(_ranges, _ORDER, _MOST),
        f"The indexes of the elements, {_WANTED}. {_NEEDED}", "ranges"),
    "throttle": Field(integer(1, MOST_ELEMENTS), "How many elements run at a time; default: as many as there is room "
                      "for"),
    "matrix": Field(_MATRIX, "Parameters with their values; an element has one combination. The last one changes "
                    "fastest"),
    "exclude": Field(_EXCLUDE.to(tuple), "Combinations that are left out; a parameter that is absent stands for all of "
                     "its values"),
    "list": Field(_ENTRIES, "In place of a matrix: the parameters of each element", "entries"),
    "runners": Field(_RUNNERS, "Elements that run for seconds follow each other in the sandbox of a runner, of which "
                     "the throttle limits the number; true: with the defaults"),
}, model=ArraySpec).checked(
    _checked, _NEEDED, _MOST, _IN_MATRIX, _IN_LIST, _NOT_BOTH, _EXCLUDED, _ONE_VARIABLE
)  # fmt: skip
ARRAY = Field(
    cases(
        {
            str: text(_SHORT, _MOST_CHARACTERS, f"^{_INDEXES}(%[1-9][0-9]{{0,4}})?$", f"must be {_SHORT}").checked(
                _short, _ORDER, _MOST
            ),
            dict: _SECTION,
        },
        f"must be {_SHORT}, or a mapping; it is {{}}",
    ),
    "Many elements of this document, which are placed independently, each with an index (docs/arrays.md)",
)
ARRAY_RULES = (_BRACES, _FILLED, _NO_EXPIRY, _ONE_TASK, _ONCE, _SAME)


def check_array(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Checks the strings of a document with an array, and refuses fields that are not possible. Returns the fields."""
    array: ArraySpec | None = values.get("array")
    if array is None:
        for place, _ in at.named(SAME_INDEX):
            place.wrong("only possible with array", rule=ON_ARRAY)
        return values
    if at.get("limits", "max_pending").value is not None:
        message = "not possible with array: its elements wait for each other; `mizzen cancel --waiting` ends their wait"
        at.get("limits", "max_pending").wrong(message, rule=_NO_EXPIRY)
    if array.runners is not None:
        _check_runners(at, values, array.runners)
    longest = {name: max(given, key=lambda one: len(one.encode())) for name, given in options(array).items()}
    longest[INDEX] = "9" * 9
    places = [place for n, job in enumerate(values.get("jobs", [])) for place in _texts(at, n, job)]
    places += [at.get("files").child(path, content) for path, content in values.get("files", {}).items()]
    filled = sum(len(_fill(place, longest).encode()) for place in places)
    if filled > _MOST_FILLED_BYTES:
        message = f"with the longest values of its parameters, the document's strings have {filled} bytes; at most "
        at.get("array").wrong(f"{message}{_MOST_FILLED_BYTES} are possible", rule=_FILLED)
    return values


def _check_runners(at: At, values: dict[str, Any], runners: RunnersSpec) -> None:
    """Checks that elements can run one after another in the same sandbox: each is one task, without an image."""
    jobs = values.get("jobs", [])
    place = at.get("array").get("runners")
    if len(jobs) > 1 or any(job.get("tasks", 1) > 1 for job in jobs):
        place.wrong("runners are possible only for elements of one task, in one job", rule=_ONE_TASK)
    retries = at.get("limits", "retries")
    if runners.at_most_once and retries.value not in (None, 0):
        message = "must be 0 with array.runners.at_most_once, which starts no element again; leave it out"
        retries.wrong(message, rule=_ONCE)
    if values.get("outputs"):
        at.get("outputs").wrong("not possible with array.runners: elements share a working directory", rule=_ONE_TASK)
    for number, job in enumerate(jobs):
        own = at.get("jobs").child(number, at.get("jobs").value[number])
        if job.get("image") is not None:
            own.get("image").wrong("not possible with array.runners: runners have no containers", rule=_ONE_TASK)
        if job.get("output") == "separate":
            own.get("output").wrong("must be merged with array.runners", rule=_ONE_TASK)
        if "{{" in (job.get("setup") or ""):
            own.get("setup").wrong(f"braces are not possible here with array.runners: {_SAME}", rule=_SAME)
    for path, content in values.get("files", {}).items():
        if "{{" in content:
            at.get("files").child(path, content).wrong(
                f"braces are not possible here with array.runners: {_SAME}", rule=_SAME
            )


def _texts(at: At, number: int, job: dict[str, Any]) -> list[At]:
    own = at.get("jobs").child(number, at.get("jobs").value[number])
    run = own.get("run")
    words = [run.child(n, word) for n, word in enumerate(job.get("argv", ()))]
    words += [own.get(name).with_value(job[field]) for name, field in (("run", "script"), ("setup", "setup"))
              if job.get(field) is not None]  # fmt: skip
    return words + [own.get("env").child(name, value) for name, value in job.get("env", {}).items()]


def _fill(place: At, values: dict[str, str]) -> str:
    try:
        return fill(place.value, values)
    except UnknownParameter as error:
        name = str(error)
        what = f"{name} is no parameter of the array" if name else "two braces name no parameter of the array"
        place.wrong(f"{what}: use {{{{ NAME }}}} with {listed(values)}, or {{{{{{{{ for two braces", rule=_BRACES)
        return ""
