"""Settings of logins with tokens of an OIDC issuer."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from domain.ids import NAME_RULE, is_name
from infra.config.section import Section

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]


class OidcRule(Section):
    """Gives a role to tokens whose claim `claim` equals `value`, or is a list that contains it."""

    claim: str = Field(min_length=1)
    value: str | bool
    role: Literal["balancer", "viewer", "submitter", "operator"]
    tenant: str | None = None
    """The tenant of the token's holder; None: of all tenants, if the role allows it."""
    tenant_claim: str | None = None
    """The claim with the tenant's name, instead of `tenant`."""

    @model_validator(mode="after")
    def _tenants(self) -> "OidcRule":
        if self.tenant is not None and self.tenant_claim is not None:
            raise ValueError("tenant and tenant_claim: set one of them")
        has_tenant = self.tenant is not None or self.tenant_claim is not None
        if self.role == "operator" and has_tenant:
            raise ValueError("tenant: must be omitted for the role operator")
        if self.role == "submitter" and not has_tenant:
            raise ValueError("tenant: the role submitter needs tenant or tenant_claim")
        if self.tenant is not None and not is_name(self.tenant):
            raise ValueError(f"tenant {self.tenant!r}: must be {NAME_RULE}")
        return self


class OidcSettings(Section):
    """An OIDC issuer whose tokens the API accepts in addition to keys."""

    issuer: str
    """The issuer's URL, as in the claim `iss` of its tokens."""
    audience: str = Field(min_length=1)
    """The audience that the claim `aud` of a token must contain."""
    rules: tuple[OidcRule, ...] = Field(min_length=1)
    """The first rule that fits a token decides its role and tenant."""
    ca: Path | None = None
    """PEM file with authorities to trust in addition to the system's, for connections to the issuer."""
    algorithms: tuple[Algorithm, ...] = ("RS256", "PS256", "ES256")
    """Signature algorithms that are accepted. All are asymmetric."""
    leeway_s: float = Field(30.0, ge=0, le=300)
    """By how much the clocks of the API and the issuer may differ, in seconds."""
    client_id: str | None = None
    """Client id with which `mizzen login` uses the device flow and the console the code flow; None: they do not."""
    client_secret_file: Path | None = None
    """File with the secret of that client, which only the console uses; None: it is a public client."""
    scope: str = "openid profile email offline_access"
    """The scopes that `mizzen login` requests. Without `offline_access`, the token cannot be refreshed."""
    token: Literal["id_token", "access_token"] = "id_token"
    """Which token of the issuer `mizzen login` sends to the API."""

    def client_secret(self) -> str | None:
        """Returns the secret of the client; None: it is a public client.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            return None if self.client_secret_file is None else self.client_secret_file.read_text().strip()
        except OSError as error:
            raise ValueError(f"client_secret_file: {self.client_secret_file}: {error.strerror}") from None

    @model_validator(mode="after")
    def _whole(self) -> "OidcSettings":
        if self.client_secret_file is not None and self.client_id is None:
            raise ValueError("client_secret_file: needs client_id")
        return self

    @field_validator("issuer")
    @classmethod
    def _safe(cls, issuer: str) -> str:
        if not cls.is_safe(issuer):
            raise ValueError(f"{issuer!r}: must be an https URL (http only on this machine)")
        return issuer

    @staticmethod
    def is_safe(url: str) -> bool:
        """Returns whether the URL is https, or http on this machine."""
        parts = urlsplit(url)
        is_here = parts.hostname in ("localhost", "127.0.0.1", "::1")
        return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and is_here))
