"""A chat keeps its messages, its cache and its system message, and reports dropped messages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer import Chat, Model
from edgeinfer.errors import ChatTemplateError, ContextOverflowError, EdgeInferError, SettingError
from tests.edgeinfer.fake_engine import END, FakeEngine, byte_ids, model_on
from tests.random_models import VOCABULARY

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
"""A letter for the role, the text, the end: a token a character, and one."""


class FakeChatModel:
    """Responds by a function of the prompt's text; the template's last token is a lone `A`."""

    def __init__(self, response: Callable[[str], str], context: int = 64, template: str = TEMPLATE) -> None:
        self.prompts: list[str] = []
        self._answer = response
        self.engine = FakeEngine(self._logits, context)
        self.model: Model = model_on(
            self.engine,
            template,
            {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.scores": SCORES},
        )

    def _logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        text = self.model.tokenizer.decode(ids, special=True).removeprefix("<s>")
        before, output = text.rsplit("</s>A", 1)
        if not output:
            self.prompts.append(before + "</s>A")
        script = [*byte_ids(self._answer(before)), END]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[script[len(output.encode())]] = 30
        return logits

    def chat(self, system: str | None = None, **settings: Any) -> Chat:
        return self.model.chat(system, temperature=0.0, **settings)


SCORES = np.zeros(VOCABULARY, np.float32)


def echo(before: str) -> str:
    """The last user message, in capitals."""
    return before.rsplit("U", 1)[1].upper()


@pytest.fixture
def chat_model() -> FakeChatModel:
    return FakeChatModel(echo)


def test_a_message_that_is_not_text_is_refused_and_not_stored(chat_model: FakeChatModel) -> None:
    chat, nothing = chat_model.chat(), None
    with pytest.raises(SettingError, match=r"^text: saw NoneType None, wanted a text$"):
        chat.say(nothing)  # type: ignore[arg-type]
    assert chat.messages == []


def test_messages_are_stored_and_included_in_the_next_prompt(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat("be.")
    assert chat.say("hi").text == "HI"
    assert chat.say("yo").text == "YO"
    assert chat.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "HI"},
        {"role": "user", "content": "yo"},
        {"role": "assistant", "content": "YO"},
    ]
    assert chat_model.prompts == ["Sbe.</s>Uhi</s>A", "Sbe.</s>Uhi</s>AHI</s>Uyo</s>A"]


def test_the_cache_is_reused_between_messages(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat("be.")
    chat.say("hi")
    second = chat.say("yo")
    # All but the end, which was sampled and never evaluated.
    assert second.speed.cached_tokens == 1 + len("Sbe.") + 1 + len("Uhi") + 1 + len("AHI")


def test_context_used_is_the_token_count_of_the_chat(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    assert chat.context_used == 0
    response = chat.say("hi")
    assert chat.context_used == len(response.prompt_ids) + len(response.ids) == len("sUhi/A") + len("HI")
    chat_model.model.generate([1, *byte_ids("U</s>A")], max_tokens=0)
    assert chat.context_used == len("sUhi/AHI")
    chat.clear()
    assert chat.context_used == 0
    assert chat.messages == []


def test_clear_keeps_the_system_message(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat("be.")
    chat.say("hi")
    chat.clear()
    chat.say("yo")
    assert chat_model.prompts[-1] == "Sbe.</s>Uyo</s>A"


def test_the_system_message_may_change_between_messages(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    chat.say("hi")
    chat.system = "go."
    chat.say("yo")
    assert chat_model.prompts[-1] == "Sgo.</s>Uhi</s>AHI</s>Uyo</s>A"


def test_a_chat_over_its_context_drops_and_counts_the_oldest_messages(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat("be.")
    dropped = [chat.say(f"{number}abcd").dropped_messages for number in range(8)]
    assert dropped[:3] == [0, 0, 0]
    assert dropped == sorted(dropped)
    assert dropped[-1] > 0
    assert all(prompt.startswith("Sbe.</s>U") for prompt in chat_model.prompts)
    last = chat_model.prompts[-1]
    assert last.startswith(f"Sbe.</s>U{dropped[-1]}abcd")
    assert last.endswith("U7abcd</s>A")
    assert len(chat.messages) == 16
    assert chat.messages[0]["content"] == "0abcd"


def test_dropping_frees_a_quarter_so_that_the_cache_serves_several_messages(
    chat_model: FakeChatModel,
) -> None:
    chat = chat_model.chat("be.")
    completions = [chat.say(f"{number}abcd") for number in range(12)]
    restarted = [
        a
        for a, b in zip(completions[1:], completions, strict=False)
        if a.dropped_messages != b.dropped_messages
    ]
    with_long_limit = [
        a
        for a, b in zip(completions[1:], completions, strict=False)
        if a.dropped_messages == b.dropped_messages
    ]
    assert len(restarted) <= len(with_long_limit)
    assert all(a.speed.cached_tokens > len(a.prompt_ids) // 2 for a in with_long_limit)


def test_a_message_over_the_context_names_both_lengths_and_loses_nothing(
    chat_model: FakeChatModel,
) -> None:
    chat = chat_model.chat("be.")
    chat.say("hi")
    with pytest.raises(ContextOverflowError) as caught:
        chat.say("x" * 60)
    assert str(caught.value) == (
        "the last message, its template and the system message have 69 tokens, the context holds 64; "
        "shorten it, or take a larger context (context=)"
    )
    response = chat.say("yo")
    assert response.dropped_messages == 0
    assert chat_model.prompts[-1] == "Sbe.</s>Uhi</s>AHI</s>Uyo</s>A"


def test_regenerate_repeats_the_last_response() -> None:
    completions = ["one", "two"]
    chat_model = FakeChatModel(lambda before: completions[0])
    chat = chat_model.chat()
    chat.say("hi")
    completions.pop(0)
    assert "".join(token.text for token in chat.regenerate()) == "two"
    assert [message["content"] for message in chat.messages] == ["hi", "two"]
    assert chat_model.prompts[0] == chat_model.prompts[1]


def test_edit_drops_that_message_and_all_later_ones(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    for text in ("a", "b", "c"):
        chat.say(text)
    list(chat.edit(1, "d"))
    assert [message["content"] for message in chat.messages] == ["a", "A", "d", "D"]


def test_a_cancelled_or_failed_edit_keeps_the_old_messages(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    chat.say("a")
    chat.say("b")
    before = list(chat.messages)
    chat.edit(0, "c").cancel()
    chat.regenerate().cancel()
    with pytest.raises(ContextOverflowError):
        chat.edit(0, "x" * 100)
    assert chat.messages == before


def test_an_edit_before_the_dropped_messages_restores_those_that_fit(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    for number in range(8):
        chat.say(f"{number}abcd")
    stream = chat.edit(1, "hi")
    list(stream)
    assert stream.result.dropped_messages == 0
    assert chat_model.prompts[-1] == "U0abcd</s>A0ABCD</s>Uhi</s>A"


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_a_missing_message_cannot_be_edited(chat_model: FakeChatModel, index: int) -> None:
    chat = chat_model.chat()
    chat.say("a")
    with pytest.raises(ValueError, match=rf"message {index}: this chat has 1 user messages, counted from 0"):
        chat.edit(index, "b")


def test_regenerate_before_the_first_message_is_an_error(chat_model: FakeChatModel) -> None:
    with pytest.raises(ValueError, match="there is no response yet"):
        chat_model.chat().regenerate()


def test_a_response_cancelled_before_its_first_token_is_not_stored(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    chat.say("a")
    chat.stream("b").cancel()
    assert len(chat.messages) == 2
    assert chat.say("c").text == "C"


def test_a_response_interrupted_while_its_text_was_held_back_is_not_stored(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat(stop="ENDS")
    stream = chat.stream("endless")
    chat_model.engine.interrupt_at = len("Uendless/A") + 3
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert (stream.result.text, stream.result.ids) == ("", [])
    assert chat.messages == []


def test_a_response_cancelled_later_keeps_its_text(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    stream = chat.stream("hello")
    for _ in range(3):
        next(stream)
    stream.cancel()
    assert [message["content"] for message in chat.messages] == ["hello", "HEL"]
    chat.say("yo")
    assert chat_model.prompts[-1] == "Uhello</s>AHEL</s>Uyo</s>A"


def test_ctrl_c_in_a_response_stores_the_message(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    stream = chat.stream("hello")
    next(stream)
    chat_model.engine.interrupt_at = len(chat_model.engine.ids)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert [message["content"] for message in chat.messages] == ["hello", "H"]
    assert chat.say("yo").text == "YO"


def test_chat_options_are_defaults_for_its_responses(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat(max_tokens=2)
    assert chat.say("abc").text == "AB"
    assert chat.say("abc", max_tokens=1).text == "A"
    with pytest.raises(SettingError, match="max_tokens: saw 'many'"):
        chat.say("abc", max_tokens="many")  # type: ignore[arg-type]


def test_max_tokens_makes_room_for_a_longer_history() -> None:
    chat_model = FakeChatModel(echo, context=64)
    chat = chat_model.chat()
    chat.say("x" * 20)
    long = chat.say("y" * 10, max_tokens=1)
    assert long.dropped_messages == 0
    assert len(long.prompt_ids) > 56


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_bos_occurs_once_whether_the_template_writes_it_or_not(written: str) -> None:
    chat_model = FakeChatModel(echo, template=written + TEMPLATE)
    response = chat_model.chat().say("hi")
    assert response.prompt_ids[0] == 1
    assert response.prompt_ids.count(1) == 1


def test_a_file_without_bos_gets_none() -> None:
    engine = FakeEngine(lambda ids: np.eye(1, VOCABULARY, END, dtype=np.float32)[0])
    model = model_on(engine, metadata={"tokenizer.ggml.add_bos_token": False})
    assert 1 not in model.chat().say("hi").prompt_ids


def test_a_prompt_to_continue_gets_no_eos() -> None:
    engine = FakeEngine(lambda ids: np.eye(1, VOCABULARY, END, dtype=np.float32)[0])
    model = model_on(engine, metadata={"tokenizer.ggml.add_eos_token": True})
    prompt_ids = model.generate("he").prompt_ids
    assert prompt_ids[0] == 1
    assert END not in prompt_ids


def test_an_empty_prompt_starts_with_bos() -> None:
    engine = FakeEngine(lambda ids: np.eye(1, VOCABULARY, END, dtype=np.float32)[0])
    assert model_on(engine).generate("").prompt_ids == [1]
    without = model_on(engine, metadata={"tokenizer.ggml.add_bos_token": False})
    assert without.generate("").prompt_ids == [1]


def test_a_model_without_a_template_names_the_template_option() -> None:
    model = model_on(FakeEngine(lambda ids: np.zeros(VOCABULARY, np.float32)), template=None)
    expected = r"no chat template; give one \(chat_template=\)"
    with pytest.raises(SettingError, match=expected):
        model.chat().say("hi")
    with pytest.raises(SettingError, match=expected):
        model.generate("hi", raw=False)


def test_a_failing_template_loses_no_message(chat_model: FakeChatModel) -> None:
    failing = FakeChatModel(
        echo, template="{% if messages|length > 2 %}{{ raise_exception('no more') }}{% endif %}" + TEMPLATE
    )
    chat = failing.chat()
    chat.say("a")
    with pytest.raises(ChatTemplateError, match="no more"):
        chat.say("b")
    assert len(chat.messages) == 2


def test_a_prompt_can_be_formatted_with_the_template(chat_model: FakeChatModel) -> None:
    assert chat_model.model.generate("hi", raw=False, temperature=0.0).text == "HI"
    assert chat_model.prompts == ["Uhi</s>A"]


def test_a_chat_with_a_closed_model_is_an_error(chat_model: FakeChatModel) -> None:
    chat = chat_model.chat()
    chat_model.model.close()
    with pytest.raises(EdgeInferError, match="fake has been closed; load it again"):
        chat.say("hi")


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
TOOL_TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}{{ m.role[0] | upper }}"
    "{{ m.content }}{% for call in m.tool_calls %}<{{ call.function.arguments.town }}>{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def use_the_tool(before: str) -> str:
    """A call for the first message, then the tool's result."""
    if before.rsplit("</s>", 1)[-1].startswith("T"):
        return "It is " + before.rsplit("T", 1)[1] + "."
    return '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'


def test_a_chat_has_the_tool_calls_of_a_response_and_continues_with_their_results() -> None:
    fake = FakeChatModel(use_the_tool, 512, TOOL_TEMPLATE)
    chat = fake.chat(tools=[WEATHER])
    chat.say("How is it in Ulm?")
    ((call,),) = (chat.tool_calls,)
    assert (call.name, call.arguments) == ("weather", {"town": "Ulm"})
    for wrong in ((), ("a", "b"), "sunny"):
        with pytest.raises(SettingError, match="wanted one for each of 1 tool calls"):
            chat.say_results(wrong)
    with pytest.raises(SettingError, match="wanted a text or a value for JSON"):
        chat.say_results([{1, 2}])
    assert chat.say_results(["sunny"]).text == "It is sunny."
    assert chat.tool_calls == ()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert fake.prompts[1] == "[weather]UHow is it in Ulm?</s>A<Ulm></s>Tsunny</s>A"
    chat.edit(0, "And now?").cancel()
    assert chat.say("Again?").text.startswith("<tool_call>")
    assert chat.say_results([{"degrees": 20}]).text == 'It is {"degrees": 20}.'


def test_an_exchange_with_tools_is_dropped_as_a_whole() -> None:
    fake = FakeChatModel(use_the_tool, 256, TOOL_TEMPLATE)
    chat = fake.chat(tools=[WEATHER])
    for number in range(4):
        chat.say(f"How is it in Ulm at {number} o'clock?")
        dropped = chat.say_results(["rain and wind"]).dropped_messages
    assert dropped > 0
    assert fake.prompts[-1].startswith("[weather]UHow is it in Ulm at ")
    assert fake.prompts[-1].count("Train and wind<") == 4 - dropped
    assert len(chat.messages) == 16
