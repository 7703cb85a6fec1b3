"""The fields of Kubernetes' Jobs, JobSets and Pods that need no calculation."""

from collections.abc import Mapping

_CONTROL = "it concerns Kubernetes' own records"
_TENANT = "the API key, or `tenant` in the document, says whose workload it is"
_PLACE = "mizzen chooses the machines: restrict `regions`, or name GPU types in `accelerators`"
METADATA_DROPPED: Mapping[str, str] = {
    "namespace": _TENANT, "annotations": "annotations are for Kubernetes' programs",
    **dict.fromkeys(("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences",
                     "finalizers", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds"), _CONTROL),
}  # fmt: skip
JOB_DROPPED: Mapping[str, str] = {
    "ttlSecondsAfterFinished": "operators set how long ended workloads are kept",
    "selector": _CONTROL, "manualSelector": _CONTROL,
    "podReplacementPolicy": "a task is replaced when it has ended, and never before",
}  # fmt: skip
JOB_LOST: Mapping[str, str] = {
    "maxFailedIndexes": "an array continues after failures: cancel it with `mizzen cancel`",
    "successPolicy": "a workload has succeeded when all its tasks have: end the others in the program",
    "managedBy": "another controller's rules are unknown here",
}  # fmt: skip
JOBSET_DROPPED: Mapping[str, str] = {
    "ttlSecondsAfterFinished": "operators set how long ended workloads are kept",
    "network": "tasks find each other by MASTER_ADDR and MIZZEN_JOB_<NAME>_ADDR, without a DNS name for each",
    "coordinator": "MIZZEN_JOB_<NAME>_ADDR has the address of each job's first task",
}  # fmt: skip
JOBSET_LOST: Mapping[str, str] = {
    "successPolicy": "a workload has succeeded when all tasks of all its jobs have: end the others in the program",
    "managedBy": "another controller's rules are unknown here",
}  # fmt: skip
POD_DROPPED: Mapping[str, str] = {
    "tolerations": "machines have no taints; `capacity` says which kinds of machines may be used",
    "topologySpreadConstraints": "mizzen keeps the tasks of a job near each other",
    "priorityClassName": "give `priority`, a level from 1 (the highest) to 7",
    "priority": "give `priority`, a level from 1 (the highest) to 7",
    "preemptionPolicy": "give `priority`, a level from 1 (the highest) to 7",
    "schedulerName": "mizzen is the scheduler", "schedulingGates": "use `mizzen hold`",
    "serviceAccountName": "tasks have no access to Kubernetes; secrets are in `secrets`",
    "serviceAccount": "tasks have no access to Kubernetes; secrets are in `secrets`",
    "automountServiceAccountToken": "tasks have no access to Kubernetes",
    "hostNetwork": "tasks use the machine's network",
    "dnsPolicy": "tasks use the machine's resolver", "enableServiceLinks": "tasks have no service links",
    "runtimeClassName": "the machine's container engine gives the GPUs", "os": "machines run Linux",
    "setHostnameAsFQDN": "tasks have no host names", "hostname": "tasks have no host names; MASTER_ADDR has the first",
    "shareProcessNamespace": "a task has one container",
    "hostIPC": "/dev/shm is shared by the attempt's tasks on a machine",
    "readinessGates": "batch tasks get no requests", "overhead": "operators reserve what machines need",
}  # fmt: skip
POD_LOST: Mapping[str, str] = {
    "initContainers": "a task has one container: begin `run` with these commands",
    "ephemeralContainers": "a task has one container",
    "affinity": _PLACE, "nodeName": _PLACE,
    "securityContext": "the user is the tenant's, and the image is read-only",
    "hostAliases": "give addresses in `env`", "dnsConfig": "tasks use the machine's resolver",
    "hostPID": "tasks see their own processes only", "hostUsers": "the user is the tenant's",
    "resources": "give resources to the container", "resourceClaims": "name GPU types in `accelerators`",
    "hostnameOverride": "tasks have no host names; MASTER_ADDR has the first",
}  # fmt: skip
CONTAINER_DROPPED: Mapping[str, str] = {
    "imagePullPolicy": "the tag's digest is looked up at the first attempt, and each attempt runs this image",
    "ports": "tasks use the machine's network",
    "tty": "tasks have no terminal", "stdin": "tasks have no input", "stdinOnce": "tasks have no input",
    "terminationMessagePath": "mizzen keeps the output: `mizzen logs NAME`",
    "terminationMessagePolicy": "mizzen keeps the output: `mizzen logs NAME`",
    "readinessProbe": "batch tasks get no requests",
    "startupProbe": "`limits.max_silence` restarts a gang without progress",
    "resizePolicy": "resources are fixed while a task runs",
}  # fmt: skip
CONTAINER_LOST: Mapping[str, str] = {
    "livenessProbe": "give `limits.max_silence`, which restarts a gang without progress and output",
    "lifecycle": "a task gets SIGTERM before it is stopped: handle it in the program",
    "securityContext": "the user is the tenant's, and the image is read-only",
    "volumeDevices": "mizzen mounts no volumes", "restartPolicy": "give `limits.retries`",
    "restartPolicyRules": "give `limits.retries`",
}  # fmt: skip
OTHER_KINDS: Mapping[str, str] = {
    "Service": "tasks find each other by MASTER_ADDR and MIZZEN_JOB_<NAME>_ADDR",
    "Namespace": _TENANT, "ServiceAccount": "tasks have no access to Kubernetes",
    "Role": "tasks have no access to Kubernetes", "RoleBinding": "tasks have no access to Kubernetes",
    "LocalQueue": "the tenant has the quota", "ClusterQueue": "the tenant has the quota",
    "PriorityClass": "give `priority`, a level from 1 (the highest) to 7",
}  # fmt: skip
"""Kinds of Kubernetes objects that mizzen does not need, with the reason."""
OTHER_LOST: Mapping[str, str] = {
    "PersistentVolumeClaim": "mizzen mounts no volumes: use `tables`, `workdir` or a bucket",
    "PersistentVolume": "mizzen mounts no volumes: use `tables`, `workdir` or a bucket",
    "Secret": "store the values with `mizzen tenants secrets`; a document has only their names",
    "CronJob": "mizzen has no timetable: submit the job from cron",
    "Pod": "write a Job", "Deployment": "use a service: `mizzen serve up`",
    "StatefulSet": "use a service: `mizzen serve up`",
    "PyTorchJob": "write a JobSet, or a document with one job for each replica type",
    "MPIJob": "mizzen has no MPI launcher: use torchrun, with one task for each node",
    "RayJob": "write a document with jobs for the head and the workers",
}  # fmt: skip
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi")
GPU_LABELS = (
    "nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name", "accelerator", "gpu-type", "gpu", "gpu.nvidia.com/class",
    "amd.com/gpu.product-name",
)  # fmt: skip
REGION_LABELS = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
SPOT_LABELS: Mapping[str, tuple[str, ...]] = {
    "cloud.google.com/gke-spot": ("true",), "cloud.google.com/gke-preemptible": ("true",),
    "karpenter.sh/capacity-type": ("spot",), "eks.amazonaws.com/capacityType": ("SPOT",),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
}  # fmt: skip
PLAIN_LABELS: Mapping[str, str] = {
    "kubernetes.io/os": "machines run Linux", "beta.kubernetes.io/os": "machines run Linux",
    "kubernetes.io/arch": "the image decides the architecture",
    "nvidia.com/gpu.present": "`accelerators` asks for GPUs",
}  # fmt: skip
