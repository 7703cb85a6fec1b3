"""Whether a last save is worth starting once a notice is there."""

import math
import time
from dataclasses import dataclass

from mizzen.notices.notice import Notice

DEFAULT_MARGIN = 1.5
"""A save is started when one and a half times its measured duration is left."""


@dataclass(frozen=True)
class Decision:
    """Whether to save now, and why, in one sentence."""

    flush: bool
    why: str


def decide(
    notice: Notice, save_s: float | None, margin: float = DEFAULT_MARGIN, *, now_s: float | None = None
) -> Decision:
    """Save now if a save fits in what is left, else rely on the last one.

    Args:
        notice: what was told.
        save_s: measured duration of a save, in seconds (C of the cadence); None where none was measured yet.
        margin: by how much a save may take longer than measured, as a factor, 1 or more.
        now_s: the time, in seconds since the epoch; the clock's by default.

    Raises:
        ValueError: `save_s` is negative or `margin` less than 1, or one of them is not finite.
    """
    if not (math.isfinite(margin) and margin >= 1):
        raise ValueError(f"margin={margin}: must be a factor of 1 or more")
    if save_s is not None and not (math.isfinite(save_s) and save_s >= 0):
        raise ValueError(f"save_s={save_s}: must be 0 or more seconds, or None")
    said = f"{notice.platform} says {notice.kind}"
    if not notice.certain:
        return Decision(True, f"Save now: {said}, a recommendation, and the training goes on after it.")
    left_s = notice.left_s(time.time() if now_s is None else now_s)
    if left_s is None:
        return Decision(True, f"Save now: {said}, and the end is not known.")
    if left_s == 0:
        return Decision(False, f"Rely on the last checkpoint: {said}, and no time is left.")
    if save_s is None:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and no save was measured yet.")
    needs = f"a save takes {save_s:.1f} s, times {margin:g} for the margin"
    if save_s * margin <= left_s:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and {needs}.")
    return Decision(False, f"Rely on the last checkpoint: {said} in {left_s:.1f} s, and {needs}.")
