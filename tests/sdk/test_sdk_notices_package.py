"""The public interface of `mizzen.notices`: its imports, its names and its documentation."""

import pytest

from mizzen import notices
from mizzen.notices.detection import PLATFORMS
from tests.sdk.scripts import SDK, passes, run


def test_importing_is_light() -> None:
    """Only the standard library is imported, and no HTTP modules for `preempted` or a platform that sends signals."""
    heavy = ["socket", "ssl", "http.client", "urllib.parse", "json", "email", "datetime"]
    script = f"""
assert not notices.preempted() and notices.watch() and notices.watcher().platform == "slurm"
loaded = [name for name in {heavy} if name in sys.modules]
assert loaded == [], loaded
for name in notices.__all__:
    assert getattr(notices, name) is not None
outside = [name for name in sys.modules if name.split(".")[0] not in {{*sys.stdlib_module_names, "mizzen", "__main__"}}]
assert outside == [], outside
"""
    passes(script, "-S", SLURM_JOB_ID="7")


def test_the_public_names() -> None:
    """The public names are exactly these, and an unknown name is an AttributeError."""
    assert set(notices.__all__) == {
        "DEFAULT_MARGIN", "PREEMPTED_EXIT_CODE", "AgentWatcher", "AwsWatcher", "AzureWatcher", "Decision",
        "FileWatcher", "GcpWatcher", "Kind", "KubernetesWatcher", "MetadataError", "Notice", "RunPodWatcher",
        "SigtermWatcher", "SlurmWatcher", "VastWatcher", "Watcher", "Window", "acknowledge", "current", "decide",
        "detect", "exit_preempted", "preempted", "unwatch", "watch", "watch_sigterm", "watcher", "watching",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = notices.nothing


@pytest.mark.parametrize(("save_takes_s", "saves"), [(0, [0, 500, 512]), (40, [0, 500])], ids=["fits", "too slow"])
def test_the_documented_loop_does_what_it_says(save_takes_s: int, saves: list[int]) -> None:
    """The documented example saves at a notice if there is time, prints the reason, and exits with 143."""
    page = (SDK.parent / "docs" / "notices.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    script = f"""
steps, done, saved = 10_000, [], []
slept_s = 0
time.monotonic = lambda: slept_s
def train_one_step():
    done.append(1)
    if len(done) == 513:
        os.kill(os.getpid(), signal.SIGTERM)
def save(step):
    global slept_s
    slept_s += {save_takes_s}
    saved.append(step)
try:
    exec({example!r})
finally:
    print(saved)
"""
    ended = run(script, MIZZEN_GRACE_S="30")
    assert ended.returncode == notices.PREEMPTED_EXIT_CODE == 143, ended.stderr
    assert ended.stdout.splitlines()[1] == str(saves)
    assert ended.stdout.startswith("Save now: mizzen" if save_takes_s == 0 else "Rely on the last checkpoint: mizzen")


def test_the_documented_platforms_are_all_of_them() -> None:
    """The table in docs/notices.md has a row for each platform, with the window of its watcher."""
    page = (SDK.parent / "docs" / "notices.md").read_text()
    rows = {
        cells[1].strip(" `"): cells[4].strip()
        for line in page.splitlines()
        if line.startswith("| `") and len(cells := line.split("|")) == 7
    }
    assert set(rows) == set(PLATFORMS)
    for platform, told in rows.items():
        watcher = notices.detect({"MIZZEN_PLATFORM": platform, "MIZZEN_NOTICE_FILE": "x"})
        assert platform == watcher.platform
        assert platform == "mizzen" or told.startswith(f"{watcher.window.seconds:g} s")
