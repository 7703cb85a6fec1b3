"""The flags of `mizzen agent` that follow from a launch request."""

import shlex

from capacity.provider import LaunchRequest


def agent_flags(request: LaunchRequest) -> str:
    """Returns the flags for a shell. Secrets are not among them: every process of the machine can read flags.

    The same request always gives the same flags.
    """
    region, cluster, name = request.machine.split("/")
    shape = request.offer.shape
    flags = {
        "--region": region,
        "--cluster": cluster,
        "--name": name,
        "--rack": request.offer.zone,
        "--bucket": request.bucket_url,
        "--gpus": str(shape.gpus),
        "--cpus": f"{shape.cpus_milli / 1000:g}",
        "--memory": str(shape.memory_bytes),
        **({} if shape.gpu_type is None else {"--gpu-type": shape.gpu_type}),
    }
    return " ".join(f"{flag} {shlex.quote(value)}" for flag, value in flags.items())
