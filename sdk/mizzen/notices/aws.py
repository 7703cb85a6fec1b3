"""AWS EC2 Spot: the instance metadata service, version 2 (IMDSv2)."""

import re
import time
from collections.abc import Callable, Mapping

from mizzen.notices.metadata import TIMEOUT_S, Answer, CloudWatcher, MetadataError, epoch_s, json_object
from mizzen.notices.notice import MAX_WORDS, Kind, Notice, Window

WINDOW_S = 120.0
PERIOD_S = 5.0
TOKEN_TTL_S = 21600
"""The maximum that AWS allows."""

_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_INSTANCE = "/latest/meta-data/instance-id"
_ACTIONS = frozenset({"terminate", "stop", "hibernate"})


class AwsWatcher(CloudWatcher):
    """Watcher of an EC2 spot instance: interruption (terminate, stop, hibernate) and rebalance recommendation."""

    platform = "aws"
    address_variables = ("MIZZEN_AWS_METADATA", "AWS_EC2_METADATA_SERVICE_ENDPOINT")

    def __init__(
        self,
        base: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        token_ttl_s: int = TOKEN_TTL_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the watcher without sending a request. Other arguments and errors: see `CloudWatcher`.

        `token_ttl_s` is the requested lifetime of a session token, 1 to 21600 s. `monotonic` returns seconds of a
        monotonic clock, for the token's age.
        """
        window = Window(WINDOW_S, "AWS's two-minute interruption notice")
        super().__init__(window, base, environ, timeout_s=timeout_s, period_s=PERIOD_S, clock=clock)
        self._ttl_s = token_ttl_s
        self._monotonic = monotonic
        self._token: tuple[str, float] | None = None

    def answers(self) -> bool:
        """Return whether the server is AWS's: it grants a token, and returns an instance id for it."""
        answer = self._get(_INSTANCE)
        return answer.status == 200 and re.fullmatch(r"i-[0-9a-f]{8,32}", answer.text) is not None

    def poll(self) -> Notice | None:
        """Return the interruption if one is scheduled, else the rebalance recommendation if there is one, else None."""
        answer = self._get(_ACTION)
        if answer.status == 200:
            said = json_object(self._metadata, _ACTION, answer)
            if said.get("action") not in _ACTIONS:
                raise self._metadata.unexpected(_ACTION, answer)
            return self._notice(Kind.PREEMPT, answer.text, epoch_s(said.get("time")))
        if answer.status != 404:
            raise self._metadata.unexpected(_ACTION, answer)
        answer = self._get(_REBALANCE)
        if answer.status == 200:
            if epoch_s(json_object(self._metadata, _REBALANCE, answer).get("noticeTime")) is None:
                raise self._metadata.unexpected(_REBALANCE, answer)
            return Notice(self.platform, Kind.REBALANCE, self._clock(), None, False, answer.text[:MAX_WORDS])
        if answer.status != 404:
            raise self._metadata.unexpected(_REBALANCE, answer)
        return None

    def _get(self, path: str) -> Answer:
        """Send a request with a valid token. Renew the token if it has expired or is rejected (status 401)."""
        fresh = self._token is None or self._monotonic() >= self._token[1]
        answer = self._metadata.request("GET", path, {"X-aws-ec2-metadata-token": self._session(renew=fresh)})
        if answer.status == 401 and not fresh:
            answer = self._metadata.request("GET", path, {"X-aws-ec2-metadata-token": self._session(renew=True)})
        if answer.status == 401:
            self._token = None
            raise self._metadata.unexpected(path, answer)
        return answer

    def _session(self, renew: bool) -> str:
        if not renew and self._token is not None:
            return self._token[0]
        asked_s = self._monotonic()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._ttl_s)}
        answer = self._metadata.request("PUT", _TOKEN, headers)
        if answer.status != 200 or not re.fullmatch(r"[!-~]{1,1024}", answer.text):
            raise MetadataError(f"{self._metadata.base}{_TOKEN}: no token, status {answer.status}")
        # Renew the token after 90 % of its lifetime, to avoid rejected requests.
        self._token = (answer.text, asked_s + 0.9 * self._ttl_s)
        return answer.text
