"""Encoding of parts as files: values round-trip, arrays are not copied, and untrusted pickles do not run."""

import importlib
import json
import math
import os
import pickle
import struct
import sys
import threading
import time
from collections import Counter, OrderedDict, deque, namedtuple
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from mizzen.checkpoint import CheckpointError, CorruptCheckpointError, StateError
from mizzen.checkpoint.parts import Pickled, decode, encode, file_name
from mizzen.checkpoint.tensors import SMALL_BYTES, loaded
from tests.sdk.scripts import passes

TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**1020, max_value=2**30000),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=20),
)
_dtypes = st.one_of(st.sampled_from(TYPES), st.sampled_from([">i2", ">u8", ">f4", ">f8", ">c16"])).map(np.dtype)
_arrays = _dtypes.flatmap(
    lambda dtype: hn.arrays(dtype, hn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
_views = _arrays.map(lambda array: array.T) | _arrays.map(lambda array: array[..., ::2] if array.ndim else array)
_numpy_scalars = _arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
_keys = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["$dict", "$tuple", "$", "__metadata__", "a/b", "~1", "value"]),
    st.integers(),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.tuples(st.integers(), st.text(max_size=3)),
)
_trees = st.recursive(
    st.one_of(_scalars, _arrays, _views, _numpy_scalars),
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.dictionaries(_keys, below, max_size=4),
        st.dictionaries(st.text(max_size=3), below, max_size=4),
    ),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    """Asserts equal structure, order, types, shapes and bits; arrays in the other byte order must have equal values."""
    if isinstance(right, np.ndarray | np.generic):
        native = right.astype(right.dtype.newbyteorder("="))
        assert type(left) is type(native) and (left.dtype, left.shape) == (native.dtype, native.shape)
        assert left.tobytes() == native.tobytes()
    elif isinstance(right, dict):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left.items(), right.items(), strict=True):
            assert_same(one, other)
    elif isinstance(right, list | tuple):
        assert type(left) is type(right) and len(left) == len(right)
        for item, other_item in zip(left, right, strict=True):
            assert_same(item, other_item)
    elif isinstance(right, float):
        assert type(left) is float
        assert struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    elif isinstance(right, complex):
        assert_same([left.real, left.imag], [right.real, right.imag])
    else:
        assert type(left) is type(right) and left == right


def content(value: Any, name: str = "p") -> tuple[str, bytearray]:
    """Encodes a value; returns its kind and the content of its file."""
    kind, chunks = encode(name, value)
    return kind, bytearray(b"".join(chunks))


def back(value: Any) -> Any:
    """Encodes and decodes a value."""
    return decode(*content(value))


def header(file: bytearray) -> dict[str, Any]:
    """Returns the header of a safetensors file."""
    (length,) = struct.unpack_from("<Q", file)
    loaded = json.loads(file[8 : 8 + length])
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.rotating
@given(_trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    """Values of all supported types, nestings and keys, and arrays of any type, order and shape, load as saved."""
    assert_same(back([tree])[0], tree)


@given(_trees)
def test_the_same_tree_gives_the_same_file(tree: Any) -> None:
    """The file depends only on the values, so an unchanged part has the same checksum."""
    assert content([tree]) == content([tree])


@given(_trees)
def test_the_files_are_of_their_formats(tree: Any) -> None:
    """A json part is strict JSON without NaN. A tensors part has a strict JSON header, and its data has no gaps."""

    def refused(constant: str) -> None:
        raise AssertionError(constant)

    kind, file = content([tree])
    if kind == "json":
        json.loads(file, parse_constant=refused)
        return
    entries = header(file)
    metadata = entries.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    json.loads(metadata["mizzen.tree"], parse_constant=refused)
    "".join(entries).encode()
    start = 8 + struct.unpack_from("<Q", file)[0]
    assert start % 64 == 0
    end = 0
    for low, high in sorted(entry["data_offsets"] for entry in entries.values()):
        assert low == end
        end = high
    assert start + end == len(file)


@pytest.mark.parametrize("name", TYPES)
def test_loaded_arrays_are_writable_views_of_the_data(name: str) -> None:
    """A loaded array is a writable view of the file's memory."""
    kind, file = content({"a": np.arange(6).astype(name).reshape(2, 3)})
    found = decode(kind, file)["a"]
    before = bytes(file)
    found[...] = 1
    assert bytes(file) != before
    assert decode("tensors", memoryview(file))["a"].tobytes() == np.ones((2, 3), name).tobytes()


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_arrays_keep_the_order_of_their_axes_in_memory(axes: tuple[int, ...], dtype: str) -> None:
    """Otherwise a sum or a product would be rounded differently. Other readers find the elements in C order."""
    array = np.arange(24).astype(dtype).reshape(2, 3, 4).transpose(axes)
    kind, chunks = encode("a", {"x": array, "gaps": array[:, ::2]})
    content = bytearray().join(chunks)
    found = decode(kind, content, name="a")
    assert found["x"].strides == array.strides and (found["x"] == array).all()
    assert found["gaps"].flags.c_contiguous and (found["gaps"] == array[:, ::2]).all()
    found["x"][:] = 0


def test_chunks_are_the_live_memory() -> None:
    """Chunks are views of large contiguous arrays and bytes: a later change of the array is visible in them."""
    array, raw = np.zeros(SMALL_BYTES // 4, np.float32), bytearray(SMALL_BYTES)
    (_, *chunks), (alone,) = encode("p", {"a": array, "b": raw})[1], encode("p", raw)[1]
    array[:], raw[:] = 1, b"x" * SMALL_BYTES
    assert b"".join(chunks) == array.tobytes() + raw
    assert bytes(alone) == raw


def test_an_array_outlives_its_owner_in_the_chunks() -> None:
    """Chunks keep references to temporary arrays, so their content is stored correctly."""
    made = [lambda i=i: np.full((50, 20), i, np.float64).T for i in range(50)]

    class Fresh(dict[str, Any]):
        def items(self) -> Any:
            return ((str(i), make()) for i, make in enumerate(made))

    found = back(Fresh(dict.fromkeys(map(str, range(50)))))
    assert [float(found[str(i)].min()) for i in range(50)] == [float(found[str(i)].max()) for i in range(50)]
    assert [float(found[str(i)][0, 0]) for i in range(50)] == list(range(50))


def test_shared_memory_is_stored_once() -> None:
    """Arrays that share memory are stored once and load as one object; equal copies are separate."""
    shared = np.arange(1000.0)
    kind, file = content({"in": shared, "out": [shared[:]], "copy": shared.copy(), "turned": shared[::-1]})
    assert len(file) < 3.5 * shared.nbytes
    found = decode(kind, file)
    assert found["in"] is found["out"][0]
    found["in"][0] = 7
    assert found["copy"][0] == 0
    assert found["turned"][0] == 999


def test_names_of_tensors_are_their_paths() -> None:
    """Tensors are named by their paths; keys that would collide, or are reserved by the format, get a suffix."""
    array = np.zeros(1)
    tree = {1: array, "1": array + 1, "__metadata__": array + 2, "a/b": {"c": array + 3}, "\ud800": array + 4}
    kind, file = content(tree)
    assert_same(decode(kind, file), tree)
    assert sorted(header(file)) == ["1", "1~2", "\\ud800", "__metadata__", "__metadata__~2", "a~1b/c"]


def test_complex_numbers_are_pairs_for_other_readers() -> None:
    """A complex array is stored as floats with an additional last axis of length 2."""
    entry = header(content({"z": np.array([[1 + 2j]], np.complex64)})[1])["z"]
    assert (entry["dtype"], entry["shape"]) == ("F32", [1, 1, 2])


class Colour(str, Enum):  # noqa: UP042  # str() of a member is not its value.
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        ([bytearray(b"ab"), memoryview(b"abcd")[::2]], [b"ab", b"ac"]),
        (Counter({30: 1, 80: 2}), Counter({30: 1, 80: 2})),
        ({3, 1, "b", (1, 2)}, {3, 1, "b", (1, 2)}),
        (frozenset({3, 1}), frozenset({3, 1})),
        (deque([1, [2]], 5), deque([1, [2]], 5)),
        ([Colour.RED, Level.HIGH, {Colour.RED: 1}], ["red", 3, {"red": 1}]),
        (bytearray(b"raw"), b"raw"),
        (memoryview(b"abcd")[::2], b"ac"),
        (np.str_("text"), "text"),
    ],
)
def test_other_classes_load_as_the_plain_ones(value: Any, loaded: Any) -> None:
    """Subclasses and buffers load as the plain type in the documentation; a Counter loads as a Counter."""
    assert_same(back(value), loaded)


def test_a_pickle_of_what_was_loaded_has_the_same_bytes() -> None:
    """A pickle writes an equal text once more if it is another object; names in source code are one object."""
    value = {"eps": 1.0, "mode": "min", "0.weight": 2}
    assert pickle.dumps([back(value), {"eps": "min"}]) == pickle.dumps([value, {"eps": "min"}])


def test_the_order_of_a_set_does_not_change_its_file() -> None:
    """Equal sets give the same file, and a deque keeps its greatest length."""
    one, other = set(range(64)), set(range(10_000))
    other -= set(range(64, 10_000))
    assert encode("p", {"a": one}) == encode("p", {"a": other})
    found = back(deque([1, 2], 2))
    found.append(3)
    assert found == deque([2, 3], 2)


Point = namedtuple("Point", "x y")


def test_named_tuples_come_back_as_their_class() -> None:
    """Named tuples load as their class; if it cannot be imported, as a class with the same name and fields."""

    class Inner(NamedTuple):
        total: int
        mu: Any

    tree = {"state": (Point(1, [Inner(2, np.arange(3))]),)}
    (point,) = back(tree)["state"]
    (inner,) = point.y
    assert type(point) is Point and point.x == 1
    assert (type(inner).__name__, type(inner)._fields, inner.total) == ("Inner", ("total", "mu"), 2)
    assert inner.mu.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tagged",
    ['["os","system",["a"],[1]]', '["builtins","tuple",["a"],[1]]', '["x","y",["class"],[1]]', '["x","y",["a b"],[1]]',
     '["x","y z",["a"],[1]]', '["x","y",["a"],[1,2]]', '["x"]'],
)  # fmt: skip
def test_a_named_tuple_runs_nothing(tagged: str) -> None:
    """A class name in a file is never called: the value loads as a plain named tuple, or the file is corrupt."""
    try:
        value = decode("json", bytearray(b'{"$namedtuple":' + tagged.encode() + b"}"))
    except CorruptCheckpointError:
        return
    assert tuple(value) == (1,) and type(value)._fields == ("a",)


def test_the_versions_of_modules_come_back() -> None:
    """The `_metadata` of a module's state is kept, because modules need it to migrate states of older versions."""
    state = OrderedDict(weight=np.arange(2.0))
    state._metadata = OrderedDict([("", {"version": 2}), ("layer", {"version": 1})])  # type: ignore[attr-defined]
    found = back({"model": state, "plain": OrderedDict(a=1)})
    assert found["model"]._metadata == {"": {"version": 2}, "layer": {"version": 1}}
    assert type(found["model"]) is OrderedDict and found["model"]["weight"].tolist() == [0.0, 1.0]
    assert not hasattr(found["plain"], "_metadata")


@pytest.mark.parametrize(
    "value",
    [{object()}, np.array(["x"]), np.array([None]), np.longdouble(1), np.datetime64("2026-01-01"), object(), print],
)
def test_what_is_not_stored_is_refused(value: Any) -> None:
    """A value that cannot be restored is an error that names its path."""
    with pytest.raises(StateError, match=r"part 'p' at deep/0: "):
        encode("p", {"deep": [value]})


def test_a_tree_that_contains_itself_is_refused() -> None:
    """A value that contains itself is an error."""
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(StateError, match="part 'p': the value contains itself"):
        encode("p", tree)


def test_a_path_is_the_content_of_its_file(tmp_path: Path) -> None:
    """A path is stored as the content of its file, which is memory-mapped. A folder is an error."""
    file = tmp_path / "a"
    file.write_bytes(b"x" * 100_000)
    kind, (chunk,) = encode("p", file)
    file.unlink()
    assert kind == "bytes" and isinstance(chunk, memoryview) and chunk == b"x" * 100_000
    (tmp_path / "empty").touch()
    assert back(tmp_path / "empty") == b""
    with pytest.raises(StateError, match=r"part 'p': the file .* cannot be read"):
        encode("p", tmp_path)


class Evil:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_is_loaded_only_where_it_is_trusted(tmp_path: Path) -> None:
    """Without `trusted=True` a pickle is not loaded, and the error names the part and the argument."""
    kind, file = content(Pickled(Evil(str(tmp_path / "made"))))
    assert (kind, file_name("p", kind)) == ("pickle", "part-p.pickle")
    with pytest.raises(CheckpointError, match=r"part 'p' is a pickle.*pass trusted=True"):
        decode(kind, file, name="p")
    assert not (tmp_path / "made").exists()
    decode(kind, file, trusted=True)
    assert (tmp_path / "made").exists()
    assert decode(*content(Pickled({1, 2})), trusted=True) == {1, 2}
    with pytest.raises(CheckpointError, match="part 'p': the pickle cannot be loaded"):
        decode("pickle", bytearray(b"cnowhere\nthing\n."), trusted=True, name="p")


@pytest.mark.parametrize("cut", [0, 7, 8, 20, 100, 400, -1])
def test_a_short_file_is_corrupt(cut: int) -> None:
    """A truncated tensors part raises CorruptCheckpointError, wherever it is cut."""
    kind, file = content({"a": np.arange(100.0)})
    with pytest.raises(CorruptCheckpointError, match="the content cannot be decoded as tensors"):
        decode(kind, file[:cut])


@pytest.mark.parametrize(
    "tree",
    [
        '{"$numpy":"b"}', '{"$numpy":["a","complex64"]}', '{"$torch":["a","object"]}', '{"$scalar":["object","00"]}',
        '{"$what":1}', '{"$int":1}', "[", "[" * 100_000, '{"$tuple":3}', '{"$complex":[1,2,3]}',
    ],
)  # fmt: skip
def test_a_wrong_tree_is_corrupt(tree: str) -> None:
    """A tree with missing tensors, unknown tags or invalid values raises CorruptCheckpointError."""
    entries = {"__metadata__": {"mizzen.tree": tree}, "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    text = json.dumps(entries).encode()
    with pytest.raises(CorruptCheckpointError):
        decode("tensors", bytearray(struct.pack("<Q", len(text)) + text + b"ab"))


def test_the_core_needs_neither_numpy_nor_torch() -> None:
    """Saving imports neither numpy nor torch. If numpy is missing, loading arrays raises an error that says so."""
    _, file = content({"a": np.arange(3), "s": np.float32(1)})
    passes(f"""
from mizzen.checkpoint import CheckpointError, Tracked
from mizzen.checkpoint.parts import decode, encode
tracked = Tracked({{"data": {{"a": (1, None), 2: b"x"}}}})
state = tracked.capture(3)
for name, value in state.items():
    kind, chunks = encode(name, value)
    assert decode(kind, bytearray(b"".join(chunks))) == value
tracked.restore(state)
assert not {{"numpy", "torch"}} & set(sys.modules)
sys.modules["numpy"] = None
try:
    decode("tensors", bytearray({bytes(file)!r}), name="model")
except CheckpointError as error:
    assert "part 'model' holds numpy arrays: install numpy to load it (pip install numpy)" == str(error), error
else:
    raise AssertionError("loaded")
""")


def test_a_module_that_another_thread_imports_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that begins while a library is imported in the background finds all of its names."""
    (tmp_path / "imported_slowly.py").write_text("import time\n\ntime.sleep(0.5)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=importlib.import_module, args=["imported_slowly"])
    thread.start()
    while "imported_slowly" not in sys.modules:
        time.sleep(0.01)
    assert loaded("imported_slowly").whole
    thread.join()
