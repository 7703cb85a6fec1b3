"""Temporary credentials for S3: a role that the agent assumes, restricted by a session policy (STS AssumeRole).

The credentials allow only actions that both the role and the policy allow. Tasks find them as all of AWS's libraries
do: through `credential_process` in the file that `AWS_CONFIG_FILE` names, which those libraries run again before the
credentials expire.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from agent.credentials.scope import BucketScope, Prefix

_MOST_CHARACTERS = 2048
"""Maximum length of a policy for STS, in characters."""
_READ = ("s3:GetObject",)
_WRITE = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
_LIST = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
_CONFIG = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 3, "mode": "standard"})
_SESSION_CHARACTERS = 64


@dataclass(frozen=True)
class AwsCredentials:
    """Temporary credentials, and how their holder reaches S3."""

    process: dict[str, Any]
    """The answer of a `credential_process`."""
    region: str | None
    endpoint: str | None
    """URL of the S3 service, if it is not AWS."""

    def config(self, answer: Path) -> str:
        """Returns the file for `AWS_CONFIG_FILE`. `answer`: the file with `process` as JSON."""
        lines = ["[default]", f'credential_process = /bin/cat "{answer}"']
        others = (("region", self.region), ("endpoint_url", self.endpoint))
        lines += [f"{name} = {value}" for name, value in others if value]
        return "\n".join([*lines, ""])


def session_policy(scope: BucketScope, partition: str = "aws") -> str:
    """Returns the policy (JSON) that allows what is in `scope`.

    If it would be too long for STS, it allows to read all objects next to the tables, instead of those of each table.
    """
    policy = _policy(scope, partition)
    if len(policy) > _MOST_CHARACTERS:
        beside = {Prefix(one.bucket, one.prefix.rstrip("/").rpartition("/")[0] + "/") for one in scope.reads}
        policy = _policy(BucketScope(scope.writes, tuple(sorted(beside))), partition)
    return policy


def assume(role: str, scope: BucketScope, name: str, lifetime_s: float) -> AwsCredentials:
    """Returns credentials for `scope`, valid for `lifetime_s`.

    Args:
        role: ARN of the role that the agent's own credentials may assume. Services that are compatible with S3 may
            ignore it.
        scope: what the credentials allow, as far as the role allows it.
        name: shown in the logs of the service; its first 64 characters count.
        lifetime_s: at least 900; more than the role's maximum is an error.

    Raises:
        botocore.exceptions.BotoCoreError, ClientError: the agent has no credentials, STS does not answer or refuses.
    """
    session = boto3.session.Session()
    parts = role.split(":")
    client: Any = session.client("sts", config=_CONFIG)
    answer = client.assume_role(
        RoleArn=role,
        RoleSessionName=name[:_SESSION_CHARACTERS],
        Policy=session_policy(scope, parts[1] if len(parts) > 1 else "aws"),
        DurationSeconds=int(lifetime_s),
    )["Credentials"]
    process = {
        "Version": 1,
        "AccessKeyId": answer["AccessKeyId"],
        "SecretAccessKey": answer["SecretAccessKey"],
        "SessionToken": answer["SessionToken"],
        "Expiration": answer["Expiration"].isoformat(),
    }
    storage: Any = session.client("s3", config=_CONFIG)
    endpoint = str(storage.meta.endpoint_url)
    return AwsCredentials(process, storage.meta.region_name, None if "amazonaws.com" in endpoint else endpoint)


def _policy(scope: BucketScope, partition: str) -> str:
    statements: list[dict[str, Any]] = []
    for actions, prefixes in ((_WRITE, scope.writes), (_READ, scope.reads)):
        if prefixes:
            resources = [f"arn:{partition}:s3:::{one.bucket}/{_literal(one.prefix)}*" for one in prefixes]
            statements.append({"Effect": "Allow", "Action": actions, "Resource": resources})
    for bucket, listed in _by_bucket((*scope.writes, *scope.reads)).items():
        statements.append(
            {
                "Effect": "Allow",
                "Action": _LIST,
                "Resource": f"arn:{partition}:s3:::{bucket}",
                "Condition": {"StringLike": {"s3:prefix": [f"{_literal(prefix)}*" for prefix in listed]}},
            }
        )
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))


def _literal(prefix: str) -> str:
    """Returns a pattern that matches only `prefix`: variables in policies stand for characters with a meaning."""
    return "".join({"*": "${*}", "?": "${?}", "$": "${$}"}.get(character, character) for character in prefix)


def _by_bucket(prefixes: Iterable[Prefix]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in prefixes:
        found.setdefault(one.bucket, []).append(one.prefix)
    return found
