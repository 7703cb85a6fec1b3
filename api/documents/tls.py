"""The section `service.tls` of the service document: a certificate and its private key, as text."""

import os
import ssl
from dataclasses import replace
from typing import Any

from api.documents.forms import Field, Form, section, text
from api.documents.position import At

MAX_PEM_BYTES = 16_000
"""A running HAProxy accepts no longer certificate with its chain and key."""
_BLOCKS = "must be the text of a PEM file; `mizzen serve up` sends the text of the file that a path names"
_PEM = text("the text of a PEM file", MAX_PEM_BYTES)
_PAIR = f"The key is that of the certificate and has no passphrase; both have at most {MAX_PEM_BYTES} bytes together"
_SECTION = section({
    "certfile": Field(_PEM, "The certificate and its chain", missing="the PEM file with the certificate and its chain"),
    "keyfile": Field(_PEM, "Its private key", missing="the PEM file with the private key of the certificate"),
}, f"PEM texts, or for `mizzen serve up` the paths of PEM files. {_PAIR}")  # fmt: skip


def _read(at: At) -> Any:
    """Reads the section. Its errors have no values, which may be a private key."""
    scratch = At(at.path, at.value)
    values = _SECTION.read(scratch)
    texts = {} if scratch.problems else {key: values[key].strip() for key in ("certfile", "keyfile")}
    for key in (key for key, given in texts.items() if "-----BEGIN " not in given):
        scratch.get(key).wrong(_BLOCKS, rule=_PAIR)
    pem = "" if scratch.problems else "".join(f"{given}\n" for given in texts.values())
    if pem and (why := _wrong(pem)):
        scratch.wrong(why, rule=_PAIR)
    at.problems.extend(replace(problem, value=None) for problem in scratch.problems)
    return pem or None


def _wrong(pem: str) -> str:
    """Returns what is wrong with a certificate and its key; empty: nothing."""
    if len(pem.encode()) > MAX_PEM_BYTES:
        return f"certfile and keyfile must have at most {MAX_PEM_BYTES} bytes together, they have {len(pem.encode())}"
    file = os.memfd_create("certificate")  # OpenSSL reads only files, and the key must not reach a disk.
    try:
        os.write(file, pem.encode())
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(f"/proc/self/fd/{file}", password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        detail = f" ({reason.lower().replace('_', ' ')})" if reason else ""
        return f"certfile and keyfile must be a certificate and its private key without passphrase{detail}"
    finally:
        os.close(file)
    return ""


TLS = Form(_SECTION.schema, _read)
