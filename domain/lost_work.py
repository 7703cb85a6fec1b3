"""Computes how many seconds of work an interruption loses."""


def lost_work_s(
    *,
    began_s: float | None,
    saved_s: float | None,
    until_s: float,
    step: int | None = None,
    saved_step: int | None = None,
    step_s: float | None = None,
) -> float:
    """Returns the seconds of work since the newest checkpoint of an attempt, or since its start if it has saved none.

    If the steps and the time per step are given, the result is the number of steps since the checkpoint times the time
    per step, which excludes pauses. Otherwise it is the time since the checkpoint, an upper bound, or 0 if no step was
    completed since.

    Args:
        began_s: when the attempt's tasks started, on the same clock as the other times; None: they never started.
        saved_s: when the newest checkpoint was committed; None: the attempt has saved none.
        until_s: the time of the interruption.
        step: the last step that was reported.
        saved_step: the step of the newest checkpoint, or the step from which the attempt resumed.
        step_s: the duration of a step.
    """
    if began_s is None:
        return 0.0
    since_s = max(0.0, until_s - max(began_s, saved_s if saved_s is not None else began_s))
    if step is None or saved_step is None:
        return since_s
    # The time since the checkpoint is an upper bound; a report with more steps than fit into it is inconsistent.
    return min(since_s, max(0, step - saved_step) * step_s) if step_s else since_s if step > saved_step else 0.0
