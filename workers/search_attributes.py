"""The search attributes that a run writes must exist before its first workflow task: Temporal would fail that task for ever."""

from __future__ import annotations

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from workflows.names import SEARCH_ATTRIBUTES

_TYPES = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "Double": IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}


async def ensure_search_attributes(client: Client) -> None:
    """Create what is missing.

    Raises:
        RuntimeError: they are missing and this client may not create them; gives the command that does.
    """
    try:
        listed = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
        missing = {name: kind for name, kind in SEARCH_ATTRIBUTES.items() if name not in listed.custom_attributes}
    except RPCError as error:
        if error.status not in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED):
            raise
        missing = dict(SEARCH_ATTRIBUTES)
    if not missing:
        return
    try:
        wanted = {name: _TYPES[kind] for name, kind in missing.items()}
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=wanted)
        )
    except RPCError as error:
        if error.status == RPCStatusCode.ALREADY_EXISTS:
            return
        commands = "; ".join(
            f"temporal operator search-attribute create --namespace {client.namespace} --name {name} --type {kind}"
            for name, kind in missing.items()
        )
        raise RuntimeError(
            f"namespace {client.namespace} lacks search attributes and this client may not add them ({error.message}): {commands}"
        ) from None
