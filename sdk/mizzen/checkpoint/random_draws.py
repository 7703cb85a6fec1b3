"""Finds what a restart within a loop of a script would do again: random numbers, and changes before an inner loop."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.carried import name_of, names_in, root_of, variable
from mizzen.checkpoint.restored_names import Values
from mizzen.checkpoint.tensors import loaded
from mizzen.checkpoint.uses import Uses

_STATES = {"seed", "manual_seed", "bit_generator", "get_state", "set_state", "getstate", "setstate", "state", "spawn"}
"""Attributes of random generators through which a script reads or sets their states."""
_COUNTS = ("step", "update", "update_parameters")
"""Methods of schedules, scalers and averages."""
_GLOBAL = re.compile(
    r"random\.[a-z]\w*|(np|numpy)\.random\.[a-z]\w*|torch\.(rand|randn|randint|randperm|multinomial|bernoulli|normal)"
)
"""Functions that draw from a global generator."""
_CHANGING = ("step", "load_state_dict", "clear", "reset", "reset_parameters")
"""Methods that change restored objects."""


class Draws:
    """The random numbers of one function of a script."""

    def __init__(self, names: Mapping[str, Any], tree: ast.Module) -> None:
        """Use the variables of the function, and the script."""
        self._names, self._tree = names, tree

    def _calls(self, node: ast.AST) -> Iterator[ast.Call]:
        """Yield the calls that draw."""
        for one in ast.walk(node):
            if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Attribute) or one.func.attr in _STATES:
                continue
            is_module = isinstance(self._names.get(root_of(one.func)), ModuleType)
            is_global = is_module and _GLOBAL.fullmatch(ast.unparse(one.func)) and one.func.attr != "default_rng"
            owner = one.func.value
            is_own = isinstance(owner, ast.Name) and rng.generator(self._names.get(owner.id)) is not None
            if is_global or is_own:
                yield one

    def again(self, body: Sequence[ast.stmt], inner: ast.For | ast.While) -> str | None:
        """Return what is drawn before an inner loop in which steps are saved: a restart within it draws again.

        `body` contains the inner loop. A script that seeds a generator there draws the same numbers again.
        """
        before = [one for one in body if one.lineno < inner.lineno]
        calls = [one for part in before for one in ast.walk(part) if isinstance(one, ast.Call)]
        if any(name_of(one) in {*_STATES, "set_seed", "seed_everything"} for one in calls):
            return None
        made = set[str]().union(*(names_in(one, ast.Store) for one in before))
        for one in before:
            if not isinstance(one, ast.Assign):
                continue
            used = names_in(one, ast.Store) & names_in(inner)
            if used and any(root_of(call) not in made for call in self._calls(one.value)):
                name = min(used)
                return (
                    f"line {one.lineno}: {name} is drawn again when this loop resumes within its inner loop of line "
                    f"{inner.lineno}. Draw it from a generator of this pass, as in np.random.default_rng(epoch) or "
                    "torch.Generator().manual_seed(epoch)"
                )
        return None

    def before_batch(self, loop: ast.For | ast.While, is_saved: Callable[[Any], bool]) -> str | None:
        """Return what a step draws from a global generator before it takes a batch of a tracked loader.

        The global generators are restored when a loader yields its first batch.
        """
        taken = [
            one
            for one in ast.walk(loop)
            if isinstance(one, ast.Call)
            and name_of(one) == "next"
            and one.args
            and is_saved(self._names.get(root_of(one.args[0])))
        ]
        if not taken:
            return None
        first = min((one.end_lineno or 0, one.end_col_offset or 0) for one in taken)
        for call in self._calls(loop):
            is_own = rng.generator(self._names.get(root_of(call))) is not None
            if not is_own and (call.lineno, call.col_offset) < first:
                return (
                    f"line {call.lineno}: this draws before the batch, and the global generators are restored with the "
                    "first batch of a resumed epoch. Draw it after the batch, or from a generator of its own, tracked "
                    "as in checkpointer.track(generator=random.Random(0))"
                )
        return None

    def untracked(
        self,
        loops: Sequence[ast.For | ast.While],
        is_known: Callable[[ast.AST], bool],
        generator: Callable[[Any], Any],
    ) -> str | None:
        """Return which generator or schedule is not saved that the loops, or functions that they call, name.

        Args:
            loops: the loops around the step.
            is_known: whether an expression depends on the restored state.
            generator: returns the generator or schedule of a value, such as a loader's order; None if it is saved.
        """
        functions = {one.name: one for one in ast.walk(self._tree) if isinstance(one, ast.FunctionDef)}
        for loop in loops:
            calls = [name_of(one) for one in ast.walk(loop) if isinstance(one, ast.Call)]
            called = [functions[name] for name in calls if name in functions]
            used = names_in(loop).union(*(names_in(one) - names_in(one, ast.Store) for one in called))
            for name in sorted(used - names_in(loop, ast.Store)):
                found = generator(self._names.get(name)) if not is_known(variable(name)) else None
                held = [one for one, value in self._names.items() if value is found]
                if found is None or any(self._is_set(one, loops, is_known) for one in (name, *held)):
                    continue
                shown = held[0] if held else f"{name}.generator"
                if rng.generator(found) is not None:
                    return (
                        f"{shown}, from which the loop of line {loop.lineno} draws random numbers, is not in the "
                        f"checkpoint. Track it: checkpointer.track(generator={shown})"
                    )
                steps = [one for part in (loop, *called) for one in ast.walk(part) if isinstance(one, ast.Call)]
                for one in steps:
                    is_own = name_of(one) in _COUNTS and root_of(one) == name
                    if is_own and not any(map(is_known, [*one.args, *(each.value for each in one.keywords)])):
                        return (
                            f"{shown}, which line {one.lineno} changes, is not in the checkpoint. Track it: "
                            f"checkpointer.track({shown.rpartition('.')[2]}={shown})"
                        )
        return None

    def _is_set(self, name: str, loops: Sequence[ast.stmt], is_known: Callable[[ast.AST], bool]) -> bool:
        """Return whether the script sets a generator's state, or draws again what was drawn before a restart."""
        for one in ast.walk(self._tree):
            if isinstance(one, ast.Attribute) and one.attr in (*_STATES, "load_state_dict") and root_of(one) == name:
                return True
            if isinstance(one, ast.For) and one not in loops and is_known(one.iter) and name in names_in(one):
                return True
        return False


class Beginnings:
    """The beginnings of the bodies of the loops of one function of a script."""

    def __init__(
        self,
        names: Mapping[str, Any],
        values: Values,
        is_known: Callable[[ast.AST], bool],
        value: Callable[[ast.expr], Any],
        passes_over: Callable[[ast.For], bool],
    ) -> None:
        """Use the variables of the function, and what is known of their values and of expressions."""
        self._names, self._values, self._is_known, self._value = names, values, is_known, value
        self._passes_over = passes_over

    def sequence(self, bodies: Sequence[Sequence[ast.stmt]]) -> str | None:
        """Return which loader is iterated once more after a restart within a later loop over another one."""
        for body in bodies:
            found = [loop for loop in body if isinstance(loop, ast.For) and not self._passes_over(loop)]
            pairs = [(loop.lineno, one) for loop in found if self._steps(loop) for one in self._loaders(loop)]
            if len({one for _, one in pairs}) > 1:
                (line, first), (_, last) = pairs[0], pairs[-1]
                return (
                    f"line {line}: after a restart within the loop over {last}, this one would iterate {first} once "
                    f"more. Write if {first}.epoch == {last}.epoch: before it"
                )
        return None

    def _loaders(self, loop: ast.For | ast.While) -> list[str]:
        """Return the tracked loader that a loop iterates; of a loop over several loaders, all of them."""
        if not isinstance(loop, ast.For):
            return []
        if not isinstance(loop.iter, ast.Tuple | ast.List):
            inside = [loop.iter, *(part for part in ast.walk(loop.iter) if isinstance(part, ast.expr))]
            return [ast.unparse(one) for one in inside if self._values.is_loader(self._value(one))][:1]
        within = [ast.unparse(one.iter) for one in loop.body if isinstance(one, ast.For)]
        items = loop.iter.elts if ast.unparse(loop.target) in within else []
        return [ast.unparse(one) for one in items if self._values.is_loader(self._value(one))]

    def _steps(self, loop: ast.For) -> bool:
        """Return whether the source of a loop calls `step` of a `Checkpointer`."""
        calls = [one for one in ast.walk(loop) if isinstance(one, ast.Call) and name_of(one) == "step"]
        return any(map(self._is_saving, calls))

    def _is_saving(self, call: ast.expr) -> bool:
        return hasattr(self._names.get(root_of(call)), "should_save")

    def again(self, body: Sequence[ast.stmt], inner: ast.For | ast.While) -> str | None:
        """Return which statement before an inner loop with steps changes or computes something again."""
        left = [one for one in body if one.lineno < inner.lineno]
        groups, made = set[str](), set[str]()
        within = f"if this loop resumes within its inner loop of line {inner.lineno}"
        unused = f"if not {next(iter(self._loaders(inner)), 'loader')}.used"
        while left:
            one = left.pop(0)
            if isinstance(one, ast.If | ast.For | ast.With):
                if isinstance(one, ast.If) and self._is_position(one.test, inner):
                    continue
                if isinstance(one, ast.For) and "param_groups" in ast.unparse(one.iter) and self._is_kept(one.iter):
                    groups |= names_in(one.target, ast.Store)
                left = [*one.body, *getattr(one, "orelse", ()), *left]
            elif self._changes(one, inner, groups):
                return f"line {one.lineno}: this is done again {within}. Write {unused}: before it"
            elif name := self._makes(one, inner, made):
                return (
                    f"line {one.lineno}: {name} is made again, from other weights, {within}. Track it, and make it "
                    f"only {unused}"
                )
        return None

    def _is_kept(self, node: ast.expr) -> bool:
        return self._values.is_kept(self._names.get(root_of(node)))

    def _is_position(self, test: ast.expr, inner: ast.For | ast.While) -> bool:
        """Return whether a condition depends on the position within the inner loop."""
        values = [self._names.get(name) for name in names_in(test)]
        is_state = any(self._values.is_position(one) or self._values.is_loader(one) for one in values)
        return is_state or bool(names_in(test) & names_in(inner, ast.Store))

    def _changes(self, one: ast.stmt, inner: ast.For | ast.While, groups: set[str]) -> bool:
        """Return whether a statement changes restored values, so that the inner loop would resume with others."""
        if isinstance(one, ast.Expr) and isinstance(call := one.value, ast.Call):
            is_set = self._is_saving(call) or any(map(self._is_known, call.args))
            return name_of(call) in _CHANGING and self._is_kept(call) and not is_set
        for target in _targets(one):
            is_group = root_of(target) in groups or ("param_groups" in ast.unparse(target) and self._is_kept(target))
            is_state = is_group or self._values.is_position(self._names.get(root_of(target)))
            later = [ast.unparse(place) for part in ast.walk(inner) for place in _targets(part)]
            if is_state and isinstance(target, ast.Subscript):
                return isinstance(one, ast.AugAssign) or ast.unparse(target) in later
        return False

    def _makes(self, one: ast.stmt, inner: ast.For | ast.While, made: set[str]) -> str | None:
        """Return a variable of the inner loop that a statement computes by a tracked module, or a new optimizer.

        `made` has such variables.
        """
        torch, targets = loaded("torch"), _targets(one)
        if torch is None or not isinstance(one, ast.Assign) or not isinstance(targets[0], ast.Name):
            return None
        name = targets[0].id
        value = self._names.get(name)
        if isinstance(value, torch.optim.Optimizer) and not self._values.is_kept(value):
            return name
        calls = [part for part in ast.walk(one.value) if isinstance(part, ast.Call)]
        sources = [call.args[0] if name_of(call) == "deepcopy" and call.args else call.func for call in calls]
        found = [self._names.get(part.id) for part in sources if isinstance(part, ast.Name)]
        is_new = any(isinstance(part, torch.nn.Module) and self._values.is_kept(part) for part in found)
        if is_new or names_in(one.value) & made:
            made.add(name)
        return Uses({name} & made, self._is_known).first([inner], inner.lineno)


def _targets(one: ast.AST) -> list[ast.expr]:
    """Return what an assignment sets."""
    if isinstance(one, ast.Assign):
        return one.targets
    return [one.target] if isinstance(one, ast.AugAssign) else []
