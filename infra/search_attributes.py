"""Registers the search attributes by which operators filter workflows in Temporal."""

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from domain.search_attributes import INTEGERS, KEYWORDS


async def register(client: Client) -> None:
    """Adds the search attributes that are missing in the client's namespace.

    Raises:
        RPCError: the service refuses. Some cloud services require their own tools for adding search attributes.
    """
    wanted = dict.fromkeys(KEYWORDS, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD)
    wanted |= dict.fromkeys(INTEGERS, IndexedValueType.INDEXED_VALUE_TYPE_INT)
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    missing = {name: kind for name, kind in wanted.items() if name not in known.custom_attributes}
    if not missing:
        return
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:
            raise
