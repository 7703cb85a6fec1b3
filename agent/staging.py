"""Bringing an attempt to a machine: its launch description, secrets, archive and folders; and each task's launch."""

import contextlib
import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from agent.cgroups import make_cgroup
from agent.config import AgentConfig
from agent.launch import LaunchDescription, TaskLaunch, TaskPlace, environment
from agent.logs import Masker
from agent.notices import MachineNotices
from agent.sealed import Secrets, unseal
from agent.state import AttemptFolder, StateFolder
from agent.tasks import RunFolder
from agent.unpack import BadArchive, fill_workdir
from domain.ids import archive_key
from mizzen.objects import MissingObject, ObjectStore

_CHUNK_BYTES = 8 << 20


class BadLaunch(Exception):
    """The launch description is not one, or is that of another attempt."""


@dataclass(frozen=True)
class StagedAttempt:
    """An attempt that this machine has all files of."""

    folder: AttemptFolder
    launch: LaunchDescription
    places: tuple[TaskPlace, ...]
    """This machine's tasks."""
    secrets: Secrets
    masker: Masker

    def run(self, place: TaskPlace) -> RunFolder:
        """The folder of one of its tasks."""
        return self.folder.run(place.job, place.task)

    @property
    def runs(self) -> list[RunFolder]:
        """The folders of this machine's tasks."""
        return [self.run(place) for place in self.places]


class Stager:
    """Stages attempts in a machine's state folder. Blocking; repetition finds what the first try did."""

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
        self._owner = config.owner()

    def load(self, folder: AttemptFolder) -> StagedAttempt | None:
        """An attempt that was staged before; None: it was not.

        Raises:
            CannotUnseal: its secrets are not for this machine's key.
        """
        launch = folder.launch()
        if launch is None:
            return None
        secrets = unseal(self._state.private_key(), launch.sealed_secrets.get(self._config.machine))
        return StagedAttempt(folder, launch, launch.on_machine(self._config.machine), secrets, Masker.of(secrets))

    def stage(self, workload_id: str, attempt: int, launch_key: str, bucket_url: str) -> StagedAttempt:
        """Fetch what is missing and make the folders of this machine's tasks.

        Raises:
            BadLaunch, BadArchive, CannotUnseal: what was fetched cannot be used, now or later.
            MissingObject: the launch description or the archive is not in the bucket.
        """
        folder = self._state.attempt(workload_id, attempt)
        staged = self.load(folder)
        if staged is None:
            url = self._config.bucket_url or bucket_url
            document = self._open_bucket(url).get(launch_key)
            try:
                launch = LaunchDescription.model_validate_json(document)
            except ValidationError as error:
                raise BadLaunch(f"{launch_key}: {error}") from None
            if (launch.workload_id, launch.attempt) != (workload_id, attempt):
                raise BadLaunch(f"{launch_key}: is of {launch.workload_id}.{launch.attempt}, not of {folder.key}")
            unseal(self._state.private_key(), launch.sealed_secrets.get(self._config.machine))
            folder.save_launch(document, url)
            staged = self.load(folder)
            assert staged is not None
        missing = [place for place in staged.places if not staged.run(place).work.exists()]
        if missing:
            with self._archive(staged) as archive:
                for place in missing:
                    self._make_folder(staged, place, archive)
        return staged

    def bucket(self, folder: AttemptFolder) -> ObjectStore:
        """The bucket of an attempt that was staged."""
        url = self._config.bucket_url or folder.bucket_url()
        if url is None:
            raise BadLaunch(f"{folder.key}: was never staged here")
        return self._open_bucket(url)

    def task_launch(self, staged: StagedAttempt, place: TaskPlace, masters: Mapping[str, str]) -> TaskLaunch:
        """What the shim is given for one task."""
        run = staged.run(place)
        job = staged.launch.jobs[place.job]
        env = environment(
            staged.launch,
            place,
            masters=masters,
            home=run.work,
            report=run.report,
            python=sys.executable,
            platform=self._notices.prior,
            secrets=staged.secrets.get(place.job, {}),
        )
        owner = self._owner
        return TaskLaunch(
            argv=job.argv if job.script is None else ("/bin/sh", "-eu", str(run.path / "script.sh")),
            env=env,
            cwd=str(run.work),
            output=str(run.output),
            grace_s=staged.launch.checkpoint.grace_s,
            uid=owner.uid if owner else None,
            gid=owner.gid if owner else None,
            groups=owner.groups if owner else (),
            cgroup=make_cgroup(run.run_id) if self._config.cgroup else None,
        )

    @contextlib.contextmanager
    def _archive(self, staged: StagedAttempt) -> Iterator[Path | None]:
        """The working directory's archive on the local disk, its hash checked; None: there is none."""
        sha256 = staged.launch.workdir
        if sha256 is None:
            yield None
            return
        bucket = self.bucket(staged.folder)
        key = archive_key(sha256)
        size = bucket.size(key)
        if size is None:
            raise MissingObject(f"no object {key!r} in the region's bucket")
        if size > self._config.max_archive_bytes:
            raise BadArchive(f"{key}: {size} bytes, more than the {self._config.max_archive_bytes} that are unpacked")
        path = staged.folder.path / f"archive.{uuid.uuid4().hex}.tmp"
        try:
            digest = hashlib.sha256()
            with path.open("wb") as file:
                for start in range(0, size, _CHUNK_BYTES):
                    chunk = bucket.get_range(key, start, start + _CHUNK_BYTES)
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != sha256:
                raise BadArchive(f"{key}: its SHA-256 is {digest.hexdigest()}")
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make_folder(self, staged: StagedAttempt, place: TaskPlace, archive: Path | None) -> None:
        run = staged.run(place)
        run.path.mkdir(mode=0o711, exist_ok=True)
        run.report.parent.mkdir(exist_ok=True)
        if self._owner is not None:
            os.chown(run.report.parent, self._owner.uid, self._owner.gid)
        script = staged.launch.jobs[place.job].script
        if script is not None:
            (run.path / "script.sh").write_bytes(script.encode())
        # Last: its presence says that the folder is complete.
        fill_workdir(run.work, archive, staged.launch.files, owner=self._owner)
