"""Requests of a batch to another server with the same APIs."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from edgeinfer.endpoint.connection import LATER, Endpoint, EndpointError
from edgeinfer.serving.batch.lines import BatchLine

TRIES = 5
VERSION = "/v1"


class RemoteRequests:
    """A `BatchTarget`. `model`: of lines that name none; `threads`: requests in progress;
    `first_wait`: seconds before a request is tried again.

    A failure that may be temporary is tried again, with waits that double; then the batch ends, so that its
    rows have no failures of the network.
    """

    def __init__(self, endpoint: Endpoint, model: str | None, threads: int, first_wait: float) -> None:
        self._endpoint, self._model, self._first_wait = endpoint.of_its_own(), model, first_wait
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edgeinfer-batch")

    async def post(self, line: BatchLine) -> tuple[int, bytes]:
        path, body = line.url.removeprefix(VERSION), self._body(line)
        send = partial(self._endpoint.post_bytes, path, body)
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._first_wait * 2 ** (attempt - 1))
            try:
                status, text = await asyncio.get_running_loop().run_in_executor(self._pool, send)
            except EndpointError as error:
                failure = error
                if not error.is_temporary:
                    raise
                continue
            if status not in LATER:
                return status, text
            failure = EndpointError(f"{self._endpoint.url}{path}: {status}, {TRIES} times")
        raise failure

    def _body(self, line: BatchLine) -> bytes:
        if line.model or self._model is None:
            return line.body
        return json.dumps({**json.loads(line.body), "model": self._model}).encode()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._endpoint.abort()  # the program's end waits for the threads
