"""A model on another server with the interface of a loaded one: streams, chats, and completions of lists."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, Unpack, overload

from edgeinfer.chat import Chat, ChatPrompt
from edgeinfer.chat_templates.tool_calls import ParsedReply, Tool
from edgeinfer.endpoint.connection import Endpoint, EndpointError, EventStream
from edgeinfer.endpoint.messages import (
    CallParts,
    Message,
    RemoteCompletion,
    finish_of,
    sent_messages,
    text_of,
)
from edgeinfer.endpoint.remote_stream import RemoteStream, refuse_closed, speed_of
from edgeinfer.endpoint.servers import ServerKind, kind_of, request_fields
from edgeinfer.errors import ContextOverflowError, Detail, EdgeInferError, SettingError, shortened, shown
from edgeinfer.options import ChatKeywords, GenerateKeywords, LoadOptions, RunKeywords
from edgeinfer.options.run_options import run_options
from edgeinfer.results import Generation

CHAT_PATH, TEXT_PATH = "/chat/completions", "/completions"
TOGETHER = 32
"""Requests of a list that are in progress at once."""
TRIES = 4
MAX_LISTED = 8
CONTEXT_NAMES = ("context", "max_model_len", "context_length", "context_window", "max_context_length")
"""Fields in which servers give the context of a model."""
RemotePrompt = str | Sequence[Message]


class RemoteChatFormat:
    """The server applies the chat template, which is taken to support tools."""

    def variables(self, with_tools: bool = False) -> frozenset[str]:
        """The variables that requests may set."""
        return frozenset({"tools"})


class RemoteModel:
    """What `edgeinfer.load` returns for the engine "openai"; a context manager. Thread-safe.

    `kind`: the server's program; `context` 0: unknown. Prompts and responses are texts: there are no token
    ids, logits or snapshots. Sampling parameters that aren't given are the server's.
    """

    plan = gpu = prompt_style = tokenizer = None

    def __init__(
        self, name: str, endpoint: Endpoint, kind: ServerKind, context: int, defaults: Mapping[str, Any]
    ) -> None:
        self.name, self.endpoint, self.kind, self.context = name, endpoint, kind, context
        self.sampling: dict[str, Any] = {}
        self.chat_format = RemoteChatFormat()
        self.warnings: tuple[str, ...] = ()
        self.details: tuple[str, ...] = (Detail(f"{kind.name} at {endpoint.url} computes"),)
        self._defaults = dict(defaults)
        self._closed = False

    def __repr__(self) -> str:
        return f"<edgeinfer remote model {self.name} at {self.endpoint.url}>"

    def stream(self, prompt: RemotePrompt, **options: Unpack[RunKeywords]) -> RemoteStream:
        """Stream the completion of a text, or of the messages of a chat; options and `Raises` as for
        `Model.stream`, and:

        Raises:
            EndpointError: by the first token; the server can't be reached, or refuses the request.
        """
        refuse_closed(self._closed, self.name)
        path, body = self._request(prompt, options)
        return RemoteStream(
            lambda: (self._opened(path, body), 0), self.kind.has_limit(body), options.get("progress")
        )

    @overload
    def generate(
        self, prompt: RemotePrompt, *, n: int, **options: Unpack[GenerateKeywords]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: RemotePrompt, *, n: None = None, **options: Unpack[GenerateKeywords]
    ) -> Generation: ...

    def generate(
        self, prompt: RemotePrompt, *, n: int | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generation | list[Generation]:
        """The completion of a prompt, or a list of `n`; options and `Raises` as for `stream`."""
        completions = self._whole(prompt, {**options, "n": n})
        return completions[0] if n is None else completions

    def generate_each(
        self, prompts: Sequence[RemotePrompt], **options: Unpack[RunKeywords]
    ) -> Iterator[Generation | Exception]:
        """The completion of each prompt, in order, or the error that `generate` raises for it; several
        requests are in progress at once. Closing the iterator ends the others.
        """
        given: dict[str, Any] = {**options}
        self._request("", given)  # an invalid option is an error of the caller, not of each prompt
        pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="edgeinfer-endpoint")
        own = self.endpoint.of_its_own()
        futures = [pool.submit(self._first_whole, prompt, given, own) for prompt in prompts]
        return _in_order(pool, futures, own)

    def _first_whole(
        self, prompt: RemotePrompt, options: Mapping[str, Any], endpoint: Endpoint
    ) -> Generation | Exception:
        for attempt in range(TRIES):
            try:
                return self._whole(prompt, options, endpoint)[0]
            except EndpointError as error:
                if not error.is_temporary or attempt == TRIES - 1:
                    return error
                time.sleep(2.0**attempt)
            except EdgeInferError as error:
                return error
        raise AssertionError

    def _whole(
        self, prompt: RemotePrompt, options: Mapping[str, Any], endpoint: Endpoint | None = None
    ) -> list[Generation]:
        """All completions of one request that isn't streamed."""
        refuse_closed(self._closed, self.name)
        path, body = self._request(prompt, options)
        started = time.perf_counter()
        value = (endpoint or self.endpoint).post(path, body)
        choices = value.get("choices") if isinstance(value, dict) else None
        if (
            not isinstance(choices, list)
            or not all(isinstance(each, dict) for each in choices)
            or not choices
        ):
            raise EndpointError(
                f"{self.endpoint.url}{path}: the response has no choices; is this OpenAI's API?"
            )
        times = [started, started, time.perf_counter()]
        usage = _share(value.get("usage"), len(choices))
        return [_completion(each, usage, times, self.kind.has_limit(body)) for each in choices]

    def chat(self, system: str | None = None, **options: Unpack[ChatKeywords]) -> Chat:
        """Start a chat; `options` are defaults for all its responses, as for `stream`."""
        return Chat(RemoteChatEngine(self), system, **options)

    def chat_stream(self, prompt: ChatPrompt, on_end: Callable[[Generation], None]) -> RemoteStream:
        """The response to a chat. If the server refuses it as too long, the oldest messages are dropped."""
        refuse_closed(self._closed, self.name)
        options = dict(prompt.options)
        _, first = self._request([], options)  # raises for invalid options now

        def opened() -> tuple[EventStream, int]:
            dropped = prompt.dropped
            while True:
                path, body = self._request(_kept(prompt, dropped), options)
                try:
                    return self._opened(path, body), dropped
                except ContextOverflowError:
                    left = len(_starts(prompt.messages)) - dropped
                    if left <= 1:
                        raise
                    dropped += max(1, left // 4)

        return RemoteStream(opened, self.kind.has_limit(first), options.get("progress"), on_end)

    def _opened(self, path: str, body: dict[str, Any]) -> EventStream:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return self.endpoint.events(path, streamed)

    def _request(self, prompt: RemotePrompt, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request. Raises `SettingError`."""
        given = {**self._defaults, **options}
        run, _ = run_options(given, without=())
        fields = {"model": self.name, **request_fields(given, self.kind)}
        if not isinstance(prompt, str):
            if any(not isinstance(message, Mapping) for message in prompt):
                raise SettingError(
                    f"prompt: saw {shown(prompt)}, wanted a text or messages: a server takes no ids"
                )
            return CHAT_PATH, {**fields, "messages": sent_messages(prompt)}
        if run.raw:
            return TEXT_PATH, {"max_tokens": self.kind.text_tokens, **fields, "prompt": prompt}
        return CHAT_PATH, {**fields, "messages": [{"role": "user", "content": prompt}]}

    def keep_snapshot(self, owner: str | None = None) -> bool:
        """False: the server keeps its cache itself."""
        return False

    def close(self) -> None:
        """Take no further prompts. May be called twice."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteChatEngine:
    """A `ChatEngine` of a server."""

    def __init__(self, model: RemoteModel) -> None:
        self._model = model

    def respond(self, prompt: ChatPrompt, on_end: Callable[[Generation], None]) -> RemoteStream:
        return self._model.chat_stream(prompt, on_end)

    def parsed(self, response: Generation, tools: Sequence[Tool]) -> ParsedReply:
        calls = response.calls if isinstance(response, RemoteCompletion) else ()
        return ParsedReply(response.text, calls)


def _starts(messages: Sequence[Message]) -> list[int]:
    """The indices of the user's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"]


def _kept(prompt: ChatPrompt, dropped: int) -> list[Message]:
    """The messages without the `dropped` oldest of the user and what follows each."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    starts = _starts(prompt.messages)
    return [*system, *prompt.messages[starts[dropped] if dropped else 0 :]]


def _in_order(
    pool: ThreadPoolExecutor, futures: Sequence["Future[Generation | Exception]"], endpoint: Endpoint
) -> Iterator[Generation | Exception]:
    try:
        for future in futures:
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        endpoint.abort()


def _share(usage: object, completions: int) -> dict[str, Any]:
    """The usage of one of several completions, which servers count together."""
    if not isinstance(usage, dict):
        return {}
    generated = usage.get("completion_tokens")
    return {**usage, "completion_tokens": generated // completions if isinstance(generated, int) else None}


def _completion(
    choice: Mapping[str, Any], usage: Mapping[str, Any], times: list[float], has_limit: bool
) -> RemoteCompletion:
    message = choice.get("message")
    calls = CallParts()
    if isinstance(message, dict):
        text = text_of(message)
        calls.add(message.get("tool_calls"))
    else:
        text = choice["text"] if isinstance(choice.get("text"), str) else ""
    return RemoteCompletion(
        text,
        [],
        finish_of(choice.get("finish_reason"), has_limit),
        speed_of(usage, 0, times),
        calls=calls.calls,
    )


def open_endpoint(name: str | None, options: LoadOptions, needs_name: bool = True) -> RemoteModel:
    """The model of a server. `name` None: the only one that the server lists, or "" if none is needed.

    Raises:
        SettingError: no name for one of several models, or an invalid address or key.
        EndpointError: the server can't be reached, or refuses the key.
    """
    if options.base_url is None:
        raise SettingError("base_url: saw None, wanted the server's address, as http://127.0.0.1:8000/v1")
    endpoint = Endpoint(options.base_url, options.key)
    listed = _listed(endpoint)
    names = ", ".join(shortened(each) for each in list(listed)[:MAX_LISTED]) or "none"
    if name is None and len(listed) != 1 and needs_name:
        raise SettingError(f"model: saw none, wanted the name of one; {endpoint.url} has {names}")
    warnings = []
    if name is None:
        name = next(iter(listed)) if len(listed) == 1 else ""
    elif listed and name not in listed:
        warnings.append(f"{endpoint.url} lists no model {shown(name)}; it has {names}")
    if endpoint.exposes_key:
        warnings.append(f"the key is sent to {endpoint.url} without encryption")
    model = _described(name, endpoint, listed, options)
    model.warnings = tuple(warnings)
    return model


def _described(
    name: str, endpoint: Endpoint, listed: Mapping[str, Mapping[str, Any]], options: LoadOptions
) -> RemoteModel:
    """The model with what the server's list says of it."""
    card = listed.get(name, {})
    # Programs differ per server, not per model.
    owners = (each.get("owned_by") for each in (card, *listed.values()) if each)
    context = next((card[key] for key in CONTEXT_NAMES if isinstance(card.get(key), int)), 0)
    given = {"thinking": options.thinking, "template_args": options.template_args}
    defaults = {key: value for key, value in given.items() if value}
    return RemoteModel(name, endpoint, kind_of(next(owners, None)), options.context or context, defaults)


def _listed(endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    """The models of a server by name; none if it has no list."""
    status, text = endpoint.get_bytes("/models")
    if status == 404:
        return {}
    value = endpoint.value_of("/models", status, text)
    cards = value.get("data") if isinstance(value, dict) else None
    return {
        card["id"]: card
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    }
