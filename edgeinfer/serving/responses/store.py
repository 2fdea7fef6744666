"""Stored responses, in memory: the conversations that `previous_response_id` continues."""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.responses.items import Item

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
"""Bytes of all stored conversations, as JSON."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, its input items, and the items of the conversation up to its end."""

    response: dict[str, Any]
    input: tuple[Item, ...]
    conversation: tuple[Item, ...]


class ResponseStore:
    """The responses that were used last; thread-safe. The server's end deletes them."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, stored: StoredResponse) -> None:
        """Store a response; over the limits, those that were used least recently go."""
        size = len(json.dumps([stored.response, stored.conversation]).encode())
        with self._lock:
            self._stored[stored.response["id"]] = stored, size
            self._bytes += size
            while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
                self._bytes -= self._stored.popitem(last=False)[1][1]

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """A stored response. Raises `RequestError` (404)."""
        with self._lock:
            if response_id not in self._stored:
                raise RequestError(
                    f"response {shown(response_id)} isn't stored here: it never was (store false), it was "
                    f"deleted, or it was dropped (the last {self._max_responses} are kept, in memory)",
                    status=404,
                    param=param,
                    code="response_not_found",
                )
            self._stored.move_to_end(response_id)
            return self._stored[response_id][0]

    def delete(self, response_id: str) -> None:
        """Delete a response. Raises `RequestError` (404)."""
        self.get(response_id)
        with self._lock:
            if (stored := self._stored.pop(response_id, None)) is not None:
                self._bytes -= stored[1]
