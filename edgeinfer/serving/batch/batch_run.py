"""Completes the lines of a batch, several at once, and writes a row for each."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from edgeinfer.serving.batch.lines import BatchLine
from edgeinfer.serving.batch.local_requests import post
from edgeinfer.serving.batch.output_file import BatchOutput


@dataclass
class BatchCounts:
    """Rows of this run: complete ones, and those with an error."""

    completed: int = 0
    failed: int = 0


async def run_batch(
    app: Starlette,
    lines: Sequence[BatchLine],
    output: BatchOutput,
    parallel: int,
    progress: Callable[[int, int], None],
) -> BatchCounts:
    """Complete the lines that the output doesn't have. `parallel`: requests in progress; `progress` is called
    with the lines that are done and all lines.
    """
    output.check_lines({line.id for line in lines})
    counts = BatchCounts()
    waiting = (line for line in lines if line.id not in output.done)

    async def work(own: Iterator[BatchLine]) -> None:
        for line in own:
            row = await _row(app, line)
            output.write(row)
            is_complete = row["error"] is None and row["response"]["status_code"] == 200
            counts.completed += is_complete
            counts.failed += not is_complete
            progress(len(output.done), len(lines))

    progress(len(output.done), len(lines))
    async with app.router.lifespan_context(app), asyncio.TaskGroup() as group:
        for _ in range(parallel):
            group.create_task(work(waiting))
    return counts


async def _row(app: Starlette, line: BatchLine) -> dict[str, Any]:
    """The row of a line, in OpenAI's format."""
    row: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": None}
    if line.error:
        return {**row, "error": {"code": "invalid_line", "message": line.error}}
    status, text = await post(app, line.url, line.body)
    request_id = f"req_{secrets.token_hex(12)}"
    return {
        **row,
        "response": {"status_code": status, "request_id": request_id, "body": json.loads(text)},
    }
