"""Finds what a restart of a script would repeat or forget, from the source of the loops around its `step()`.

After a restart, a loop must continue at the restored position: it iterates a tracked loader, its range begins at the
restored step, or it passes over what was done. Variables that it carries from one pass to the next, such as a sum of
losses, a counter or an iterator, must be in the checkpoint, unless they are only shown.

The analysis follows names. If it cannot tell, it is silent, because a warning in an exact script does harm, too.
"""

import ast
import linecache
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any

from mizzen.checkpoint import loops
from mizzen.checkpoint.carried import (
    Uses,
    bindings,
    carried,
    following,
    name_of,
    names_in,
    root_of,
    set_by_some,
    unassigned,
)
from mizzen.checkpoint.random_draws import Beginnings, Draws
from mizzen.checkpoint.restored_names import (
    RANGES,
    SELF,
    OwnAttributes,
    RestoredNames,
    Values,
    is_own,
    own_attributes,
)

_PASSING = ("enumerate", "tqdm", "zip", "islice", "iter")
"""Functions that yield items of an iterable."""
_MANY = 100
"""Lists with as many items are not looked into."""
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)

PLAIN = "loader = ResumableLoader(loader) of mizzen.integrations.torch, and checkpointer.track(loader=loader)"
ENDLESS = (
    "itertools.cycle repeats the batches of one epoch, and its position is not saved: use "
    "itertools.chain.from_iterable(itertools.repeat(loader)) with a tracked ResumableLoader"
)


def told(restored: loops.Stack, values: Values) -> str | None:
    """Return what a restart would not continue, with the line that repairs it; None if nothing was found.

    Args:
        restored: the functions that were running when the script called `restore`.
        values: the kinds of values.
    """
    before = dict(restored)
    if not before:
        return None
    is_inner, call = True, None
    for frame in _frames(before):
        place = _Place(frame, before.get(frame.f_code, 0), values)
        if found := place.told(is_inner, call):
            return found
        is_inner = is_inner and not place.loops
        call = place.is_returned
    return None


def _frames(before: dict[Any, int]) -> Iterator[FrameType]:
    """Yield the frames of the script, without those of libraries, up to the one that called `restore`."""
    for frame in loops.frames():
        if loops.is_of_library(frame.f_code.co_filename):
            return
        yield frame
        if frame.f_code in before:
            return


class _Place:
    """A running function of the script."""

    def __init__(self, frame: FrameType, restored_at: int, values: Values) -> None:
        self.line = frame.f_lineno
        self.values = values
        self.names = {**frame.f_globals, **frame.f_locals}
        tree = OwnAttributes().visit(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))
        self.tree = tree
        own = own_attributes(frame.f_locals)
        self.names |= own
        around = [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and _contains(one, self.line)]
        functions = [one for one in around if isinstance(one, ast.FunctionDef)]
        function = max(functions, key=lambda one: one.lineno, default=None)
        self.body = function.body if function else tree.body
        self.given = (
            {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)} if function else set[str]()
        )
        found = [one for one in around if isinstance(one, ast.For | ast.While) and not _repeats(one, restored_at)]
        first = self.body[0].lineno if self.body else 0
        self.loops = sorted((one for one in found if one.lineno >= first), key=lambda one: -one.lineno)
        """The loops that contain the line, the innermost first. A loop that also contains the call of `restore` is left
        out: each of its passes restores."""
        self.loaders = {name for name, value in self.names.items() if values.is_loader(value)}
        known = {name for name, value in self.names.items() if values.is_position(value)} | self.loaders
        known |= {name for name in self.names if name.removeprefix(SELF) in values.saved}
        if values.is_kept(frame.f_locals.get("self")):
            known |= own.keys()
        restored = RestoredNames(tree, self.names, known, values)
        self._known, self.is_known, self._value = restored.known, restored.is_known, restored.value
        self._is_called = not restored_at
        """Whether the training calls this function again and again."""
        self.is_returned = False
        self._from_one = False
        """Whether the counter of the loop begins at 1."""

    def told(self, is_inner: bool, is_called: bool | None) -> str | None:
        """See the function `told`. `is_called`: whether the inner function returns a carried value."""
        for number, loop in enumerate(self.loops):
            if isinstance(loop, ast.For) and (found := self._begins_again(loop, is_inner and not number)):
                return found
            if found := self._forgets(loop):
                return found
        if is_inner and self.loops and (found := self._unset(self.loops[0])):
            return found
        if is_called:
            assigned = [one for part in self.body for one in ast.walk(part) if isinstance(one, ast.Assign)]
            for called in (one for one in assigned if _contains(one, self.line)):
                uses = Uses(names_in(called, ast.Store) - self._known, self.is_known)
                if name := uses.first(self.body, (called.end_lineno or 0) + 1):
                    return _forgotten(name, self.line)
        beginnings = Beginnings(self.names, self.values, self.is_known, self._value, self._passes_over)
        if found := self._cycles() or beginnings.sequence([*(loop.body for loop in self.loops), self.body]):
            return found
        if any(map(self._passes_over, self.loops)):
            return None  # What is passed over may draw, too.
        outer = [loop.body for loop in self.loops[1:]]
        if self._is_called and self.loops:
            outer.append(self.body)
        draws = Draws(self.names, self.tree)
        for inner, body in zip(self.loops, outer, strict=False):
            if found := draws.again(body, inner) or beginnings.again(body, inner):
                return found
        if self.loops and (found := draws.before_batch(self.loops[0], self._is_saved)):
            return found
        return draws.untracked(self.loops, self.is_known, self.values.generator)

    def _begins_again(self, loop: ast.For, is_inner: bool) -> str | None:
        passed = list(_passed(loop.iter))
        values = [self._value(one) for one in passed]
        tracked = [one for one, value in zip(passed, values, strict=True) if self.values.is_loader(value)]
        is_plain = any(self.values.is_plain(value) for value in values)
        if any(self.values.is_loader(getattr(value, "_dataloader", None)) for value in values):
            return f"line {loop.lineno}: Fabric sets the loader to epoch 0 then. Iterate the ResumableLoader itself"
        if tracked and self._is_limited(loop, passed):
            name = ast.unparse(tracked[0])
            return (
                f"line {loop.lineno}: a resumed epoch would get its full number of batches once more. Write "
                f"for i, batch in enumerate({name}, {name}.used), and leave the loop with if i == n: break"
            )
        if not tracked and self.is_known(loop.iter):
            return self._positioned_once(loop, passed)
        if (not tracked or is_plain) and self._passes_over(loop):
            return None
        if is_plain or (is_inner and any(name_of(one) == "DataLoader" for one in passed)):
            return f"line {loop.lineno}: the epoch would begin again. Track the loader: {PLAIN}"
        is_range = any(name_of(one) in RANGES for one in passed)
        pairs = zip(passed, values, strict=True)
        unknown = any(isinstance(one, ast.Name | ast.Attribute) and value is None for one, value in pairs)
        is_new = is_range or (is_inner and not any(_is_opaque(value) for value in values))
        if tracked or unknown or not is_new or self._is_key(loop) or any(map(self._is_given, passed)):
            return None
        if self._calls_items(loop) or self._is_chunk(loop):
            return None
        return (
            f"line {loop.lineno}: this loop would begin again after a restart. Begin it at the restored position, as "
            "in for epoch in range(loader.epoch, epochs), or for step in range(checkpointer.restore(), steps)"
        )

    def _is_given(self, node: ast.expr) -> bool:
        """Return whether a function gets a restored value: it may begin there, in ways that cannot be followed."""
        return isinstance(node, ast.Call) and any(map(self.is_known, (*node.args, *node.keywords)))

    def _calls_items(self, loop: ast.For) -> bool:
        """Return whether a loop calls its items, such as callbacks, one of which reports the step."""
        targets = names_in(loop.target, ast.Store)
        calls = [one for part in loop.body for one in ast.walk(part) if isinstance(one, ast.Call)]
        return any(root_of(one) in targets and _contains(one, self.line) for one in calls)

    def _is_chunk(self, loop: ast.For) -> bool:
        """Return whether a loop runs only some steps of a longer training, so it is no fault if it ends early."""
        if names_in(loop.target, ast.Store) & names_in(loop):
            return False
        return self._is_called or any(isinstance(one, ast.While) and self.is_known(one.test) for one in self.loops)

    def _is_limited(self, loop: ast.For, passed: list[ast.expr]) -> bool:
        """Return whether a loop takes a fixed number of batches, by `islice` or a range beside the loader."""
        if any(name_of(one) in RANGES and not self.is_known(one) for one in passed):
            return True
        calls = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Call) and name_of(one) == "islice"]
        return any(not any(self.is_known(part) for part in one.args[1:]) for one in calls)

    def _positioned_once(self, loop: ast.For, passed: list[ast.expr]) -> str | None:
        """Tell a loader that begins at the restored position in each epoch, because it is created before the epochs."""
        names = {one.id for one in passed if isinstance(one, ast.Name) and self.values.is_plain(self.names.get(one.id))}
        others = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Name | ast.Attribute)]
        if any(self.is_known(one) for one in others if not names_in(one) & names):
            return None
        outer = [one for one in self.loops if one is not loop and _contains(one, loop.lineno)]
        made = [one for one in ast.walk(self.tree) if isinstance(one, ast.Assign) and names_in(one, ast.Store) & names]
        if made and any(not any(_contains(one, part.lineno) for part in made) for one in outer):
            return (
                f"line {made[0].lineno}: after a restart, each later epoch would begin at the restored position, too. "
                f"Create the loader in the loop over the epochs, or track it: {PLAIN}"
            )
        return None

    def _unset(self, loop: ast.For | ast.While) -> str | None:
        """Tell a variable that only the loop sets but later lines use, if the loop may have no passes left."""
        rest = loop.test if isinstance(loop, ast.While) else loop.iter
        if not self.is_known(rest) or (isinstance(rest, ast.Call) and name_of(rest) not in (*RANGES, *_PASSING)):
            return None
        bound = self.given | {one.id for part in self.body for one in bindings(part) if one.lineno < loop.lineno}
        bound |= {
            name for one in ast.walk(self.tree) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names
        }
        later = unassigned(following(self.body, loop) or [])
        for one in sorted(later, key=lambda one: one.lineno):
            if one.id in {each.id for each in bindings(loop)} - bound and not is_own(one.id):
                return (
                    f"line {one.lineno}: {one.id} is not set after a restart from the last pass of the loop of line "
                    f"{loop.lineno}. Set it before that loop, too"
                )
        return None

    def _is_key(self, loop: ast.For) -> bool:
        """Return whether the target of a loop selects restored values, as in `range(progress[phase], 4)`."""
        targets = names_in(loop.target, ast.Store)
        uses = [one for one in ast.walk(loop) if isinstance(one, ast.Call | ast.Subscript | ast.Compare)]
        selecting = [one for one in uses if self.is_known(one) and name_of(one) not in ("print", "step")]
        return any(names_in(one) & targets for one in selecting)

    def _passes_over(self, loop: ast.For | ast.While) -> bool:
        """Return whether a loop may pass over what was done before a restart, by a comparison with a counter."""
        if not isinstance(loop, ast.For):
            return False
        counted = names_in(loop.target, ast.Store) | {
            one.target.id
            for one in ast.walk(loop)
            if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)
        }
        for one in ast.walk(loop):
            if isinstance(one, ast.If) and (names_in(one.test) & counted or self.is_known(one.test)):
                if isinstance(one.body[-1], ast.Continue):
                    return True
                is_ordered = any(isinstance(part, _ORDERED) for part in ast.walk(one.test))
                if is_ordered and any(_contains(part, self.line) for part in one.body):
                    return True
        return False

    def _forgets(self, loop: ast.For | ast.While) -> str | None:
        stored = names_in(loop, ast.Store)
        names = {
            name
            for name in carried(loop) - self._known - {"self"}
            if name in self.names and not self._is_saved(self.names[name])
            # A tracked dict has it.
            if name in stored or not self.values.is_inside(self.names[name])
            # An attribute that is an object may be saved with another one.
            if not is_own(name) or (type(self.names[name]) in (int, float) and not self.is_known(ast.Name(name)))
        }
        counter = self._counter(loop)
        names |= {counter[0]} if counter is not None else set()
        uses = Uses(names, self._is_restored, self._is_aligned, loop.end_lineno or 0)
        name = uses.first(self.body, loop.lineno)
        if name is None:
            names = set_by_some(loop, self.body, self.is_known) - self._known
            name = Uses(names, self._is_restored).first(self.body, (loop.end_lineno or 0) + 1)
        self.is_returned |= uses.returned
        if name is None and uses.divisor is not None and not hasattr(self.names.get(uses.divisor), "shape"):
            return (
                f"line {uses.divided_at}: {uses.divisor} is 0 or empty after a restart from the last batch of an "
                "epoch. Divide by max(..., 1)"
            )
        if name is None:
            return None
        if counter is not None and name == counter[0]:
            return (
                f"line {loop.lineno}: {name} would count from the start again in a resumed epoch. Write "
                f"enumerate({counter[1]}, {counter[1]}.used)"
            )
        if self.values.is_plain(self.names[name]) or type(self.names[name]).__name__ == "generator":
            return f"{name} would begin again after a restart: its position is not tracked. Track its loader: {PLAIN}"
        return ENDLESS if type(self.names[name]).__name__ == "cycle" else _forgotten(name, loop.lineno)

    def _is_restored(self, node: ast.AST) -> bool:
        is_kept = isinstance(node, ast.expr) and self.values.is_kept(self.names.get(root_of(node)))
        return is_kept or self.is_known(node)

    def _is_saved(self, value: Any) -> bool:
        """Return whether a value is tracked, or has iterators of tracked loaders: their positions are saved."""
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            frame = value.gi_frame
            inner = {**frame.f_locals, **own_attributes(frame.f_locals)}.values()
            return any(isinstance(one, GeneratorType) and self._is_saved(one) for one in inner) or any(
                map(self.values.is_loader, inner)
            )
        if isinstance(value, list | tuple | dict) and 0 < len(value) < _MANY:
            return all(map(self._is_saved, value.values() if isinstance(value, dict) else value))
        return self.values.is_kept(value) or self.values.is_loader(value)

    def _counter(self, loop: ast.For | ast.While) -> tuple[str, str] | None:
        """Return the counter of a loop over `enumerate(loader)`, and the loader's expression."""
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
            return None
        first = loop.target.elts[0]
        if name_of(loop.iter) != "enumerate" or not isinstance(first, ast.Name) or not isinstance(loop.iter, ast.Call):
            return None
        begins = [*loop.iter.args[1:], *(one.value for one in loop.iter.keywords)]
        if any(self.is_known(one) for one in begins):
            return None
        self._from_one = [ast.unparse(one) for one in begins] == ["1"]
        loaders = [one for one in _passed(loop.iter) if self.values.is_loader(self._value(one))]
        return (first.id, ast.unparse(loaders[0])) if loaders else None

    def _is_aligned(self, one: ast.If) -> bool:
        """Return whether all saves are within a condition such as `(i + 1) % 4 == 0`, so that its phase stays."""
        test: ast.expr = one.test
        if isinstance(test, ast.Name):
            made = [
                part.value for part in ast.walk(self.tree) if isinstance(part, ast.Assign) and _is_named(part, test.id)
            ]
            test = made[0] if len(made) == 1 else test
        if not any(_contains(part, self.line) for part in one.body) or not isinstance(test, ast.Compare):
            return False
        if not isinstance(test.left, ast.BinOp) or not isinstance(test.left.op, ast.Mod):
            return False
        divided, divisor, right = test.left.left, test.left.right, test.comparators[0]
        is_added = ast.unparse(divided).endswith(" + 1")
        if is_added != self._from_one:
            return ast.unparse(right) == "0"
        if is_added:
            return False
        if isinstance(divisor, ast.Constant) and isinstance(divisor.value, int):
            return ast.unparse(right) == str(divisor.value - 1)
        return ast.unparse(right) == f"{ast.unparse(divisor)} - 1"

    def _cycles(self) -> str | None:
        for one in ast.walk(self.tree):
            if isinstance(one, ast.Call) and name_of(one) == "cycle" and one.args:
                inner = one.args[0]
                if self.values.is_loader(self._value(inner)) or root_of(inner) in self.loaders:
                    return f"line {one.lineno}: {ENDLESS}"
        return None


def _forgotten(name: str, line: int) -> str:
    return (
        f"{name}, which the loop of line {line} uses, is not in the checkpoint. Keep it there: set "
        f'checkpointer.progress["{name.removeprefix(SELF)}"] before restore(), and use that instead of the variable'
    )


def _passed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions of the iterables that a loop takes: `x` and `y` of `enumerate(zip(x, y))`."""
    if isinstance(node, ast.Call) and name_of(node) in _PASSING:
        for argument in node.args:
            yield from _passed(argument)
    else:
        yield node


def _contains(one: ast.stmt | ast.expr, line: int) -> bool:
    return one.lineno <= line <= (one.end_lineno or 0)


def _repeats(loop: ast.For | ast.While, line: int) -> bool:
    """Return whether the body of a loop contains a line."""
    return loop.body[0].lineno <= line <= (loop.end_lineno or 0)


def _is_named(one: ast.Assign, name: str) -> bool:
    return len(one.targets) == 1 and isinstance(one.targets[0], ast.Name) and one.targets[0].id == name


def _is_opaque(value: Any) -> bool:
    """Return whether an iterable may have a position of its own, such as a generator."""
    return value is not None and (hasattr(value, "__next__") or hasattr(value, "sampler"))


def is_look(iterator: Any, restored: loops.Stack) -> bool:
    """Return whether a variable of the script holds an iterator that no loop advances: it was taken for a look."""
    for frame in _frames(dict(restored)):
        held = {name for name, value in {**frame.f_globals, **frame.f_locals}.items() if value is iterator}
        if held:
            tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
            inside = [one for loop in ast.walk(tree) if isinstance(loop, ast.For | ast.While) for one in ast.walk(loop)]
            return not any(isinstance(one, ast.Name) and one.id in held for one in inside)
    return False
