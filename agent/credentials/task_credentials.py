"""Gives the tasks of an attempt their credentials, and replaces them before they expire.

The credentials are files in `credentials/` of a task's folder, which the task can read but not write:

    aws-config, aws.json    for `AWS_CONFIG_FILE` (`agent.credentials.aws`)
    google.json             for `MIZZEN_GCS_TOKEN_FILE` (`agent.credentials.google`)

A user's variable for the same purpose takes precedence. While the agent is stopped, tasks keep their credentials until
these expire.
"""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.config import AgentConfig
from agent.credentials.scope import BucketScope, bucket_scope
from agent.launch import Owner
from agent.state import make_folder
from agent.tasks import RunFolder
from domain.launch import LaunchDescription

_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
_TOKEN_S = 3600.0
"""Google's tokens are valid for at most this long."""
_log = logging.getLogger(__name__)


class NoCredentials(Exception):
    """The store's service has given no credentials for the tasks. The message says why."""


class TaskCredentials:
    """The credentials of the tasks of one attempt on this machine."""

    def __init__(
        self, config: AgentConfig, launch: LaunchDescription, runs: Sequence[RunFolder], owner: Owner | None
    ) -> None:
        """`owner`: the user that the tasks run as; None: the agent's user."""
        self._runs = runs
        self._owner = owner
        self._name = f"mizzen-{launch.workload_id}.{launch.attempt}"
        self._role = config.s3_role
        self._lifetime_s = config.credentials_s
        s3, gcs = bucket_scope(launch, "s3"), bucket_scope(launch, "gs")
        self._given: list[tuple[str, float, Callable[[], Callable[[Path], dict[str, str]]]]] = []
        """For each kind of store: the file that is renewed, its lifetime in seconds, and a request for credentials. The
        request returns a function that makes the content of the files in a task's folder, by name."""
        if config.s3_role is not None and s3:
            self._given.append(("aws.json", config.credentials_s, lambda: self._aws(s3)))
        if config.gcs_tokens and gcs:
            self._given.append(("google.json", _TOKEN_S, lambda: self._google(gcs)))

    def environment(self, run: RunFolder) -> dict[str, str]:
        """Returns the variables by which a task's libraries find its credentials."""
        names = {"aws.json": ("AWS_CONFIG_FILE", "aws-config"), "google.json": ("MIZZEN_GCS_TOKEN_FILE", "google.json")}
        return {names[key][0]: str(_folder(run) / names[key][1]) for key, _, _ in self._given}

    def issue(self) -> None:
        """Writes credentials that are missing or older than half of their lifetime. Takes a request to each service.

        Raises:
            NoCredentials: a service has given none.
            OSError: they cannot be written.
        """
        for key, lifetime_s, make in self._given:
            if self._age_s(key) < lifetime_s / 2:
                continue
            try:
                content = make()
            except Exception as error:
                raise NoCredentials(f"credentials of the tasks: {error}") from error
            for run in self._runs:
                make_folder(_folder(run))
                # The file that is written last: if it exists, the others do.
                for name, text in sorted(content(_folder(run)).items(), key=lambda file: file[0] == key):
                    self._write(_folder(run) / name, text)

    async def keep(self) -> None:
        """Renews the credentials until cancelled. If that fails, logs it and tries again, with growing pauses."""
        retry_s = _RETRY_S
        while self._given:
            ages = [lifetime_s / 2 - self._age_s(key) for key, lifetime_s, _ in self._given]
            await asyncio.sleep(max(1.0, min(ages)))
            try:
                await asyncio.to_thread(self.issue)
                retry_s = _RETRY_S
            except (NoCredentials, OSError) as error:
                _log.warning("%s: cannot be renewed, next try in %.0f s: %s", self._name, retry_s, error)
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)

    def are_there(self) -> bool:
        """Returns whether any credentials are in the tasks' folders."""
        return any(_folder(run).exists() for run in self._runs)

    def remove(self) -> None:
        """Removes the credentials after the end of the tasks."""
        for run in self._runs:
            shutil.rmtree(_folder(run), ignore_errors=True)

    def _aws(self, scope: BucketScope) -> Callable[[Path], dict[str, str]]:
        # Imported only where it is used: boto3 costs an agent half a second and 20 MB.
        from agent.credentials.aws import assume

        assert self._role is not None
        given = assume(self._role, scope, self._name, self._lifetime_s)
        process = json.dumps(given.process)
        return lambda folder: {"aws.json": process, "aws-config": given.config(folder / "aws.json")}

    def _google(self, scope: BucketScope) -> Callable[[Path], dict[str, str]]:
        from agent.credentials.google import narrowed_token

        token = json.dumps(narrowed_token(scope))
        return lambda _: {"google.json": token}

    def _age_s(self, key: str) -> float:
        try:
            return max(time.time() - (_folder(run) / key).stat().st_mtime for run in self._runs)
        except OSError:
            return float("inf")

    def _write(self, path: Path, text: str) -> None:
        """Replaces a file that only the task may read."""
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
        with os.fdopen(descriptor, "w") as file:
            if self._owner is not None:
                os.fchown(descriptor, self._owner.uid, self._owner.gid)
            file.write(text)
        temporary.replace(path)


def _folder(run: RunFolder) -> Path:
    return run.path / "credentials"
