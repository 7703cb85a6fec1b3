"""Slurm's REST API with JWT, in place of its commands: formats v0.0.38 (Slurm 22.05) and v0.0.40 to v0.0.42 (24.11)."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2

from capacity.provider import ProviderUnavailable
from capacity.providers.slurm.jobs import PilotJob
from capacity.providers.slurm.settings import SlurmRest
from capacity.providers.slurm.submission_errors import is_unknown, refused

_FIELDS = {
    "job-name": "name", "comment": "comment", "partition": "partition", "constraint": "constraints",
    "account": "account", "qos": "qos", "licenses": "licenses", "reservation": "reservation",
    "exclude": "excluded_nodes", "output": "standard_output", "open-mode": "open_mode",
    "chdir": "current_working_directory",
}  # fmt: skip
"""Fields of a job with text, by the option of `sbatch`."""
_NUMBERS = {"time": "time_limit", "ntasks": "tasks", "cpus-per-task": "cpus_per_task", "mem": "memory_per_node"}
_PATH = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""slurmrestd refuses a job without an environment; the job gets no other variable of this process."""
_OBJECTS = 40
"""The first version with objects for numbers."""
_REFUSED, _NO_SUCH_JOB = range(2000, 3000), 2017
"""Slurm's errors about a job. Others, as 1800 and 5005, are those of connections."""


class _Failed(Exception):
    def __init__(self, status: int, said: str, codes: set[int]) -> None:
        super().__init__(said)
        self.status, self.said, self.codes = status, said, codes


class SlurmRestApi:
    """The requests to one slurmrestd; see `SlurmCommands`. Several threads may use it."""

    def __init__(self, name: str, settings: SlurmRest, timeout_s: float) -> None:
        self._name, self._settings, self._timeout_s = name, settings, timeout_s

    def jobs(self, comment: str, name: str | None = None) -> list[PilotJob]:
        """See `SlurmCommands.jobs`. The API lists the jobs of all users."""
        found = self._list("jobs")
        try:
            own = [one for one in found if one["user_name"] == self._settings.user and one["comment"] == comment]
            jobs = [PilotJob.of_json(one) for one in own]
        except (KeyError, TypeError, ValueError) as error:
            raise ProviderUnavailable(f"{self._name}: slurmrestd: a job of another format: {error!r}") from None
        return [job for job in jobs if name is None or job.name == name]

    def draining(self) -> dict[str, str]:
        """See `SlurmCommands.draining`."""
        key = "state" if self._settings.version >= _OBJECTS else "state_flags"
        try:
            nodes = self._list("nodes")
            return {one["name"]: one["reason"] for one in nodes if {"DRAIN", "FAIL"} & {*one[key]}}
        except (KeyError, TypeError) as error:
            raise ProviderUnavailable(f"{self._name}: slurmrestd: a node of another format: {error!r}") from None

    def submit(self, options: Mapping[str, str], script: str) -> str:
        """See `SlurmCommands.submit`."""
        try:
            done = self._call("POST", "job/submit", {"script": script, "job": job_of(options, self._settings.version)})
        except _Failed as failed:
            if not is_unknown(failed.said) and (failed.status == 400 or failed.codes & {*_REFUSED}):
                raise refused(failed.said) from None
            raise ProviderUnavailable(f"{self._name}: slurmrestd: job/submit: {failed.said}") from None
        if not isinstance(job := done.get("job_id"), int):
            raise ProviderUnavailable(f"{self._name}: slurmrestd: job/submit: the answer contains no job number")
        return str(job)

    def cancel(self, job: str, name: str) -> None:
        """See `SlurmCommands.cancel`. The API cancels by number only, so the name is looked up before."""
        try:
            if any(one["name"] == name for one in self._call("GET", f"job/{job}").get("jobs", [])):
                self._call("DELETE", f"job/{job}")
        except _Failed as failed:
            if _NO_SUCH_JOB not in failed.codes:
                raise ProviderUnavailable(f"{self._name}: slurmrestd: job/{job}: {failed.said}") from None

    def _list(self, what: str) -> list[dict[str, Any]]:
        try:
            found = self._call("GET", what).get(what)
        except _Failed as failed:
            raise ProviderUnavailable(f"{self._name}: slurmrestd: {what}: {failed.said}") from None
        if not isinstance(found, list):
            raise ProviderUnavailable(f"{self._name}: slurmrestd: the answer contains no {what}")
        return found

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        settings = self._settings
        try:
            token = settings.token_file.read_text().strip().removeprefix("SLURM_JWT=")
            answer = httpx2.request(
                method,
                f"{settings.url}/{path}",
                json=body,
                headers={"X-SLURM-USER-NAME": settings.user, "X-SLURM-USER-TOKEN": token},
                timeout=self._timeout_s,
                trust_env=False,
            )
            found = answer.json()
            errors = found["errors"] if isinstance(found, dict) else None
        except (httpx2.HTTPError, OSError, UnicodeError, KeyError, json.JSONDecodeError) as error:
            raise ProviderUnavailable(f"{self._name}: slurmrestd: {path}: {error!r}") from None
        if not isinstance(errors, list):
            raise ProviderUnavailable(f"{self._name}: slurmrestd: {path}: the answer {answer.status_code} is no object")
        if answer.status_code == 200 and not errors:
            return dict(found)
        said = "; ".join(f"{one.get('error', '')} {one.get('description', '')}".strip() for one in errors)
        if answer.status_code in (401, 500) and said.startswith("Unspecified error"):
            said += " (slurmctld is away, or the token is not valid any more)"
        codes = {int(one.get(key) or 0) for one in errors for key in ("error_code", "error_number")}
        raise _Failed(answer.status_code, said or f"status {answer.status_code}", codes)


def job_of(options: Mapping[str, str], version: int) -> dict[str, Any]:
    """Returns a job from the options of `sbatch`.

    Until v0.0.38, the API has no form of the option `--signal` for the batch script, so it is left out, and ignores
    that the job must not be requeued.
    """
    job: dict[str, Any] = {field: options[name] for name, field in _FIELDS.items() if name in options}
    numbers = {field: int(options[name].removesuffix("M")) for name, field in _NUMBERS.items()}
    job |= {**numbers, "requeue": False}
    if "exclusive" in options:
        job["exclusive"] = "exclusive"
    if version < _OBJECTS:
        name, _, value = _PATH.partition("=")
        job |= {"nodes": [1, 1], "environment": {name: value}}
        return job | ({"gres": options["gres"]} if "gres" in options else {})
    for field in ("time_limit", "memory_per_node"):
        job[field] = {"set": True, "number": job[field]}
    if "exclusive" in job:
        job["shared"] = ["none"]
        del job["exclusive"]
    signal, _, before_s = options["signal"].removeprefix("B:").partition("@")
    job |= {"kill_warning_signal": signal, "kill_warning_flags": ["BATCH_JOB"]}
    job |= {"kill_warning_delay": {"set": True, "number": int(before_s)}, "nodes": "1", "environment": [_PATH]}
    return job | ({"tres_per_node": f"gres/{options['gres']}"} if "gres" in options else {})
