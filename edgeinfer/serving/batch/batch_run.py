"""Completes the lines of a batch, several at once, and writes a row for each."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from edgeinfer.errors import EdgeInferError, shortened
from edgeinfer.serving.batch.lines import BatchLine
from edgeinfer.serving.batch.output_file import BatchOutput

MAX_MESSAGE = 300


class BatchTarget(AbstractAsyncContextManager[Any], Protocol):
    """What completes the requests: the server's application here, another server, or a cluster."""

    async def post(self, line: BatchLine) -> tuple[int, bytes]:
        """The status and the body of the response. Raises `EdgeInferError`: the batch can't continue."""
        ...


@dataclass
class BatchCounts:
    """Rows of this run: complete ones, and those with an error."""

    completed: int = 0
    failed: int = 0


async def run_batch(
    target: BatchTarget,
    lines: Sequence[BatchLine],
    output: BatchOutput,
    parallel: int,
    progress: Callable[[int, int], None],
) -> BatchCounts:
    """Complete the lines that the output doesn't have. `parallel`: requests in progress; `progress` is called
    with the lines that are done and all lines.

    Raises `EdgeInferError`: the target can't complete lines any more; those that are done are in the output.
    """
    output.check_lines({line.id for line in lines})
    counts = BatchCounts()
    waiting = (line for line in lines if line.id not in output.done)

    async def work(own: Iterator[BatchLine]) -> None:
        for line in own:
            row = await _row(target, line)
            output.write(row)
            is_complete = row["error"] is None and row["response"]["status_code"] == 200
            counts.completed += is_complete
            counts.failed += not is_complete
            progress(len(output.done), len(lines))

    progress(len(output.done), len(lines))
    try:
        async with target, asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(work(waiting))
    except* EdgeInferError as errors:
        raise _first(errors) from None
    return counts


def _first(errors: BaseExceptionGroup[EdgeInferError]) -> EdgeInferError:
    """The first error of a group, which groups may be in."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EdgeInferError)
    return error


async def _row(target: BatchTarget, line: BatchLine) -> dict[str, Any]:
    """The row of a line, in OpenAI's format."""
    row: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": None}
    if line.error:
        return {**row, "error": {"code": "invalid_line", "message": line.error}}
    status, text = await target.post(line)
    request_id = f"req_{secrets.token_hex(12)}"
    return {
        **row,
        "response": {"status_code": status, "request_id": request_id, "body": _body(text)},
    }


def _body(text: bytes) -> Any:
    """The JSON value of a response; another text as an error object."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"error": {"message": shortened(text.decode("utf-8", "replace"), MAX_MESSAGE)}}
