"""Template variables reach a model's prompt from `load`, `stream`, `chat` and models.toml."""

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


def test_models_toml_sets_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = tmp_path / "edgeinfer" / "models.toml"
    own.parent.mkdir()
    file = "edgeinfer-tiny-30m-Q4_K_M.gguf"
    (tmp_path / "edgeinfer" / "models").mkdir()
    (tmp_path / "edgeinfer" / "models" / file).symlink_to(find_model("tiny").path)
    own.write_text(f'[calm]\nfile = "{file}"\nthinking = "off"\ntemplate_args = {{mood = "?"}}\n')
    with edgeinfer.load("calm", chat_template=TEMPLATE, draft=None) as model:
        assert prompt_of(model) == "hi calm?"
    own.write_text(f'[calm]\nfile = "{file}"\nthinking = "never"\n')
    with pytest.raises(RegistryError, match="saw 'never', wanted one of on, off"):
        edgeinfer.load("calm")
