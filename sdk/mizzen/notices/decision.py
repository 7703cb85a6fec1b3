"""Decides, after a notice, whether to start a last save."""

import math
import time
from dataclasses import dataclass

from mizzen.notices.notice import Notice

DEFAULT_MARGIN = 1.5
"""A save is started only if at least one and a half times its measured duration is left."""


@dataclass(frozen=True)
class Decision:
    """Whether to save now (`flush`), and the reason as one sentence."""

    flush: bool
    why: str


def decide(
    notice: Notice, save_s: float | None, margin: float = DEFAULT_MARGIN, *, now_s: float | None = None
) -> Decision:
    """Decide whether a save fits in the remaining time; if not, rely on the last checkpoint.

    Args:
        notice: the notice.
        save_s: measured duration of a save, in seconds (C of the cadence); None if none was measured yet.
        margin: safety factor for the duration, 1 or more.
        now_s: current time, in seconds since the epoch; by default read from the clock.

    Raises:
        ValueError: `save_s` is negative, `margin` is less than 1, or one of them is not finite.
    """
    if not (math.isfinite(margin) and margin >= 1):
        raise ValueError(f"margin={margin}: must be a factor of 1 or more")
    if save_s is not None and not (math.isfinite(save_s) and save_s >= 0):
        raise ValueError(f"save_s={save_s}: must be 0 or more seconds, or None")
    said = f"{notice.platform} reports {notice.kind}"
    if not notice.certain:
        return Decision(True, f"Save now: {said}, which is a recommendation; the training continues after the save.")
    left_s = notice.left_s(time.time() if now_s is None else now_s)
    if left_s is None:
        return Decision(True, f"Save now: {said}, and the end is unknown.")
    if left_s == 0:
        return Decision(False, f"Rely on the last checkpoint: {said}, and no time is left.")
    if save_s is None:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and no save has been measured yet.")
    needs = f"a save takes {save_s:.1f} s, times {margin:g} for the margin"
    if save_s * margin <= left_s:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and {needs}.")
    return Decision(False, f"Rely on the last checkpoint: {said} in {left_s:.1f} s, and {needs}.")
