"""The events of a streamed response's items: reasoning, message and calls, one after the other."""

from collections.abc import Iterator
from typing import Any

from edgeinfer.serving.completion.reply import ReplyPart
from edgeinfer.serving.responses.items import Item, new_id
from edgeinfer.serving.responses.output_items import call_item, message_item, reasoning_item

Json = dict[str, Any]


class ItemEvents:
    """The items of one response. `output`: those that are finished; `summarizes`: reasoning is a summary."""

    def __init__(self, summarizes: bool) -> None:
        self.output: list[Item] = []
        self._summarizes = summarizes
        self._kind = ""
        """Type of the item that is being written; "": none."""
        self._id = ""
        self._text = ""
        self._call = ("", "")
        self._logprobs: list[Json] = []

    def part(self, part: ReplyPart, logprobs: list[Json]) -> Iterator[Json]:
        """The events of a part. `logprobs`: those of its token."""
        self._logprobs += logprobs
        if part.reasoning:
            yield from self._begin("reasoning")
            yield self._delta(part.reasoning)
        elif part.call is None:
            yield from self._begin("message")
            yield self._delta(part.text) | {"logprobs": logprobs}
        else:
            call_id, delta = part.call
            if delta.name is not None:
                yield from self._end("completed")
                self._call = call_id, delta.name
                yield from self._begin("function_call")
            if delta.arguments:
                yield self._delta(delta.arguments)

    def end(self, status: str) -> Iterator[Json]:
        """The events at the end of the response."""
        if not self.output and not self._kind:
            yield from self._begin("message")
        yield from self._end(status)

    def _begin(self, kind: str) -> Iterator[Json]:
        if self._kind == kind:
            return
        yield from self._end("completed")
        self._kind, self._id, self._text = kind, new_id(kind), ""
        item = {**self._item(), "status": "in_progress"}
        item |= {name: [] for name in ("content", "summary") if name in item}
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": item}
        if self._part_name:
            yield self._of_item(f"response.{self._part_name}.added") | {"part": self._part_of()}

    def _end(self, status: str) -> Iterator[Json]:
        if not self._kind:
            return
        item = {**self._item(), "status": status}
        done: Json = {"arguments" if self._kind == "function_call" else "text": self._text}
        if self._kind == "function_call":
            done["name"] = self._call[1]
        elif self._kind == "message":
            done["logprobs"] = self._logprobs
        yield self._of_item(f"{self._delta_name}.done") | done
        if self._part_name:
            yield self._of_item(f"response.{self._part_name}.done") | {"part": self._part_of()}
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._kind = ""

    def _delta(self, text: str) -> Json:
        self._text += text
        return self._of_item(f"{self._delta_name}.delta") | {"delta": text}

    def _of_item(self, kind: str) -> Json:
        place: Json = {"type": kind, "item_id": self._id, "output_index": len(self.output)}
        if self._kind == "function_call":
            return place
        is_summary = self._kind == "reasoning" and self._summarizes
        return place | {"summary_index" if is_summary else "content_index": 0}

    @property
    def _delta_name(self) -> str:
        if self._kind == "reasoning":
            return "response.reasoning_summary_text" if self._summarizes else "response.reasoning_text"
        return "response.output_text" if self._kind == "message" else "response.function_call_arguments"

    @property
    def _part_name(self) -> str:
        """The name of the events of a part; "": the item has no parts."""
        if self._kind == "function_call":
            return ""
        is_summary = self._kind == "reasoning" and self._summarizes
        return "reasoning_summary_part" if is_summary else "content_part"

    def _part_of(self) -> Json:
        item = self._item()
        parts: list[Json] = item.get("content") or item["summary"]
        return parts[0]

    def _item(self) -> Item:
        if self._kind == "reasoning":
            return reasoning_item(self._text, self._summarizes, self._id)
        if self._kind == "message":
            return message_item(self._text, self._logprobs, self._id)
        return call_item(*self._call, self._text, self._id)
