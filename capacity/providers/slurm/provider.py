"""The provider for a Slurm cluster: one pilot job for each machine."""

import contextlib
import time
from collections.abc import Sequence

from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.offered_zones import check_offered, offers_of
from capacity.providers.slurm.commands import SlurmCommands
from capacity.providers.slurm.jobs import PilotJob, native_id
from capacity.providers.slurm.pilot_script import options, script, secrets, secrets_file, secrets_files
from capacity.providers.slurm.rest import SlurmRestApi
from capacity.providers.slurm.settings import SlurmSettings
from domain.ids import is_name
from infra.config.settings import Settings
from infra.files import write_private
from infra.keys import installation_id

_SUBMITTED_S = 180.0
"""The time after which the job of a submission is in the controller's list, if it is ever there."""


class SlurmProvider:
    """Submits pilot jobs. The name of a job is the id of its instance, and its comment names the installation."""

    lists_late_s = 30.0
    """After a crash, the controller shows a job that still runs again within this time."""
    queues = True
    impaired = ""

    def __init__(self, name: str, settings: SlurmSettings, installation: str) -> None:
        self.name = name
        self._settings = settings
        self._comment, self._owner = f"mizzen:{installation}", f"{name}.{installation}"
        self._commands: SlurmCommands | SlurmRestApi = (
            SlurmCommands(name, settings)
            if settings.rest is None
            else SlurmRestApi(name, settings.rest, settings.timeout_s)
        )

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        s = self._settings
        return offers_of(self.name, s.region, s.start_s, s.partitions, s.machine_types)

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`. Slurm has no client tokens, so the instance's job is looked up before and after.

        A submission whose answer was lost may reach the controller even later. Then two jobs have the name; the ledger
        keeps the one whose agent came first, and the other one is cancelled (`capacity.ledger_audit`).
        """
        check_offered(self.name, request, self._settings.partitions, self._settings.machine_types)
        if (found := self._first(request.instance)) is not None:
            return found.native_id
        file = secrets_file(self._settings, self._owner, request.instance)
        try:
            write_private(file, secrets(request))
        except OSError as error:
            raise ProviderUnavailable(f"{self.name}: {file}: {error}") from None
        try:
            job = self._commands.submit(
                options(self._settings, request, self._comment), script(self._settings, request, file)
            )
        except LaunchRefused as refused:
            # slurmrestd of 22.05 answers with an error also if it accepts a job that cannot start now.
            if (found := self._first(request.instance, refused)) is not None:
                return found.native_id
            file.unlink(missing_ok=True)
            raise
        except ProviderUnavailable:
            if (found := self._first(request.instance)) is not None:
                return found.native_id
            raise
        found = self._first(request.instance)
        return native_id(job, request.instance) if found is None else found.native_id

    def _first(self, instance: str, refused: LaunchRefused | None = None) -> PilotJob | None:
        """Returns the instance's job with the lowest number; None: there is none, or its refusal is known.

        Raises:
            LaunchRefused: the controller refused it, and the answer was lost.
        """
        jobs = self._commands.jobs(self._comment, instance)
        accepted = [job for job in jobs if not job.never_accepted]
        if jobs and not accepted and refused is None:
            words = f"job {jobs[0].id}: {jobs[0].reason}: no node of the partition has what the job asks for"
            raise LaunchRefused(Refusal.REQUEST, words)
        return min(accepted, key=lambda job: int(job.id), default=None)

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`. One query for all pilots, and one for nodes that are being drained."""
        jobs = self._commands.jobs(self._comment)
        self._forget_secrets(jobs)
        draining = self._commands.draining() if any(job.runs for job in jobs) else {}
        left = {node: f"node {node} is being drained ({why})" for node, why in draining.items()}
        kill_wait_s = self._settings.kill_wait_s
        return [job.found(kill_wait_s, left.get(job.nodes)) for job in jobs if not job.never_accepted]

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""
        job, _, instance = native_id.partition(".")
        if job.isdigit() and is_name(instance):
            self._commands.cancel(job, instance)

    def _forget_secrets(self, jobs: Sequence[PilotJob]) -> None:
        """Deletes the secrets of pilots that will not start: their jobs were cancelled, or the controller forgot them.

        A launch that is under way writes its file again before each submission.
        """
        ended = {job.name for job in jobs if job.ended is not None}
        listed = {job.name for job in jobs if job.ended is None}
        for instance, file in secrets_files(self._settings, self._owner):
            with contextlib.suppress(OSError):
                old = time.time() - file.stat().st_mtime > _SUBMITTED_S
                if instance not in listed and (instance in ended or old):
                    file.unlink()


def open_provider(name: str, settings: SlurmSettings, installation: Settings) -> SlurmProvider:
    """Returns the provider, without calling Slurm.

    Raises:
        ConfigurationError: this machine has no master key. The comment of the jobs is derived from it.
    """
    return SlurmProvider(name, settings, installation_id(installation.master_key_path))
