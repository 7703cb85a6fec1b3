"""Finds variables that the loops of a script carry from one pass to the next and that no checkpoint contains."""

import ast
from dataclasses import replace
from typing import Any

from mizzen.checkpoint.attribute_holders import has_state, is_plain_object
from mizzen.checkpoint.carried import carried, name_of, names_in, set_by_some, variable
from mizzen.checkpoint.in_place import InPlaceChanges
from mizzen.checkpoint.restored_names import is_own
from mizzen.checkpoint.script_frames import ScriptFrame, contains, passed
from mizzen.checkpoint.uses import Uses

PLAIN = "loader = ResumableLoader(loader) of mizzen.integrations.torch, and checkpointer.track(loader=loader)"
ENDLESS = (
    "itertools.cycle repeats the batches of one epoch, and its position is not saved: use "
    "itertools.chain.from_iterable(itertools.repeat(loader)) with a tracked ResumableLoader"
)


class Forgotten:
    """The variables of one function of a script that its loops carry."""

    def __init__(self, frame: ScriptFrame) -> None:
        """Finds nothing yet."""
        self._frame = frame
        self.returned: str | None = None
        """The message about a variable from which the function's result is computed."""
        self._from_one = False
        """Whether the counter of the loop begins at 1."""

    def told(self, loop: ast.For | ast.While) -> str | None:
        """Return the variable that a restart within a loop would not continue, with the line that keeps it."""
        frame = self._frame
        stored = names_in(loop, ast.Store)
        names = {
            name
            for name in carried(loop) - {"self"}
            # An attribute that is an object may be saved with another one.
            if not is_own(name) or (type(frame.names.get(name)) in (int, float) and not frame.is_known(variable(name)))
        }
        changes = InPlaceChanges(frame)
        names |= changes.of(loop)
        names = {one for one in names if one in frame.names and not self._is_continued(one, loop)}
        names -= {*changes.cleared(loop.body)}
        counter = self._counter(loop)
        names |= {counter[0]} if counter is not None else set()
        found, uses = list[str](), self._uses(names, changes, loop)
        while name := uses.first(frame.body, loop.lineno):
            found.append(name)
            names.remove(name)
            uses = self._uses(names, changes, loop)
        if uses.returned is not None and self.returned is None:
            self.returned = self._advice(uses.returned, loop, counter, is_changed=uses.returned not in stored)
        if not found and (name := self._given(names, changes)):
            found.append(name)
        if not found:
            names = set_by_some(loop, frame.body, frame.is_known) - frame.known
            name = Uses(names, frame.is_restored).first(frame.body, (loop.end_lineno or 0) + 1)
            found += [name] if name else []
        if not found and uses.divisor is not None and not hasattr(frame.names.get(uses.divisor), "shape"):
            return (
                f"line {uses.divided_at}: {uses.divisor} is 0 or empty after a restart from the last batch of an "
                "epoch. Divide by max(..., 1)"
            )
        return ". ".join(self._advice(name, loop, counter, is_changed=name not in stored) for name in found) or None

    def _is_continued(self, name: str, loop: ast.For | ast.While) -> bool:
        """Return whether a variable begins a loop with a restored value, or its object is in the checkpoint."""
        values, value = self._frame.values, self._frame.names[name]
        if self._frame.begins_restored(name, loop) or self._frame.is_saved(value):
            return True
        if any(values.is_kept(self._frame.names.get(name[:end])) for end, one in enumerate(name) if one == "."):
            return True
        is_object = hasattr(value, "__setitem__") or isinstance(getattr(value, "__dict__", None), dict)
        return is_object and values.is_reached(value)

    def _uses(self, names: set[str], changes: InPlaceChanges, loop: ast.For | ast.While) -> Uses:
        frame = self._frame
        uses = Uses(set(names), frame.is_restored, self._is_aligned, changes.callee, changes.unchanged())
        return replace(uses, end=loop.end_lineno or 0)

    def _advice(
        self, name: str, loop: ast.For | ast.While, counter: tuple[str, str] | None, *, is_changed: bool
    ) -> str:
        value = self._frame.names[name]
        if counter is not None and name == counter[0]:
            return (
                f"line {loop.lineno}: {name} would count from the start again in a resumed epoch. Write "
                f"enumerate({counter[1]}, {counter[1]}.used)"
            )
        if self._frame.values.is_plain(value) or type(value).__name__ == "generator":
            return f"{name} would begin again after a restart: its position is not tracked. Track its loader: {PLAIN}"
        # What each call of the function creates cannot be tracked.
        is_changed = is_changed and (not self._frame.is_called or name in self._frame.given or is_own(name))
        return ENDLESS if type(value).__name__ == "cycle" else untold(name, loop.lineno, value if is_changed else None)

    def _given(self, names: set[str], changes: InPlaceChanges) -> str | None:
        """Return the name that a function reads which a tracked object has got, as in `LambdaLR(opt, rate)`."""
        for one in ast.walk(self._frame.tree):
            if isinstance(one, ast.Assign) and any(map(self._is_kept, one.targets)):
                given = [part for call in ast.walk(one.value) if isinstance(call, ast.Call) for part in call.args]
                read = [changes.read_by(part) for part in given]
                if found := names & set[str]().union(*read):
                    return min(found)
        return None

    def _is_kept(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and self._frame.values.is_kept(self._frame.names.get(target.id))

    def _counter(self, loop: ast.For | ast.While) -> tuple[str, str] | None:
        """Return the counter of a loop over `enumerate(loader)`, and the loader's expression."""
        frame = self._frame
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
            return None
        first = loop.target.elts[0]
        if name_of(loop.iter) != "enumerate" or not isinstance(first, ast.Name) or not isinstance(loop.iter, ast.Call):
            return None
        begins = [*loop.iter.args[1:], *(one.value for one in loop.iter.keywords)]
        if any(frame.is_known(one) for one in begins):
            return None
        self._from_one = [ast.unparse(one) for one in begins] == ["1"]
        loaders = [one for one in passed(loop.iter) if frame.values.is_loader(frame.value(one))]
        return (first.id, ast.unparse(loaders[0])) if loaders else None

    def _is_aligned(self, one: ast.If) -> bool:
        """Return whether all saves are within a condition such as `(i + 1) % 4 == 0`, so that its phase stays."""
        frame = self._frame
        test: ast.expr = one.test
        if isinstance(test, ast.Name):
            made = [
                part.value for part in ast.walk(frame.tree) if isinstance(part, ast.Assign) and _is_named(part, test.id)
            ]
            test = made[0] if len(made) == 1 else test
        if not any(contains(part, frame.line) for part in one.body) or not isinstance(test, ast.Compare):
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


def untold(name: str, line: int, value: Any = None) -> str:
    """Return the message about a variable that the loop of a line uses. `value`: what it holds if that is changed."""
    short = name.rpartition(".")[2]
    is_whole = isinstance(value, dict) or is_plain_object(value) or has_state(value)
    tracked = f'{{"{short}": {name}}}' if hasattr(value, "shape") else name if is_whole else None
    if tracked is None and isinstance(getattr(value, "__dict__", None), dict) and vars(value):
        tracked = f"vars({name})"
    if tracked is not None:
        advice = f"Track it: checkpointer.track({short}={tracked})"
    else:
        advice = (
            f'Keep it there: set checkpointer.progress["{short}"] before restore(), '
            "and use that instead of the variable"
        )
    return f"{name}, which the loop of line {line} uses, is not in the checkpoint. {advice}"


def _is_named(one: ast.Assign, name: str) -> bool:
    return len(one.targets) == 1 and isinstance(one.targets[0], ast.Name) and one.targets[0].id == name
