"""One tenant's `resource_used` against its quota (MAST 4.2), per GPU type and for CPUs.

A workload that may run on several GPU types counts against all of them until it is placed: its *envelope*. So whatever
type RMS picks, the tenant never exceeds its quota with within-quota workloads.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, TenantState

GpuTypes = tuple[tuple[str, ...], ...]
"""For each job of a workload, the GPU types on which it may be placed."""


def all_types(jobs: Iterable[JobRequest]) -> GpuTypes:
    """Every type that the jobs accept."""
    return tuple(job.gpu_types for job in jobs)


def envelope(jobs: Iterable[JobRequest]) -> Counter[str]:
    """Slots of each GPU type that the jobs could take at most, whichever of their types each of them gets."""
    need: Counter[str] = Counter()
    for job in jobs:
        if job.gpus:
            for gpu_type in set(job.gpu_types):
                need[gpu_type] += job.gpus
    return need


@dataclass(frozen=True)
class Within:
    """The workload is within-quota, and was counted, on these types."""

    gpu_types: GpuTypes


@dataclass
class Ledger:
    """What a tenant's within-quota workloads use, and whether one more fits.

    A workload that does not fit leaves the ledger as it was: over-quota workloads consume no quota.
    """

    tenant: TenantState
    _used_gpus: Counter[str] = field(default_factory=Counter, init=False)
    _used_cpus_milli: int = field(default=0, init=False)

    def count_placed(self, gpus: Mapping[str, int], cpus_milli: int) -> bool:
        """Counts a workload that holds `gpus` and CPUs already, if all of it is within quota; False if not."""
        return self._count(gpus, cpus_milli)

    def count_pending(self, jobs: tuple[JobRequest, ...]) -> Within | Reason:
        """Counts a pending workload on all types that its jobs accept or, if that is too much, on one for each job.

        In the second case each job in turn gets the first of its types for which quota is left after the jobs before
        it. A refusal names the resource that is lacking: the most preferred type of the first job without a type
        left, else CPUs. Its numbers are slots, or cores for CPUs.
        """
        cpus_milli = sum(job.cpus_milli for job in jobs)
        if self._count(envelope(jobs), cpus_milli):
            return Within(all_types(jobs))
        need: Counter[str] = Counter()
        picked: list[tuple[str, ...]] = []
        for job in jobs:
            if not (job.gpus and job.gpu_types):
                picked.append(job.gpu_types)
                continue
            gpu_type = next((t for t in job.gpu_types if self._has_gpus(t, need[t] + job.gpus)), None)
            if gpu_type is None:
                wanted = job.gpu_types[0]
                return self._exceeded(wanted, self._used_gpus[wanted], self._quota(wanted), need[wanted] + job.gpus)
            need[gpu_type] += job.gpus
            picked.append((gpu_type,))
        if not self._count(need, cpus_milli):
            quota_milli = self.tenant.quota_cpus_milli or 0
            return self._exceeded("cpus", _cores(self._used_cpus_milli), _cores(quota_milli), _cores(cpus_milli))
        return Within(tuple(picked))

    def _count(self, gpus: Mapping[str, int], cpus_milli: int) -> bool:
        fits = self._has_cpus(cpus_milli) and all(self._has_gpus(t, slots) for t, slots in gpus.items())
        if fits:
            self._used_gpus.update(gpus)
            self._used_cpus_milli += cpus_milli
        return fits

    def _quota(self, gpu_type: str) -> int:
        return self.tenant.quota_gpus.get(gpu_type, 0)

    def _has_gpus(self, gpu_type: str, slots: int) -> bool:
        return self._used_gpus[gpu_type] + slots <= self._quota(gpu_type)

    def _has_cpus(self, cpus_milli: int) -> bool:
        quota_milli = self.tenant.quota_cpus_milli
        return quota_milli is None or self._used_cpus_milli + cpus_milli <= quota_milli

    def _exceeded(self, resource: str, used: float, quota: float, needs: float) -> Reason:
        detail = {"tenant": self.tenant.name, "resource": resource, "used": used, "quota": quota, "needs": needs}
        return Reason(ReasonCode.QUOTA_EXCEEDED, detail)


def _cores(cpus_milli: int) -> float:
    """Cores; an int where they are whole, so that sentences read `16` and not `16.0`."""
    return cpus_milli / 1000 if cpus_milli % 1000 else cpus_milli // 1000
