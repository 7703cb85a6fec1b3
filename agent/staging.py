"""Stages an attempt on a machine: fetches launch description, archive and images, decrypts secrets, makes folders."""

import contextlib
import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from agent.config import AgentConfig
from agent.containers.engine import Image
from agent.containers.image_cleanup import FetchedImages
from agent.containers.local_images import BadImage, ImageStore
from agent.credentials.task_credentials import NoCredentials
from agent.isolation import check_store, give_bucket, give_store
from agent.notices import MachineNotices
from agent.sandbox_view import why_no_mount
from agent.sealed import unseal
from agent.secret_masks import Masker
from agent.staged import BadLaunch, StagedAttempt
from agent.state import AttemptFolder, StateFolder, make_folder
from agent.stores import WrongStore, check_remote, remote_store
from agent.task_launches import TaskLaunches
from agent.tasks import private
from agent.unpack import fill_workdir
from domain.ids import archive_key
from domain.images import PULL_LOGIN
from domain.isolation import sandbox_path
from domain.launch import LaunchDescription, TaskPlace
from domain.protocol.machines import PrepareNode
from infra.archives import BadArchive
from mizzen.objects import MissingObject, ObjectStore

_CHUNK_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class ChangedLaunch(Exception):
    """The launch description has another SHA-256 than the one that the scheduler wrote."""


class BucketUnavailable(Exception):
    """The bucket or the cluster's store cannot be reached, or does not contain an object that the launch needs."""


class DamagedArchive(Exception):
    """The archive in the bucket has another SHA-256 than the one that was uploaded."""


@contextlib.contextmanager
def _asking(key: str) -> Iterator[None]:
    """Context manager that converts exceptions of a bucket's library to `BucketUnavailable`."""
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
        self._state = state
        self._open_bucket = open_bucket
        self._images = ImageStore(config.engine_socket, FetchedImages(state.images), config.image_bytes_s)
        self._fetching = dict[str, tuple[str, str]]()
        """Maps attempts to the image that is being fetched for them, and the progress of the fetch."""
        self.launches = TaskLaunches(config, state, notices, self._images)
        """Builds the shim's input for the tasks of staged attempts."""

    def waits_for(self, workload_id: str, attempt: int) -> str:
        """Returns a text about what an attempt that is being staged waits for; empty: nothing that takes long."""
        image, far = self._fetching.get(self._state.attempt(workload_id, attempt).key, ("", ""))
        return f"fetching image {image}{far and ': '}{far}" if image else ""

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
            BucketUnavailable: the launch description or the archive could not be fetched, the tasks get no credentials
                for their buckets, or the cluster's store with
                the checkpoints does not answer or is not the one that the scheduler uses
                (`agent.isolation.check_store`, `agent.stores`).
            OSError: this machine cannot write the fetched files.
        """
        folder = self._state.attempt(workload_id, attempt)
        staged = self.load(folder)
        if staged is None:
            url = self._config.bucket_url or bucket_url
            document, staged = self._read(folder, launch_key, url, launch_sha256)
            self._state.reserve_stop(workload_id)
            folder.save_launch(document, url)
        missing = [place for place in staged.places if not staged.run(place).work.exists()]
        if missing:
            self._pull(staged)
            try:
                check_store(bucket_url, staged.launch)
            except FileNotFoundError as error:
                raise BucketUnavailable(str(error)) from None
            owner = self.launches.owner(staged)
            if owner is not None:
                give_bucket(self._config.bucket_url or bucket_url, staged.launch, owner)
                give_store(bucket_url, staged.launch, owner)
            with self._archive(staged) as archive:
                for place in missing:
                    self._make_folder(staged, place, archive)
        if any(run.exit() is None for run in staged.runs):
            try:
                self.launches.credentials(staged).issue()
            except NoCredentials as error:
                raise BucketUnavailable(str(error)) from None
        self._check_remote_store(bucket_url, staged)
        return staged

    def fetch_images(self, request: PrepareNode) -> None:
        """Fetches only the images of an attempt that will start on this machine.

        Raises: as `stage`.
        """
        folder = self._state.attempt(request.workload_id, request.attempt)
        url = self._config.bucket_url or request.bucket_url
        self._pull(self._read(folder, request.launch_key, url, request.launch_sha256)[1])

    def _read(self, folder: AttemptFolder, key: str, bucket_url: str, sha256: str) -> tuple[bytes, StagedAttempt]:
        """Reads the launch description of an attempt from the bucket, checks it and returns it."""
        with _asking(key):
            document = self._open_bucket(bucket_url).get(key)
        _check_launch(document, sha256, key)
        try:
            launch = LaunchDescription.model_validate_json(document)
        except ValidationError as error:
            raise BadLaunch(f"{key}: {error}") from None
        if (launch.workload_id, launch.attempt) != (folder.workload_id, folder.attempt):
            raise BadLaunch(f"{key}: belongs to {launch.workload_id}.{launch.attempt}, not to {folder.key}")
        return document, self._staged(folder, launch)

    def _pull(self, staged: StagedAttempt) -> None:
        """Fetches the images that are missing on this machine."""
        for name in sorted({place.job for place in staged.places}):
            job = staged.launch.jobs[name]
            if job.image is None:
                continue
            found = self._fetch(staged.folder.key, job.image, staged.secrets.get(name, {}).get(PULL_LOGIN))
            if not (found.has_command or job.argv or job.script is not None):
                raise BadImage(f"image {job.image}: has no command, and job {name} gives none in `run`")

    def _fetch(self, key: str, image: str, login: str | None) -> Image:
        def progress(far: str) -> None:
            self._fetching[key] = image, far

        progress("")
        try:
            return self._images.fetch(image, login, progress)
        finally:
            self._fetching.pop(key, None)  # A fetch in advance for the same attempt may have ended before.

    def _check_remote_store(self, bucket_url: str, staged: StagedAttempt) -> None:
        """Checks the store of the checkpoints with the environment of one task of each job, unless tasks have started.

        Raises:
            BucketUnavailable: the store does not answer, or is not the one that the scheduler uses.
        """
        url = remote_store(bucket_url, staged.launch)
        if url is None or any(run.started_at_s() is not None for run in staged.runs):
            return
        for place in {place.job: place for place in reversed(staged.places)}.values():
            task = self.launches.plain_launch(staged, place, {}, None)
            try:
                check_remote(url, staged.launch.workload_id, task, self.launches.check_cgroups(staged, place))
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
        run, job = staged.run(place), staged.launch.jobs[place.job]
        mounted = run.mounted(job.mounts)
        if job.image is None:  # A job with an image uses the image's Python.
            seen = (str(run.path), *(sandbox_path(path)[0] for path in self._config.paths))
            for where in mounted:
                if (why := why_no_mount(where, seen)) is not None:
                    raise BadLaunch(f"file_mounts: {where}: {why}")
        make_folder(run.path)
        run.report.parent.mkdir(mode=0o700, exist_ok=True)
        owner = self.launches.owner(staged)
        if owner is not None:
            os.chown(run.report.parent, owner.uid, owner.gid)
        for script, path in ((job.script, run.script), (job.setup, run.setup_script)):
            if script is not None:
                with open(path, "wb", opener=private) as file:
                    file.write(script.encode(errors="replace"))
                    if owner is not None:
                        os.chown(file.fileno(), owner.uid, owner.gid)
        # Last, because the presence of `work` marks the folder as complete.
        if mounted:
            make_folder(run.path / "mounts")
        fill_workdir(run.work, archive, staged.launch.files, owner=owner, mounted=mounted)
