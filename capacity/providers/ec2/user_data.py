"""The user data of an EC2 instance: a script that starts the agent."""

import shlex

from capacity.provider import LaunchRequest
from capacity.providers.ec2.settings import Ec2Settings


def user_data(settings: Ec2Settings, request: LaunchRequest) -> str:
    """Returns the shell script that starts the agent of a launched machine.

    Secrets are passed in environment variables: every process of the machine could read command-line flags. The same
    request always gives the same script, because EC2 refuses a client token that is reused with different parameters.
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
    words = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in flags.items())
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"export MIZZEN_INSTANCE={shlex.quote(request.instance)}",
        f"export MIZZEN_JOIN_TOKEN={shlex.quote(request.join_token)}",
        f"export MIZZEN_MACHINE_KEY={shlex.quote(request.machine_key)}",
        *([settings.prepare.strip()] if settings.prepare.strip() else []),
        f"exec {settings.agent} {words}",
    ]
    return "\n".join(lines) + "\n"
