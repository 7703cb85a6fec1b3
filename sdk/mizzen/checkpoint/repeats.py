"""Finds what a restart of a script would repeat or forget, from the source of the loops around its `step()`.

After a restart, a loop must continue at the restored position: it iterates a tracked loader, its range begins at the
restored step, or it passes over what was done. Variables that it carries from one pass to the next, such as a sum of
losses, a counter or an iterator, must be in the checkpoint, unless they are only shown.

The analysis follows names. If it cannot tell, it is silent, because a warning in an exact script does harm, too.
"""

import ast
import itertools
import linecache
from types import CodeType, FrameType
from typing import Any

from mizzen.checkpoint import loops
from mizzen.checkpoint.carried import bindings, following, name_of, names_in, root_of, unassigned
from mizzen.checkpoint.forgotten import ENDLESS, PLAIN, Forgotten
from mizzen.checkpoint.random_draws import Beginnings, Draws
from mizzen.checkpoint.restored_names import RANGES, Values, is_own
from mizzen.checkpoint.script_frames import PASSING, ScriptFrame, contains, passed, repeats_line, script_frames, source
from mizzen.checkpoint.uses import Uses

_EXCUSING = (ast.Try, ast.Continue)
"""Statements of loops that try again, or pass over what was done."""
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


def told(restored: loops.Stack, values: Values) -> str | None:
    """Return what a restart would not continue, with the line that repairs it; None if nothing was found.

    Args:
        restored: the functions that were running when the script called `restore`.
        values: the kinds of values.
    """
    before = dict(restored)
    if not before:
        return None
    if found := _shared_root(restored):
        return found
    is_inner, returned = True, None
    for frame in script_frames(before):
        place = _Place(frame, before.get(frame.f_code, 0), values)
        if found := place.told(is_inner, returned):
            return found
        is_inner = is_inner and not place.loops
        returned = place.forgotten.returned
    return None


class _Place(ScriptFrame):
    """A running function of the script, and what a restart would repeat there."""

    def __init__(self, frame: FrameType, restored_at: int, values: Values) -> None:
        super().__init__(frame, restored_at, values)
        self.forgotten = Forgotten(self)

    def told(self, is_inner: bool, returned: str | None) -> str | None:
        """See the function `told`. `returned`: the message if the inner function's result is used."""
        for number, loop in enumerate(self.loops):
            if isinstance(loop, ast.For) and (found := self._begins_again(loop, is_inner and not number)):
                return found
            if found := self.forgotten.told(loop):
                return found
        if is_inner and self.loops and (found := self._unset(self.loops[0])):
            return found
        if returned is not None:
            assigned = [one for part in self.body for one in ast.walk(part) if isinstance(one, ast.Assign)]
            for called in (one for one in assigned if contains(one, self.line)):
                uses = Uses(names_in(called, ast.Store) - self.known, self.is_known)
                if uses.first(self.body, (called.end_lineno or 0) + 1) is not None:
                    return returned
        beginnings = Beginnings(self.names, self.values, self.is_known, self.value, self._passes_over)
        if found := self._cycles() or beginnings.sequence([*(loop.body for loop in self.loops), self.body]):
            return found
        if any(map(self._passes_over, self.loops)):
            return None  # What is passed over may draw, too.
        outer = [loop.body for loop in self.loops[1:]]
        if self.is_called and self.loops:
            outer.append(self.body)
        draws = Draws(self.names, self.tree)
        for inner, body in zip(self.loops, outer, strict=False):
            if found := draws.again(body, inner) or beginnings.again(body, inner):
                return found
        if self.loops and (found := draws.before_batch(self.loops[0], self.is_saved)):
            return found
        return draws.untracked(self.loops, self.is_known, self.values.generator)

    def _begins_again(self, loop: ast.For, is_inner: bool) -> str | None:
        iterated = list(passed(loop.iter))
        values = [self.value(one) for one in iterated]
        tracked = [one for one, value in zip(iterated, values, strict=True) if self.values.is_loader(value)]
        is_plain = any(self.values.is_plain(value) for value in values)
        if any(self.values.is_loader(getattr(value, "_dataloader", None)) for value in values):
            return f"line {loop.lineno}: Fabric sets the loader to epoch 0 then. Iterate the ResumableLoader itself"
        if tracked and self._is_limited(loop, iterated):
            name = ast.unparse(tracked[0])
            return (
                f"line {loop.lineno}: a resumed epoch would get its full number of batches once more. Write "
                f"for i, batch in enumerate({name}, {name}.used), and leave the loop with if i == n: break"
            )
        if not tracked and self.is_known(loop.iter):
            return self._positioned_once(loop, iterated)
        if (not tracked or is_plain) and self._passes_over(loop):
            return None
        if is_plain or (is_inner and any(name_of(one) == "DataLoader" for one in iterated)):
            return f"line {loop.lineno}: the epoch would begin again. Track the loader: {PLAIN}"
        is_range = any(name_of(one) in RANGES for one in iterated)
        pairs = zip(iterated, values, strict=True)
        unknown = any(isinstance(one, ast.Name | ast.Attribute) and value is None for one, value in pairs)
        is_new = is_range or (is_inner and not any(_is_opaque(value) for value in values))
        if tracked or unknown or not is_new or self._is_key(loop) or any(map(self._is_given, iterated)):
            return None
        if self._calls_items(loop) or self._is_chunk(loop):
            return None
        return (
            f"line {loop.lineno}: this loop would begin again after a restart. Begin it at the restored position, as "
            "in for epoch in range(loader.epoch, epochs), or for step in range(checkpointer.restore(), steps)"
        )

    def _is_given(self, node: ast.expr) -> bool:
        """Return whether a function gets a restored value: it may begin there, in ways that cannot be followed."""
        if not isinstance(node, ast.Call):
            return False
        return any(map(self.is_known, (*node.args, *node.keywords))) or any(map(self.is_kept, ast.walk(node)))

    def _calls_items(self, loop: ast.For) -> bool:
        """Return whether a loop calls its items, such as callbacks, one of which reports the step."""
        targets = names_in(loop.target, ast.Store)
        calls = [one for part in loop.body for one in ast.walk(part) if isinstance(one, ast.Call)]
        return any(root_of(one) in targets and contains(one, self.line) for one in calls)

    def _is_chunk(self, loop: ast.For) -> bool:
        """Return whether a loop runs only some steps of a longer training, so it is no fault if it ends early."""
        if names_in(loop.target, ast.Store) & names_in(loop):
            return False
        return self.is_called or any(isinstance(one, ast.While) and self.is_known(one.test) for one in self.loops)

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
        outer = [one for one in self.loops if one is not loop and contains(one, loop.lineno)]
        made = [one for one in ast.walk(self.tree) if isinstance(one, ast.Assign) and names_in(one, ast.Store) & names]
        if made and any(not any(contains(one, part.lineno) for part in made) for one in outer):
            return (
                f"line {made[0].lineno}: after a restart, each later epoch would begin at the restored position, too. "
                f"Create the loader in the loop over the epochs, or track it: {PLAIN}"
            )
        return None

    def _unset(self, loop: ast.For | ast.While) -> str | None:
        """Tell a variable that only the loop sets but later lines use, if the loop may have no passes left."""
        rest = loop.test if isinstance(loop, ast.While) else loop.iter
        if not self.is_known(rest) or (isinstance(rest, ast.Call) and name_of(rest) not in (*RANGES, *PASSING)):
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
                if is_ordered and any(contains(part, self.line) for part in one.body):
                    return True
        return False

    def _cycles(self) -> str | None:
        for one in ast.walk(self.tree):
            if isinstance(one, ast.Call) and self.value(one.func) is itertools.cycle and one.args:
                inner = one.args[0]
                if self.values.is_loader(self.value(inner)) or root_of(inner) in self.loaders:
                    return f"line {one.lineno}: {ENDLESS}"
        return None


def _shared_root(restored: loops.Stack) -> str | None:
    """Tell a loop, such as one over folds, whose passes are trainings that create their `Checkpointer` at one root."""
    made = list[ast.Call]()
    for code, line in restored:
        if loops.is_of_library(code.co_filename):
            return None
        function = _function(code, line)
        for loop in (one for one in ast.walk(function) if isinstance(one, ast.For) and repeats_line(one, line)):
            inside = [*ast.walk(loop)]
            passes = names_in(loop.target, ast.Store) & set[str]().union(*map(names_in, loop.body))
            excused = any(isinstance(one, ast.Try | ast.Continue) for one in inside) or "progress" in ast.dump(
                loop.iter
            )
            created = made + [one for one in inside if isinstance(one, ast.Call) and name_of(one) == "Checkpointer"]
            if passes and not excused and created and not any(names_in(part) for one in created for part in one.args):
                return (
                    f"line {loop.lineno}: each pass of this loop would continue the training of the pass before. Give "
                    f'each its own root: Checkpointer(f"{{root}}/{{{min(passes)}}}")'
                )
        if code.co_name == "<module>":  # What follows runs the script.
            return None
        made += _created(function)
    return None


def _created(node: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call) and name_of(one) == "Checkpointer"]


def _function(code: CodeType, line: int) -> ast.AST:
    """Return the function with a line, or the whole module."""
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and contains(one, line)]
    return max(found, key=lambda one: one.lineno, default=tree)


def _is_opaque(value: Any) -> bool:
    """Return whether an iterable may have a position of its own, such as a generator."""
    return value is not None and (hasattr(value, "__next__") or hasattr(value, "sampler"))


def is_look(iterator: Any, restored: loops.Stack) -> bool:
    """Return whether a variable of the script holds an iterator that no loop advances: it was taken for a look."""
    for frame in script_frames(dict(restored)):
        held = {name for name, value in {**frame.f_globals, **frame.f_locals}.items() if value is iterator}
        if held:
            inside = [
                one
                for loop in ast.walk(source(frame))
                if isinstance(loop, ast.For | ast.While)
                for one in ast.walk(loop)
            ]
            return not any(isinstance(one, ast.Name) and one.id in held for one in inside)
    return False
