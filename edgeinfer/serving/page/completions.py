"""Completions for the page: those of /v1/chat/completions, streamed, cut to the context, with their speed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgeinfer.model import Model
from edgeinfer.results import Generation
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.response_format import event
from edgeinfer.serving.completion.tool_choice import NO_CALLS
from edgeinfer.serving.openai import replies
from edgeinfer.serving.openai.chat_format import ChatFormat
from edgeinfer.serving.openai.requests import chat_request


@dataclass(frozen=True)
class PageRequest(CompletionRequest):
    """`messages`: their number before the oldest were dropped."""

    messages: int = 0


def page_request(body: Mapping[str, Any]) -> PageRequest:
    """POST /page/completions: the fields of /v1/chat/completions; the response is streamed in any case."""
    parsed = chat_request({**body, "stream": True})
    values = {each.name: getattr(parsed, each.name) for each in fields(parsed)}
    return PageRequest(**{**values, "truncates": True, "messages": len(parsed.prompts[0])})


def page_format(model: Model, parsed: CompletionRequest) -> "PageFormat":
    """The writer of a response, without the tools if the chat template has none."""
    chat_format = model.chat_format
    if chat_format is None or "tools" not in chat_format.variables():
        parsed = replace(parsed, tool_use=NO_CALLS)
    return PageFormat(model, parsed)


class PageFormat(ChatFormat):
    """Ends with the tokens, the speed, the context, the number of messages that were dropped, and whether the
    model was offered tools.
    """

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        request, (completion, *_) = self.parsed, completions
        assert isinstance(request, PageRequest)
        yield event(
            {
                "choices": [],
                "usage": replies.usage(completions),
                "timings": replies.timings(completion),
                "context": self.model.context,
                "dropped_messages": request.messages - len(request.prompts[0]),
                "finish": completion.finish_reason,
                "tools": bool(request.tool_use.tools),
            }
        )
        yield event("[DONE]")
