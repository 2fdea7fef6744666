"""The JSON API of the chat store: list, search, read, add and edit messages, name, export, delete."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.errors import shown
from edgeinfer.history.export import as_json_lines, as_markdown
from edgeinfer.history.records import Role, State, StoredChat
from edgeinfer.history.store import ChatStore, ChatStoreError
from edgeinfer.serving.apis import AnyRoute, PlainRoute, Server
from edgeinfer.serving.fields import KnownFields, RequestError, check_fields, checked_count, checked_text
from edgeinfer.serving.page.chat_fields import (
    Fields,
    chat_fields,
    hit_fields,
    message_fields,
    response_text,
    results_text,
)
from edgeinfer.serving.page.chat_thread import ChatThread

MAX_LISTED = 500
MAX_ID = 2**63 - 1
NEW_CHAT = KnownFields(frozenset(("model", "system")))
CHANGES = KnownFields(frozenset(("name", "model", "system", "tip")))
MESSAGE = KnownFields(frozenset(("parent", "role", "content", "reasoning", "calls", "results", "state")))
RESPONSE = KnownFields(frozenset(("content", "reasoning", "calls", "state")))
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
Handler = Callable[[ChatThread, Request, Server], Awaitable[Response]]


def chat_routes(chats: ChatThread) -> tuple[AnyRoute, ...]:
    """The routes over the chats of a store."""
    one = "/page/chats/{chat:int}"

    def route(path: str, handle: Handler, method: str = "GET") -> PlainRoute:
        return PlainRoute(path, partial(handle, chats), (method,), is_logged=False)

    return (
        route("/page/chats", _list),
        route("/page/chats", _new, "POST"),
        route(one, _read),
        route(one, _change, "PATCH"),
        route(one, _delete, "DELETE"),
        route(f"{one}/export", _export),
        route(f"{one}/messages", _add, "POST"),
        route("/page/messages/{message:int}", _update, "PUT"),
    )


async def _list(chats: ChatThread, request: Request, server: Server) -> Response:
    """The chats, most recently changed first; with `search`, those with a message that contains a text."""
    text = request.query_params.get("search", "").strip()
    if text:
        hits = await chats.run(lambda store: store.search(text))
        first = {hit.chat.id: hit for hit in reversed(hits)}  # one message of each chat, the newest
        return _json({"chats": [hit_fields(hit) for hit in reversed(first.values())]})
    listed = await chats.run(lambda store: store.chats(MAX_LISTED))
    return _json({"chats": [chat_fields(chat) for chat in listed]})


async def _new(chats: ChatThread, request: Request, server: Server) -> Response:
    body = await _body(request, server, NEW_CHAT)
    model = await _stored_name(server, checked_text(body, "model"))
    system = checked_text(body, "system") or None
    return _json(chat_fields(await chats.run(lambda store: store.new_chat(model, system))), 201)


async def _stored_name(server: Server, name: str) -> str:
    """The name under which the terminal chat finds a model: its name, or the path of its file."""
    for card in await server.models.cards():
        if card.name == name and card.is_path and card.path is not None:
            return str(card.path.absolute())
    return name


async def _read(chats: ChatThread, request: Request, server: Server) -> Response:
    """A chat with the messages of all branches."""

    def read(store: ChatStore) -> Fields:
        chat = _chat(store, request)
        return {**chat_fields(chat), "tree": [message_fields(one) for one in store.messages(chat)]}

    return _json(await chats.run(read))


async def _change(chats: ChatThread, request: Request, server: Server) -> Response:
    """Name a chat, set its model or system prompt, or go to the branch of the message `tip`."""
    body = await _body(request, server, CHANGES)
    name, model = checked_text(body, "name"), checked_text(body, "model")
    model = await _stored_name(server, model) if model else ""
    system, tip = checked_text(body, "system"), _message_id(body, "tip")

    def change(store: ChatStore) -> Fields:
        chat = _chat(store, request)
        if name:
            store.rename(chat, name)
        if model:
            store.set_model(chat, model)
        if "system" in body:
            store.set_system(chat, system or None)
        if tip is not None:
            message = store.message(tip)
            if message.chat != chat.id:
                raise ChatStoreError(f"message {tip}: of another chat")
            store.move_to(message)
        return chat_fields(store.chat(str(chat.id)))

    return _json(await chats.run(change))


async def _delete(chats: ChatThread, request: Request, server: Server) -> Response:
    await chats.run(lambda store: store.delete(_chat(store, request)))
    return _json({"deleted": True})


async def _export(chats: ChatThread, request: Request, server: Server) -> Response:
    """The current branch as Markdown or JSON lines, as a file."""
    form = request.query_params.get("format", "md")
    if form not in ("md", "jsonl"):
        raise RequestError(f"format: saw {shown(form)}, wanted md or jsonl", param="format")

    def export(store: ChatStore) -> str:
        chat = _chat(store, request)
        return (as_markdown if form == "md" else as_json_lines)(chat, store.branch(chat))

    kind = "text/markdown" if form == "md" else "application/jsonl"
    name = f'attachment; filename="chat-{request.path_params["chat"]}.{form}"'
    headers = {**HEADERS, "Content-Disposition": name}
    return Response(await chats.run(export), media_type=f"{kind}; charset=utf-8", headers=headers)


async def _add(chats: ChatThread, request: Request, server: Server) -> Response:
    """Add a message; a response with the state "coming" is updated as it is generated."""
    body = await _body(request, server, MESSAGE)
    role = _one_of(body, "role", get_args(Role), "")
    state: State = _one_of(body, "state", get_args(State), "whole")
    text = _text(role, body)
    if role == "user" and not text.strip():
        raise RequestError("content: saw an empty text, wanted a message", param="content")
    parent = _message_id(body, "parent")
    added = await chats.run(
        lambda store: store.add_message(_chat(store, request).id, parent, role, text, state)
    )
    return _json(message_fields(added), 201)


def _text(role: Role, body: Mapping[str, Any]) -> str:
    """The text under which a message is stored."""
    if role == "assistant":
        return response_text(body)
    return results_text(body) if role == "tool" else checked_text(body, "content")


async def _update(chats: ChatThread, request: Request, server: Server) -> Response:
    """Replace the text and the state of a response that is being generated."""
    body = await _body(request, server, RESPONSE)
    text, state = response_text(body), _one_of(body, "state", get_args(State), "coming")
    number = request.path_params["message"]
    if number > MAX_ID:
        raise RequestError("message: no such message", status=404)
    updated = await chats.run(lambda store: store.update_response(number, text, state))
    return _json(message_fields(updated))


def _chat(store: ChatStore, request: Request) -> StoredChat:
    number = request.path_params["chat"]
    try:
        if number > MAX_ID:
            raise ChatStoreError("no such chat")
        return store.chat(str(number))
    except ChatStoreError as error:
        raise RequestError(str(error), status=404) from None


async def _body(request: Request, server: Server, fields: KnownFields) -> Fields:
    body = await server.body(request)
    check_fields(body, fields)
    return body


def _message_id(body: Mapping[str, Any], name: str) -> int | None:
    return checked_count(body, name, 0, 1, MAX_ID) or None


def _one_of(body: Mapping[str, Any], name: str, allowed: tuple[str, ...], default: str) -> Any:
    value = body.get(name, default)
    if value not in allowed:
        raise RequestError(f"{name}: saw {shown(value)}, wanted one of {', '.join(allowed)}", param=name)
    return value


def _json(fields: Fields, status: int = 200) -> Response:
    return JSONResponse(fields, status_code=status, headers=HEADERS)
