"""The base class of all SQLAlchemy models, with the mapping from Python types to Postgres types."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, LargeBinary, Text, func
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase

Json = dict[str, Any]
NOW = func.now()
"""SQL expression for the start time of the current transaction."""


class Base(DeclarativeBase):
    """Base class of all models. Maps Python types to Postgres types."""

    type_annotation_map = {
        datetime: TIMESTAMP(timezone=True),
        Json: JSONB,
        str: Text,
        int: BigInteger,
        list[str]: ARRAY(Text),
        bytes: LargeBinary,
    }
