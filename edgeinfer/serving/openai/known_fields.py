"""The fields of OpenAI's chat completions and completions."""

from edgeinfer.serving.fields import SAMPLING, KnownFields

_COMPLETION = ("model", "stream", "stream_options", "n", "max_tokens", "logprobs", *SAMPLING)
_REFUSED = {
    "functions": "not supported here; use tools",
    "function_call": "not supported here; use tool_choice",
    "audio": "not supported here",
    "modalities": "not supported here; responses are text",
    "prediction": "not supported here",
    "suffix": "not supported here",
    "best_of": "not supported here; use n",
    "web_search_options": "not supported here",
    "moderation": "not supported here",
    "verbosity": "not supported here; ask for it in a message",
}
WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
) | {"prompt_cache_retention", "prompt_cache_options", "cache_prompt"}
_NEUTRAL = {"best_of": 1, "modalities": ["text"], "verbosity": "medium", "function_call": "none"}

CHAT = KnownFields(
    frozenset((*_COMPLETION, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools"))
    | {"tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"},
    _REFUSED,
    WITHOUT_EFFECT,
    _NEUTRAL,
)
TEXT = KnownFields(
    frozenset((*_COMPLETION, "prompt", "echo", "response_format")),
    {
        **_REFUSED,
        **dict.fromkeys(("reasoning_effort", "chat_template_kwargs"), "prompts here have no chat template"),
        **dict.fromkeys(("tools", "tool_choice"), "prompts here have no chat template; use chat completions"),
    },
    WITHOUT_EFFECT,
    {**_NEUTRAL, "tool_choice": "none"},
)
