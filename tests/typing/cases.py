"""Types that users of the SDK see, checked by mypy in `make lint`; nothing here runs.

`assert_type` fails if a type changes. An unused `type: ignore` fails if a wrong use becomes valid.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, assert_type

import mizzen
from mizzen import checkpoint, notices, objects
from mizzen_client import Client, submitit, views
from mizzen_client.functions.future import CallFuture


class Model:
    """A minimal object that can be tracked."""

    def state_dict(self) -> dict[str, float]:
        """Returns the state."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Loads the state."""


def sizes() -> None:
    """The size of an elastic job."""
    world = mizzen.world()
    assert_type(world, mizzen.World)
    assert_type((world.tasks, world.saved_tasks, world.changed), tuple[int, int | None, bool])


def checkpoints(model: Model) -> None:
    """A training loop, and reading what it saved."""
    checkpointer = mizzen.Checkpointer(
        "s3://bucket/run", keep=3, interval_s=60.0, settings=mizzen.CheckpointSettings(keep_every=1000)
    )
    assert_type(checkpointer, checkpoint.Checkpointer)
    checkpointer.track(model=model, own={"sampler"})
    assert_type(checkpointer.restore(), int)
    assert_type(checkpointer.preempted, bool)
    assert_type(checkpointer.save(7, {"model": model.state_dict()}), checkpoint.Manifest)
    assert_type(checkpointer.load_latest(), checkpoint.Checkpoint | None)
    assert_type(mizzen.open_checkpoints("gs://bucket/run"), checkpoint.Checkpoints)

    mizzen.Checkpointer(3)  # type: ignore[arg-type]
    mizzen.Checkpointer("run", "local")  # type: ignore[call-arg]
    mizzen.Checkpointer("run", keep="two")  # type: ignore[arg-type]
    mizzen.Checkpointer("run", interval="1m")  # type: ignore[call-arg]
    mizzen.Checkpointer("run", keep_every=1000)  # type: ignore[call-arg]
    mizzen.CheckpointSettings(keep_every="1000")  # type: ignore[arg-type]
    checkpointer.save({"model": 1.0})  # type: ignore[call-arg, arg-type]
    checkpointer.step("7")  # type: ignore[arg-type]


def functions(client: Client) -> None:
    """Functions that run as workloads keep the types of their results."""

    def work(rate: float) -> str:
        return str(rate)

    with mizzen.Executor(gpus="a100:1", tenant="vision", client=client) as executor:
        assert_type(executor.submit(work, 0.1), CallFuture[str])
        assert_type(executor.map(work, [0.1, 0.2]), Iterator[str])
        assert_type(executor.submit_array(work, [0.1]), list[CallFuture[str]])
        assert_type(executor.submit(work, 0.1).result(), str)
    assert_type(submitit.AutoExecutor("logs").submit(work, 0.1).result(), str)
    assert_type(mizzen.Executor.attach("wl-1"), list[CallFuture[Any]])

    mizzen.Executor("a100:1")  # type: ignore[call-arg]
    mizzen.Executor(tasks="two")  # type: ignore[arg-type]


def ends() -> NoReturn:
    """A type checker knows that the code after it does not run."""
    assert_type(notices.current(), notices.Notice | None)
    assert_type(notices.watcher(), notices.Watcher | None)
    mizzen.exit_preempted()


def stores() -> None:
    """Objects in a bucket."""
    store = objects.open_store("file:///data")
    assert_type(store, objects.ObjectStore)
    assert_type(store.create("a", b"1"), bool)
    assert_type(store.get("a"), bytes)
    assert_type(store.list("prefix/"), Iterator[objects.ObjectInfo])
    assert_type(store.size("a"), int | None)

    store.create("a", "text")  # type: ignore[arg-type]
    store.get(b"a")  # type: ignore[arg-type]


def api(document: Mapping[str, Any]) -> None:
    """The client's answers are typed dictionaries."""
    with Client.from_environment() as client:
        assert_type(client, Client)
        workload = client.submit(document, workdir="train/")
        assert_type(workload["id"], str)
        assert_type(client.why("wl-1"), views.Why)
        assert_type(client.attempts("wl-1"), list[views.Attempt])
        assert_type(client.events(follow=True), Iterator[views.Event])
        assert_type(client.tenant("vision"), views.Tenant)

        client.submit("train.yaml")  # type: ignore[arg-type]
        client.lower("wl-1", "7")  # type: ignore[arg-type]
        workload["no_such_field"]  # type: ignore[typeddict-item]
