"""Sends e-mail through the operator's SMTP server. Blocks, so it runs in separate threads."""

import smtplib
import socket
import ssl
from email.message import EmailMessage

from activities.notify.webhook import NotDelivered
from infra.config.notify import SmtpSettings

_MOST_WORDS = 300


def send_email(settings: SmtpSettings, timeout_s: float, mail: EmailMessage) -> None:
    """Sends an e-mail. Each step of the protocol may take `timeout_s` seconds.

    Raises:
        NotDelivered: the server cannot be reached, or refuses the login, the encryption or the e-mail.
    """
    try:
        tls = ssl.create_default_context()
        if settings.ca is not None:
            tls.load_verify_locations(settings.ca)
        with _connected(settings, timeout_s, tls) as server:
            if settings.tls == "starttls":
                server.starttls(context=tls)
            if settings.user is not None and settings.password_file is not None:
                server.login(settings.user, settings.password_file.read_text().splitlines()[0])
            server.send_message(mail, from_addr=mail["From"].addresses[0].addr_spec)
    except smtplib.SMTPRecipientsRefused as error:
        _, (code, words) = next(iter(error.recipients.items()))
        raise _refused(code, words) from None
    except smtplib.SMTPResponseException as error:
        raise _refused(error.smtp_code, error.smtp_error) from None
    except (smtplib.SMTPException, OSError, ValueError, IndexError) as error:
        raise NotDelivered(f"e-mail server {settings.host}: {_plain(str(error) or type(error).__name__)}") from None


def _connected(settings: SmtpSettings, timeout_s: float, tls: ssl.SSLContext) -> smtplib.SMTP:
    own = socket.gethostname()
    if settings.tls == "tls":
        return smtplib.SMTP_SSL(settings.host, settings.port, own, timeout=timeout_s, context=tls)
    return smtplib.SMTP(settings.host, settings.port, own, timeout=timeout_s)


def _refused(code: int, words: bytes | str) -> NotDelivered:
    said = words.decode(errors="replace") if isinstance(words, bytes) else words
    return NotDelivered(f"the e-mail server refuses it: {code} {_plain(said)}")


def _plain(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)[:_MOST_WORDS]
