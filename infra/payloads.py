"""How arguments and results travel in Temporal: JSON, by pydantic's rules for dataclasses."""

from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)

_JSON = PydanticJSONPlainPayloadConverter()
"""One for the process: it keeps what it has built to read each type."""


class PayloadConverter(CompositePayloadConverter):
    """Temporal's converters, with pydantic's for JSON.

    A worker makes one for every workflow. The one of `temporalio.contrib.pydantic` would start each of them with an
    empty cache and build the readers of all their types again, which was a sixth of the worker's work.
    """

    def __init__(self) -> None:
        """Takes no arguments: Temporal makes it."""
        defaults = DefaultPayloadConverter.default_encoding_payload_converters
        super().__init__(*(_JSON if isinstance(c, JSONPlainPayloadConverter) else c for c in defaults))


DATA_CONVERTER = DataConverter(payload_converter_class=PayloadConverter)
