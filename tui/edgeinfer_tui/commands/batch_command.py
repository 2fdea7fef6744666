"""`edgeinfer batch`: the requests of a file in OpenAI's batch format, completed into another file."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Exit, Option

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.library import is_remote
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.parsed_options import parsed_options
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.system.installed_packages import check_server_packages

if TYPE_CHECKING:
    from edgeinfer.serving.batch.batch_run import BatchTarget
    from edgeinfer.serving.batch.lines import BatchLine

LABEL = "requests"
RETRY_SECONDS = 1.0
"""Wait before a request to another server is tried again; it doubles each time."""
MAX_NODES = 64
"""Nodes of a cluster that get requests at once."""
IN_PROGRESS = 32
"""Requests that are started: as many as the model answers together, others wait for them."""


@command("batch")
def batch(
    input_file: Annotated[
        Path,
        Argument(metavar="IN.jsonl", help="The requests.", exists=True, dir_okay=False, show_default=False),
    ],
    output_file: Annotated[
        Path, Argument(metavar="OUT.jsonl", help="The responses.", dir_okay=False, show_default=False)
    ],
    model: Annotated[
        str | None,
        Option(
            "--model",
            help="The model of requests that name none; they may name any installed model.",
            autocompletion=arguments.models_here,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        Option(
            "--ray",
            metavar="ADDRESS",
            help="Run on all nodes of a Ray cluster: HOST:PORT of its head, or auto on one of its nodes.",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Complete a file of requests in OpenAI's batch format.

    A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions",
    "body": …}; each becomes a row with the response, or with an error.
    Rows are written when they are complete. If the program was stopped or
    killed, the same command continues: nothing is lost, nothing is done twice.

    [bold]Example[/]

      edgeinfer batch requests.jsonl responses.jsonl --model qwen3-8b

      edgeinfer batch requests.jsonl responses.jsonl --model qwen3-8b --ray 10.0.0.1:6379
    """
    options = parsed_options(filled(given), "batch")
    check_server_packages("batch")
    from edgeinfer.serving.batch.batch_run import run_batch
    from edgeinfer.serving.batch.lines import read_lines
    from edgeinfer.serving.batch.output_file import BatchOutput

    if output_file.exists() and output_file.samefile(input_file):
        raise BadParameter(f"{output_file}: is the input; name another file for the output")
    lines = read_lines(input_file)
    if ray is not None and is_remote(options.loading):
        raise BadParameter("--ray and --engine openai both say where the requests go; drop one of them")
    if ray is not None:
        target, together = _cluster(ray, model, options.loading)
    else:
        target = (_remote if is_remote(options.loading) else _local)(model, options.loading, lines)
        together = IN_PROGRESS
    interrupts.raise_exception()
    with BatchOutput(output_file) as output, LabelledProgress(time_left=True) as progress:
        resumed = len(output.done)
        try:
            counts = asyncio.run(run_batch(target, lines, output, together, progress.step(LABEL)))
        except KeyboardInterrupt:
            progress.erase()
            say(f"stopped: {len(output.done)} of {len(lines)} lines are done; the same command continues")
            raise Exit(interrupts.INTERRUPTED) from None
    before = f", {resumed} were done before" if resumed else ""
    say(f"{counts.completed} lines completed, {counts.failed} with an error{before}")


def _local(model: str | None, loading: Mapping[str, Any], lines: "Sequence[BatchLine]") -> "BatchTarget":
    """The server's application over the models of this machine, without a network."""
    from edgeinfer.serving.app import ServerOptions, serving_app
    from edgeinfer.serving.batch.local_requests import LocalRequests
    from edgeinfer.serving.models.installed import InstalledModels
    from edgeinfer.serving.models.pool import ModelPool

    installed = InstalledModels([model] if model else [], {"parallel": 0, **loading}, say)
    pool = ModelPool(installed, keep_alive=-1, default=installed.given[0] if model else "")
    return LocalRequests(serving_app(pool, ServerOptions(max_waiting=IN_PROGRESS)))


def _cluster(address: str, model: str | None, loading: Mapping[str, Any]) -> "tuple[BatchTarget, int]":
    """All nodes of a Ray cluster, and the number of requests in progress."""
    from edgeinfer.cluster.node_engine import portable_model
    from edgeinfer.cluster.node_requests import NodeRequests
    from edgeinfer.cluster.ray_nodes import engine_cluster

    cluster = engine_cluster(address, portable_model(model), loading, IN_PROGRESS)
    return NodeRequests(cluster, IN_PROGRESS, say), MAX_NODES * IN_PROGRESS


def _remote(model: str | None, loading: Mapping[str, Any], lines: "Sequence[BatchLine]") -> "BatchTarget":
    """The server of `--engine openai`; lines without a model get the given or the only one."""
    from edgeinfer.endpoint.remote_model import open_endpoint
    from edgeinfer.options import LoadOptions
    from edgeinfer.serving.batch.remote_requests import RemoteRequests

    opened = open_endpoint(model, LoadOptions.from_keywords(loading), any(not line.model for line in lines))
    for note in opened.warnings:
        say(note)
    return RemoteRequests(opened.endpoint, opened.name or None, IN_PROGRESS, RETRY_SECONDS)
