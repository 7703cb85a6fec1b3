"""How many seconds of work an interruption loses."""


def lost_work_s(
    *,
    began_s: float | None,
    saved_s: float | None,
    until_s: float,
    step: int | None = None,
    saved_step: int | None = None,
    step_s: float | None = None,
) -> float:
    """Seconds of work after the newest checkpoint of an attempt, or after its start where it has saved none.

    With the steps and the time of one it is their difference times that time, which counts no pause. Without, it is
    the time since the checkpoint, an upper bound; and nothing where no step was done since.

    Args:
        began_s: when the attempt's tasks started, on the clock of the others; None: they did not, and nothing is lost.
        saved_s: when its newest checkpoint was committed; None: it has saved none.
        until_s: the interruption.
        step: the last step that was reported.
        saved_step: the checkpoint's step, or that from which the attempt resumed.
        step_s: what a step takes.
    """
    if began_s is None:
        return 0.0
    since_s = max(0.0, until_s - max(began_s, saved_s if saved_s is not None else began_s))
    if step is None or saved_step is None:
        return since_s
    # More steps than fit into the time are a report that does not agree with itself.
    return min(since_s, max(0, step - saved_step) * step_s) if step_s else since_s if step > saved_step else 0.0
