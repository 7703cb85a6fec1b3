"""What all tables share: their base, and how Python's types are Postgres's."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, LargeBinary, Text, func
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase

Json = dict[str, Any]
NOW = func.now()
"""The time at which the writing transaction began."""


class Base(DeclarativeBase):
    """Every table's base; maps Python types to Postgres types."""

    type_annotation_map = {
        datetime: TIMESTAMP(timezone=True),
        Json: JSONB,
        str: Text,
        int: BigInteger,
        list[str]: ARRAY(Text),
        bytes: LargeBinary,
    }
