"""Stages an attempt on a machine: fetches its launch description and archive, decrypts its secrets, makes its folders.

Also makes the input of the shim (`TaskLaunch`) for each task.
"""

import contextlib
import hashlib
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent import connect_rules
from agent.cgroups import TaskLimits, engine_parent, limit, make_cgroup, remove_cgroup
from agent.config import AgentConfig
from agent.containers.launch import container_of
from agent.containers.local_images import BadImage, ImageStore
from agent.isolation import check_store, give_bucket, give_store, local_checkpoints, sandbox_of
from agent.launch import DEFAULT_PATH, Owner, TaskLaunch, environment, script_command
from agent.logs import Masker
from agent.notices import MachineNotices
from agent.ports import NoFreePort, PortTaken
from agent.sealed import Secrets, unseal
from agent.state import AttemptFolder, StateFolder, make_folder
from agent.stores import WrongStore, check_remote, remote_store
from agent.task_readiness import open_port
from agent.tasks import RunFolder, private
from agent.unpack import fill_workdir
from domain.ids import archive_key
from domain.images import PULL_LOGIN
from domain.isolation import Isolation
from domain.launch import LaunchDescription, TaskPlace
from infra.archives import BadArchive
from mizzen.objects import MissingObject, ObjectStore

_CHUNK_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class BadLaunch(Exception):
    """The launch description is invalid, or belongs to another attempt."""


class ChangedLaunch(Exception):
    """The launch description has another SHA-256 than the one that the scheduler wrote."""


class BucketUnavailable(Exception):
    """The bucket or the cluster's store cannot be reached, or does not contain an object that the launch needs."""


class DamagedArchive(Exception):
    """The archive in the bucket has another SHA-256 than the one that was uploaded."""


@dataclass(frozen=True)
class StagedAttempt:
    """An attempt whose files are all on this machine."""

    folder: AttemptFolder
    launch: LaunchDescription
    places: tuple[TaskPlace, ...]
    """The tasks of the attempt that are placed on this machine."""
    secrets: Secrets
    masker: Masker

    def run(self, place: TaskPlace) -> RunFolder:
        """Returns the folder of one task of this attempt."""
        return self.folder.run(place.job, place.task)

    @property
    def runs(self) -> list[RunFolder]:
        """The folders of the attempt's tasks on this machine."""
        return [self.run(place) for place in self.places]

    @property
    def serving_run(self) -> RunFolder | None:
        """The folder of the task that serves requests, task 0 of the first job; None: no task on this machine does."""
        if self.launch.serving is None:
            return None
        job = next(iter(self.launch.jobs))
        return next((self.run(place) for place in self.places if (place.job, place.task) == (job, 0)), None)


@contextlib.contextmanager
def _asking(key: str) -> Iterator[None]:
    """Raises any exception of a bucket's library as `BucketUnavailable`, to separate it from faults of this machine."""
    try:
        yield
    except Exception as error:
        raise BucketUnavailable(f"{key} cannot be read from the bucket: {error}") from error


def _check_launch(document: bytes, wanted: str, key: str) -> None:
    found = hashlib.sha256(document).hexdigest()
    if found != wanted:
        raise ChangedLaunch(f"{key}: its SHA-256 is {found}, but the scheduler wrote {wanted}")


class Stager:
    """Stages attempts in a machine's state folder. Its methods block, and staging is idempotent."""

    def __init__(
        self,
        config: AgentConfig,
        state: StateFolder,
        open_bucket: Callable[[str], ObjectStore],
        notices: MachineNotices,
    ) -> None:
        self._config = config
        self._notices = notices
        self._state = state
        self._open_bucket = open_bucket
        self._warned: set[str] = set()
        self._images = ImageStore(config.engine_socket)

    def load(self, folder: AttemptFolder) -> StagedAttempt | None:
        """Returns an attempt that was staged before, or None if it was not.

        Raises:
            CannotUnseal: the attempt's secrets were not encrypted for this machine's key.
        """
        launch = folder.launch()
        if launch is None:
            return None
        return self._staged(folder, launch)

    def _staged(self, folder: AttemptFolder, launch: LaunchDescription) -> StagedAttempt:
        secrets = unseal(self._state.private_keys(), launch.sealed_secrets.get(self._config.machine))
        return StagedAttempt(folder, launch, launch.on_machine(self._config.machine), secrets, Masker.of(secrets))

    def stage(
        self, workload_id: str, attempt: int, launch_key: str, bucket_url: str, launch_sha256: str
    ) -> StagedAttempt:
        """Fetches the files that are missing and makes the folders of this machine's tasks.

        `launch_sha256` is the SHA-256 of the launch description as the scheduler wrote it, in hexadecimal. If the
        attempt was staged before, the stored launch description is used, not fetched again: a workflow that replaces a
        lost one writes the description again, with the same tasks.

        Raises:
            BadLaunch, BadArchive, BadImage, CannotUnseal: the launch description, archive, image or secrets are
                invalid. A retry fails too.
            ChangedLaunch, DamagedArchive: the launch description or archive has another checksum than expected.
            ImageUnavailable: the engine cannot fetch an image, or the machine has no engine.
            BucketUnavailable: the launch description or the archive could not be fetched, or the cluster's store with
                the checkpoints does not answer or is not the one that the scheduler uses
                (`agent.isolation.check_store`, `agent.stores`).
            OSError: this machine cannot write the fetched files.
        """
        folder = self._state.attempt(workload_id, attempt)
        staged = self.load(folder)
        if staged is None:
            url = self._config.bucket_url or bucket_url
            with _asking(launch_key):
                document = self._open_bucket(url).get(launch_key)
            _check_launch(document, launch_sha256, launch_key)
            try:
                launch = LaunchDescription.model_validate_json(document)
            except ValidationError as error:
                raise BadLaunch(f"{launch_key}: {error}") from None
            if (launch.workload_id, launch.attempt) != (workload_id, attempt):
                raise BadLaunch(f"{launch_key}: belongs to {launch.workload_id}.{launch.attempt}, not to {folder.key}")
            staged = self._staged(folder, launch)
            self._state.reserve_stop(workload_id)
            folder.save_launch(document, url)
        missing = [place for place in staged.places if not staged.run(place).work.exists()]
        if missing:
            self._pull(staged)
            try:
                check_store(bucket_url, staged.launch)
            except FileNotFoundError as error:
                raise BucketUnavailable(str(error)) from None
            owner = self._owner(staged)
            if owner is not None:
                give_bucket(self._config.bucket_url or bucket_url, staged.launch, owner)
                give_store(bucket_url, staged.launch, owner)
            with self._archive(staged) as archive:
                for place in missing:
                    self._make_folder(staged, place, archive)
        self._check_remote_store(bucket_url, staged)
        return staged

    def _pull(self, staged: StagedAttempt) -> None:
        """Fetches the images that are missing on this machine."""
        for name in sorted({place.job for place in staged.places}):
            job = staged.launch.jobs[name]
            if job.image is None:
                continue
            found = self._images.fetch(job.image, staged.secrets.get(name, {}).get(PULL_LOGIN))
            if not (found.has_command or job.argv or job.script is not None):
                raise BadImage(f"image {job.image}: has no command, and job {name} gives none in `run`")

    def _check_remote_store(self, bucket_url: str, staged: StagedAttempt) -> None:
        """Checks the store of the checkpoints with the environment of one task of each job, unless tasks have started.

        Raises:
            BucketUnavailable: the store does not answer, or is not the one that the scheduler uses.
        """
        url = remote_store(bucket_url, staged.launch)
        if url is None or any(run.started_at_s() is not None for run in staged.runs):
            return
        for place in {place.job: place for place in reversed(staged.places)}.values():
            task = self._task_launch(staged, place, {}, None)
            try:
                cgroup = f"{staged.run(place).run_id}.store" if self._config.cgroup else None
                check_remote(url, staged.launch.workload_id, task, cgroup)
            except WrongStore as error:
                raise BucketUnavailable(str(error)) from None

    def bucket(self, folder: AttemptFolder) -> ObjectStore:
        """Opens the bucket of an attempt that was staged.

        Raises:
            BadLaunch: the attempt was never staged on this machine.
        """
        url = self._config.bucket_url or folder.bucket_url()
        if url is None:
            raise BadLaunch(f"{folder.key}: was never staged on this machine")
        return self._open_bucket(url)

    def task_launch(self, staged: StagedAttempt, place: TaskPlace, masters: Mapping[str, str]) -> TaskLaunch:
        """Returns the shim's input for one task, and opens its port if it serves requests.

        Raises:
            NoFreePort, PortTaken: the task has no port (`agent.task_readiness.open_port`).
        """
        run = staged.run(place)
        cgroup = make_cgroup(run.run_id) if self._config.cgroup else None
        port = None
        if staged.launch.serving is not None and run == staged.serving_run:
            others = self._state.unfinished(but=staged.folder)
            try:
                port = open_port(staged.folder, staged.launch.serving.port, self._config.ports, cgroup, others)
            except (NoFreePort, PortTaken):
                if cgroup is not None:
                    remove_cgroup(cgroup)
                raise
        inside = None if port is None else port.inside
        if (image := staged.launch.jobs[place.job].image) is not None:
            return self._container_launch(staged, place, masters, inside, image, cgroup)
        limits = self._limits(run, place)
        # A task whose port is mapped, or whose connections have rules, must join the cgroup.
        if cgroup is not None and (self._separate(cgroup, staged.launch.tenant_number) or port is not None):
            limits += (cgroup,)
        unlimited = self._task_launch(staged, place, masters, inside)
        return replace(unlimited, cgroup=cgroup, limits=limits)

    def _container_launch(
        self,
        staged: StagedAttempt,
        place: TaskPlace,
        masters: Mapping[str, str],
        port: int | None,
        image: str,
        cgroup: str | None,
    ) -> TaskLaunch:
        """Returns the shim's input for a task with an image. The engine makes its container below `cgroup`."""
        parent = None
        if cgroup is not None and self._images.facts().has_cgroup_parents:
            parent = engine_parent(cgroup)
        if cgroup is not None and parent is None:
            remove_cgroup(cgroup)
            cgroup = None
            if "cgroups of engines" not in self._warned:
                self._warned.add("cgroups of engines")
                _log.warning(
                    "%s: tasks with an image have no rules for connections: the engine must use the cgroup driver"
                    " cgroupfs, and the agent must see the root of cgroup v2",
                    self._config.engine,
                )
        elif cgroup is not None:
            self._separate(cgroup, staged.launch.tenant_number)
        own = self._task_launch(staged, place, masters, port)
        run, owner = staged.run(place), self._owner(staged)
        found = container_of(
            self._config, staged.launch, staged.runs, run, place, self._images.get(image), own.env, owner
        )
        if self._config.cgroup and place.memory_bytes:
            limits = self._task_limits(place)
            found["spec"] |= {"memory_bytes": limits.memory_bytes, "processes": limits.processes}
            found["spec"] |= {"cpu_shares": limits.cpu_shares}
        found["spec"]["cgroup_parent"] = parent
        # The environment is in the container's description.
        return replace(own, argv=(), env={}, sandbox=None, setup=None, cgroup=cgroup, container=found)

    def _task_launch(
        self, staged: StagedAttempt, place: TaskPlace, masters: Mapping[str, str], port: int | None
    ) -> TaskLaunch:
        """Returns the shim's input without cgroups. `port`: on which the task listens."""
        run = staged.run(place)
        job = staged.launch.jobs[place.job]
        env = environment(
            staged.launch,
            place,
            masters=masters,
            home=run.work,
            report=run.report,
            interval_file=run.interval_file,
            deadline_file=run.deadline_file,
            python=sys.executable if job.image is None else "python3",
            platform=self._notices.prior,
            secrets=staged.secrets.get(place.job, {}),
            port=port,
        )
        owner = self._owner(staged)
        search = f"{env['PATH']}:{DEFAULT_PATH}"
        return TaskLaunch(
            argv=job.argv if job.script is None else script_command(job.script, run.script, search),
            env=env,
            cwd=str(run.work),
            output=str(run.output),
            grace_s=staged.launch.checkpoint.grace_s,
            uid=owner.uid if owner else None,
            gid=owner.gid if owner else None,
            groups=owner.groups if owner else (),
            sandbox=self._sandbox(staged, owner),
            setup=None if job.setup is None else script_command(job.setup, run.setup_script, search),
        )

    def _sandbox(self, staged: StagedAttempt, owner: Owner | None) -> dict[str, Any] | None:
        """Returns the arguments for the sandbox of an attempt, which are the same for all its tasks."""
        if self._config.isolation is not Isolation.SANDBOX:
            return None
        own = local_checkpoints(staged.launch)
        if owner is None and own is not None:
            own.mkdir(parents=True, exist_ok=True)  # A task could create it only in its sandbox.
        shm_bytes = sum(place.memory_bytes for place in staged.places)
        return sandbox_of(staged.folder.private, staged.launch, staged.runs, self._config.paths, shm_bytes)

    def _owner(self, staged: StagedAttempt) -> Owner | None:
        try:
            return self._config.owner_of(staged.launch.tenant_number)
        except ValueError as error:
            raise BadLaunch(f"{staged.folder.key}: {error}") from None

    def _separate(self, cgroup: str, tenant_number: int) -> bool:
        """Applies the rules for connections to a task's cgroup. Returns False, with a warning, if it cannot."""
        if self._config.isolation is Isolation.NONE or os.geteuid() != 0:
            return False
        try:
            connect_rules.attach(cgroup, tenant_number, metadata=self._config.metadata_service)
        except OSError as error:
            if "connections" not in self._warned:
                self._warned.add("connections")
                _log.warning("tasks can connect to tasks of other tenants on this machine: %s", error)
            return False
        return True

    def _limits(self, run: RunFolder, place: TaskPlace) -> tuple[str, ...]:
        """Creates cgroups with the limits of the task's resource request and returns their paths.

        Logs a warning once for each controller that cannot be used.
        """
        if not self._config.cgroup or not place.memory_bytes:
            return ()
        folders, missing = limit(run.run_id, self._task_limits(place))
        new = [name for name in missing if name not in self._warned]
        if new:
            self._warned.update(new)
            _log.warning(
                "tasks have no limits on %s: the agent may not create cgroups with these controllers; "
                "run it as root, or delegate the controllers to it",
                ", ".join(new),
            )
        return tuple(folders)

    def _task_limits(self, place: TaskPlace) -> TaskLimits:
        processes = self._config.processes_per_task + self._config.processes_per_cpu * place.cpus_milli // 1000
        return TaskLimits(place.memory_bytes, processes, place.cpus_milli)

    @contextlib.contextmanager
    def _archive(self, staged: StagedAttempt) -> Iterator[Path | None]:
        """Downloads the working directory's archive, checks its hash and gives its local path; gives None if the
        workload has no archive. The file is removed on exit.
        """
        sha256 = staged.launch.workdir
        if sha256 is None:
            yield None
            return
        bucket = self.bucket(staged.folder)
        key = archive_key(sha256)
        with _asking(key):
            size = bucket.size(key)
            if size is None:
                raise MissingObject(f"no object {key!r} in the region's bucket")
        if size > self._config.max_archive_bytes:
            raise BadArchive(f"{key}: {size} bytes, more than the limit of {self._config.max_archive_bytes} bytes")
        path = staged.folder.path / f"archive.{uuid.uuid4().hex}.tmp"
        try:
            digest = hashlib.sha256()
            with open(path, "wb", opener=private) as file:
                for start in range(0, size, _CHUNK_BYTES):
                    with _asking(key):
                        chunk = bucket.get_range(key, start, start + _CHUNK_BYTES)
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != sha256:
                raise DamagedArchive(f"{key}: its content has another SHA-256, {digest.hexdigest()}")
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make_folder(self, staged: StagedAttempt, place: TaskPlace, archive: Path | None) -> None:
        run = staged.run(place)
        make_folder(run.path)
        run.report.parent.mkdir(mode=0o700, exist_ok=True)
        owner = self._owner(staged)
        if owner is not None:
            os.chown(run.report.parent, owner.uid, owner.gid)
        job = staged.launch.jobs[place.job]
        for script, path in ((job.script, run.script), (job.setup, run.setup_script)):
            if script is not None:
                with open(path, "wb", opener=private) as file:
                    file.write(script.encode(errors="replace"))
                    if owner is not None:
                        os.chown(file.fileno(), owner.uid, owner.gid)
        # Last, because the presence of `work` marks the folder as complete.
        fill_workdir(run.work, archive, staged.launch.files, owner=owner)
