"""Finds random numbers of the loops of a script that a restart would draw differently."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.carried import name_of, names_in, root_of

_STATES = {"seed", "manual_seed", "bit_generator", "get_state", "set_state", "getstate", "setstate", "state", "spawn"}
"""Attributes of random generators through which a script reads or sets their states."""
_GLOBAL = re.compile(
    r"random\.[a-z]\w*|(np|numpy)\.random\.[a-z]\w*|torch\.(rand|randn|randint|randperm|multinomial|bernoulli|normal)"
)
"""Functions that draw from a global generator."""


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
        """Return which generator is not saved that the loops, or functions that they call, name.

        Args:
            loops: the loops around the step.
            is_known: whether an expression depends on the restored state.
            generator: returns the generator of a value, such as that of a loader's order; None if it is saved.
        """
        functions = {one.name: one for one in ast.walk(self._tree) if isinstance(one, ast.FunctionDef)}
        for loop in loops:
            calls = [name_of(one) for one in ast.walk(loop) if isinstance(one, ast.Call)]
            called = [functions[name] for name in calls if name in functions]
            used = names_in(loop).union(*(names_in(one) - names_in(one, ast.Store) for one in called))
            for name in sorted(used - names_in(loop, ast.Store)):
                found = generator(self._names.get(name)) if not is_known(ast.Name(name)) else None
                held = [one for one, value in self._names.items() if value is found]
                if found is not None and not any(self._is_set(one, loops, is_known) for one in (name, *held)):
                    shown = held[0] if held else f"{name}.generator"
                    return (
                        f"{shown}, from which the loop of line {loop.lineno} draws random numbers, is not in the "
                        f"checkpoint. Track it: checkpointer.track(generator={shown})"
                    )
        return None

    def _is_set(self, name: str, loops: Sequence[ast.stmt], is_known: Callable[[ast.AST], bool]) -> bool:
        """Return whether the script sets a generator's state, or draws again what was drawn before a restart."""
        for one in ast.walk(self._tree):
            if isinstance(one, ast.Attribute) and one.attr in _STATES and root_of(one) == name:
                return True
            if isinstance(one, ast.For) and one not in loops and is_known(one.iter) and name in names_in(one):
                return True
        return False
