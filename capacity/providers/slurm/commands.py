"""Slurm's commands, with a timeout, and their errors: refused, or unknown."""

import os
import pwd
import subprocess
from collections.abc import Mapping

from capacity.provider import ProviderUnavailable
from capacity.providers.slurm.jobs import FORMAT, PilotJob
from capacity.providers.slurm.settings import SlurmSettings
from capacity.providers.slurm.submission_errors import is_unknown, refused


class SlurmCommands:
    """The commands of one cluster, run as this process's user. Several threads may use it."""

    def __init__(self, name: str, settings: SlurmSettings) -> None:
        self._name, self._timeout_s = name, settings.timeout_s
        config = {} if settings.config is None else {"SLURM_CONF": str(settings.config)}
        self._environ = {**os.environ, **config, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        self._user = pwd.getpwuid(os.geteuid()).pw_name

    def jobs(self, comment: str, name: str | None = None) -> list[PilotJob]:
        """Returns this user's jobs with this comment, and with this name if one is given; also recently ended jobs.

        Raises:
            ProviderUnavailable: the controller does not answer.
        """
        named = [] if name is None else [f"--name={name}"]
        said = self._run("squeue", "--noheader", "--states=all", f"--user={self._user}", *named, f"--Format={FORMAT}")
        try:
            found = [PilotJob.of_line(line) for line in said.splitlines() if line.strip()]
        except ValueError as error:
            raise ProviderUnavailable(f"{self._name}: {error}") from None
        return [job for job in found if job.comment == comment]

    def draining(self) -> dict[str, str]:
        """Returns why nodes are being taken out of service, by their names.

        Raises:
            ProviderUnavailable: the controller does not answer.
        """
        said = self._run("sinfo", "--noheader", "--Node", "--states=drain,fail", "--format=%N|%E")
        return {node: why for node, _, why in (line.partition("|") for line in said.splitlines())}

    def submit(self, options: Mapping[str, str], script: str) -> str:
        """Submits a batch script; returns the number of the job.

        Raises:
            LaunchRefused: Slurm refused it.
            ProviderUnavailable: the job may have been submitted.
        """
        flags = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
        said = self._run("sbatch", "--parsable", *flags, script=script, launches=True)
        job = said.strip().partition(";")[0]
        if not job.isdigit():
            raise ProviderUnavailable(f"{self._name}: sbatch: the answer {said!r} contains no job number")
        return job

    def cancel(self, job: str, name: str) -> None:
        """Cancels a job if it has this name. A job that does not exist is no error.

        Raises:
            ProviderUnavailable: the controller does not answer.
        """
        self._run("scancel", "--quiet", f"--user={self._user}", f"--name={name}", job, may_fail=True)

    def _run(self, *words: str, script: str = "", launches: bool = False, may_fail: bool = False) -> str:
        try:
            done = subprocess.run(
                words,
                input=script,
                env=self._environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProviderUnavailable(f"{self._name}: {words[0]}: no answer within {self._timeout_s:g} s") from None
        except FileNotFoundError:
            raise ProviderUnavailable(f"{self._name}: {words[0]}: there is no such program in PATH") from None
        except OSError as error:
            raise ProviderUnavailable(f"{self._name}: {words[0]}: {error}") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        if is_unknown(said):
            raise ProviderUnavailable(f"{self._name}: {words[0]}: {said}")
        if may_fail and ("Invalid job id" in said or not done.stderr.strip()):
            return ""  # With --quiet, it prints nothing about a job that does not exist.
        if launches and "submission failed" in said:
            raise refused(said)
        raise ProviderUnavailable(f"{self._name}: {words[0]}: {said}")
