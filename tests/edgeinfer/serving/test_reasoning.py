"""Reasoning of chat templates by `reasoning_effort` and `chat_template_kwargs`."""

import pytest

from tests.edgeinfer.serving.http_client import chat, fake
from tests.random_models import CHAT_TEMPLATE

pytestmark = pytest.mark.anyio

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}calm {% endif %}" + CHAT_TEMPLATE
EFFORT = "{{ reasoning_effort }} " + CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "effort", "warning"),
    [
        (SWITCH, "none", None),
        (SWITCH, "low", "reasoning_effort: 'low' is 'on' in the model's chat template"),
        (EFFORT, "high", None),
        (EFFORT, "minimal", "reasoning_effort: 'minimal' is 'low' in the model's chat template"),
        (EFFORT, "none", "reasoning_effort: 'none' is 'low' in the model's chat template"),
        (CHAT_TEMPLATE, "high", "reasoning_effort: has no effect, the model's chat template has no setting"),
    ],
)
async def test_an_effort_is_the_nearest_that_the_template_has(
    template: str, effort: str, warning: str | None
) -> None:
    response = await chat({"reasoning_effort": effort, "max_tokens": 4}, fake(template=template))
    assert response.status_code == 200
    warnings = response.json().get("warnings", [])
    assert len(warnings) == (warning is not None)
    assert warning is None or warnings[0].startswith(warning)


async def test_template_variables_reach_the_template() -> None:
    plain = (await chat({"max_tokens": 4}, fake(template=SWITCH))).json()["usage"]["prompt_tokens"]
    body = {"max_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}}
    calm = (await chat(body, fake(template=SWITCH))).json()["usage"]["prompt_tokens"]
    assert calm > plain
    assert (await chat({**body, "reasoning_effort": "low"}, fake(template=SWITCH))).status_code == 200


async def test_every_variable_of_a_hybrid_models_template_reaches_it() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ preserve_thinking }}|" + CHAT_TEMPLATE
    variables = {"enable_thinking": False, "preserve_thinking": True}
    model = fake(template=template)
    seen: list[str] = []
    decode = model.tokenizer.decode
    body = {"max_tokens": 4, "chat_template_kwargs": variables, "reasoning_effort": "high"}
    original = model.engine.prompt_steps

    def watched(ids: list[int], *rest: object) -> object:
        seen.append(decode(ids))
        return original(ids, *rest)  # type: ignore[arg-type]

    model.engine.prompt_steps = watched  # type: ignore[method-assign, assignment]
    assert (await chat(body, model)).status_code == 200
    assert "False high True|" in "".join(seen)
