"""A self-signed certificate for 127.0.0.1, with which agents of the embedded stack authenticate its gateway.

Without it, a task could listen on the gateway's port while the gateway restarts, and receive the agents' keys.
"""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from infra.files import write_private

_VALID = timedelta(days=3650)
"""Validity of a certificate: longer than any stack runs, because each start creates a new one."""


def write_certificate(certificate: Path, key: Path) -> None:
    """Writes a new certificate and its private key as PEM files of mode 0600."""
    private = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mizzen gateway")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # The clock may be set back.
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(private, SHA256())
    )
    body = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(key, body.decode())
    write_private(certificate, made.public_bytes(Encoding.PEM).decode())
