"""The encoding of arguments and results in Temporal: JSON, with pydantic's rules for dataclasses."""

from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)

_JSON = PydanticJSONPlainPayloadConverter()
"""One converter for the whole process, because it caches the pydantic validator of each type."""


class PayloadConverter(CompositePayloadConverter):
    """Temporal's default converters, with pydantic's converter for JSON.

    A worker creates one instance for each workflow. The converter in `temporalio.contrib.pydantic` would give each one
    an empty cache and build the validators of all types again, which took a sixth of the worker's time.
    """

    def __init__(self) -> None:
        """Takes no arguments, because Temporal creates the instances."""
        defaults = DefaultPayloadConverter.default_encoding_payload_converters
        super().__init__(*(_JSON if isinstance(c, JSONPlainPayloadConverter) else c for c in defaults))


DATA_CONVERTER = DataConverter(payload_converter_class=PayloadConverter)
