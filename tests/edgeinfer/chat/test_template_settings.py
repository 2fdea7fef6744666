"""Template variables reach a model's prompt from `load`, `stream`, `chat` and models.toml."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import RegistryError, SettingError
from edgeinfer.registry.registry import find_model

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %} calm{% endif %}{{ mood }}"
)
HI = [{"role": "user", "content": "hi"}]


def prompt_of(model: edgeinfer.Model, **settings: Any) -> str:
    result = model.generate(HI, max_tokens=1, temperature=0.0, **settings)
    return model.tokenizer.decode(result.prompt_ids).strip()


@pytest.fixture
def model() -> edgeinfer.Model:
    return edgeinfer.load("tiny", chat_template=TEMPLATE, draft=None)


def test_a_request_sets_reasoning_and_variables(model: edgeinfer.Model) -> None:
    with model:
        assert prompt_of(model) == "hi"
        assert prompt_of(model, thinking="off") == "hi calm"
        assert prompt_of(model, template_args={"mood": " sad"}) == "hi sad"
        chat = model.chat(thinking="off")
        chat.say("hi", max_tokens=1, template_args={"mood": "!"})
        assert chat.context_used
        with pytest.raises(SettingError, match="saw 'high', but the model's chat template supports on, off"):
            prompt_of(model, thinking="high")
        with pytest.raises(SettingError, match="the chat template isn't applied to the prompt"):
            model.generate("hi", thinking="off")


def test_load_sets_defaults_and_refuses_options_the_template_lacks() -> None:
    with edgeinfer.load("tiny", chat_template=TEMPLATE, draft=None, thinking="off") as model:
        assert prompt_of(model) == "hi calm"
        assert prompt_of(model, thinking="on") == "hi"
    with pytest.raises(SettingError, match="has no setting for it"):
        edgeinfer.load("tiny", draft=None, thinking="off")


@pytest.mark.slow
def test_models_toml_sets_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = tmp_path / "edgeinfer" / "models.toml"
    own.parent.mkdir()
    file = "edgeinfer-tiny-30m-Q4_K_M.gguf"
    (tmp_path / "edgeinfer" / "models").mkdir()
    shutil.copyfile(find_model("tiny").path, tmp_path / "edgeinfer" / "models" / file)
    own.write_text(f'[calm]\nfile = "{file}"\nthinking = "off"\ntemplate_args = {{mood = "?"}}\n')
    with edgeinfer.load("calm", chat_template=TEMPLATE, draft=None) as model:
        assert prompt_of(model) == "hi calm?"
    own.write_text(f'[calm]\nfile = "{file}"\nsampling = {{temperature = 0.0, presence_penalty = 1.5}}\n')
    with edgeinfer.load("calm", draft=None) as model, edgeinfer.load("tiny", draft=None) as plain:
        assert model.sampling == {"temperature": 0.0, "presence_penalty": 1.5}
        given: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 1.5, "max_tokens": 40}
        penalized = plain.generate("One day", **given).text
        assert model.generate("One day", max_tokens=40).text == penalized
        assert model.chat().say("Hi", max_tokens=40).text == plain.chat(**given).say("Hi").text
        greedy = plain.generate("One day", temperature=0.0, max_tokens=40).text
        assert model.generate("One day", max_tokens=40, presence_penalty=0.0).text == greedy != penalized
        assert model.generate("One day", max_tokens=40, n=2)[1].text == penalized
    own.write_text(f'[calm]\nfile = "{file}"\nthinking = "never"\n')
    with pytest.raises(RegistryError, match="saw 'never', wanted one of on, off"):
        edgeinfer.load("calm")


PRESERVING = (
    "{% for m in messages %}"
    "{% if preserve_thinking and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}|{% endfor %}{{ enable_thinking }} {{ reasoning_effort }} {{ preserve_thinking }}"
)


def test_every_variable_of_a_hybrid_models_template_reaches_it() -> None:
    with edgeinfer.load(
        "tiny", chat_template=PRESERVING, draft=None, template_args={"enable_thinking": False}
    ) as model:
        args: dict[str, Any] = {"preserve_thinking": True, "reasoning_effort": "high"}
        assert prompt_of(model, template_args=args) == "hi|False high True"
        assert prompt_of(model, thinking="low") == "hi|False low"


@pytest.mark.parametrize("at_load", [False, True])
def test_a_chat_keeps_earlier_reasoning_only_if_a_variable_keeps_it(at_load: bool) -> None:
    args: dict[str, Any] = {"template_args": {"preserve_thinking": True}}
    given = args if at_load else {}
    with edgeinfer.load("tiny", chat_template=PRESERVING, draft=None, **given) as model:
        for options, expected in (
            ({}, at_load),
            (args, True),
            ({"template_args": {"preserve_thinking": False}}, False),
        ):
            chat = model.chat()
            chat.messages = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nb"},
            ]
            response = chat.say("c", max_tokens=1, temperature=0.0, **options)
            text = model.tokenizer.decode(response.prompt_ids)
            assert text.strip().startswith("a|(Hm.)b|c|" if expected else "a|b|c|")
