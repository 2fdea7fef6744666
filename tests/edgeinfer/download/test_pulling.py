"""`pull` of names, repositories and addresses, against a hub on the loopback."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.download import transfer
from edgeinfer.download.pulling import Pull, PulledModel, pull
from edgeinfer.download.transfer import RetryPolicy, TransferCallbacks
from edgeinfer.errors import DownloadError, UnknownModelError
from edgeinfer.registry.found_models import ExternalFolders
from edgeinfer.registry.registry import find_model
from edgeinfer_offload.machine.hardware import Machine, Processor
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.edgeinfer.download.fake_hub import FakeHub
from tests.random_models import RandomModel

OWN = """
[mini]
repository = "me/mini-GGUF"
file = "mini-{quant}.gguf"
quants = ["Q8_0", "Q4_K_M"]
parameters = "tiny"

[elsewhere]
file = "other.gguf"
url = "URL"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"

[mine]
file = "mine.gguf"
"""
GIBIBYTE = 1 << 30


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Pull:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    write_own(tmp_path, OWN)
    return Pull(
        models_folder=tmp_path / "models",
        callbacks=TransferCallbacks(),
        retry_policy=RetryPolicy(attempts=3, stall_seconds=10.0, sleep=lambda seconds: None),
        endpoint=hub.url("").rstrip("/"),
        others=ExternalFolders.usual(environment={}, home=tmp_path / "nowhere"),
        machine=lambda: machine_with(8 * GIBIBYTE),
    )


def write_own(folder: Path, text: str) -> None:
    (folder / "config" / "edgeinfer").mkdir(parents=True, exist_ok=True)
    (folder / "config" / "edgeinfer" / "models.toml").write_text(text, encoding="utf-8")


def machine_with(free_bytes: int, bytes_per_second: float = 20e9) -> Machine:
    return Machine(
        Processor("plain", 4, free_bytes, free_bytes, bytes_per_second, float("inf")), origin="unmeasured"
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of one small model, with sizes in the order of their quantizations."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for quant, formats in (("Q8_0", ("Q8_0",)), ("Q6_K", ("Q6_K",)), ("Q4_K_M", ("Q4_K",))):
        model = RandomModel("llama", width=256, heads=4, head_dim=64, feed_forward=512, formats=formats)
        made[quant] = model.write(folder / f"{quant}.gguf").read_bytes()
    return made


def offer(hub: FakeHub, models: dict[str, bytes]) -> None:
    for quant, content in models.items():
        hub.put("me/mini-GGUF", f"mini-{quant}.gguf", content)
    hub.put("me/mini-GGUF", "mmproj-F16.gguf", b"GGUF")
    hub.put("me/mini-GGUF", "../../evil-Q8_0.gguf", b"GGUF")
    hub.put("me/mini-GGUF", "/tmp/mini-Q5_0.gguf", b"GGUF")
    hub.put("me/mini-GGUF", "..\\mini-Q5_1.gguf", b"GGUF")
    hub.put("me/mini-GGUF", "README.md", b"#")


def refusal(expected: str, settings: Pull) -> str:
    with pytest.raises((DownloadError, UnknownModelError)) as caught:
        pull(expected, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def recording(settings: Pull) -> tuple[Pull, list[str]]:
    output: list[str] = []
    return replace(settings, callbacks=TransferCallbacks(say=output.append)), output


def files_of(pulled: PulledModel, settings: Pull) -> list[str]:
    return [file.path.relative_to(settings.models_folder).as_posix() for file in pulled.files]


def test_a_named_quantization_is_downloaded_and_verified(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    pulled = pull("mini:q4_k_m", settings)
    assert (pulled.name, files_of(pulled, settings)) == ("mini:Q4_K_M", ["me/mini-GGUF/mini-Q4_K_M.gguf"])
    assert pulled.path.read_bytes() == models["Q4_K_M"]
    assert pulled.files[0].sha256 == hashlib.sha256(models["Q4_K_M"]).hexdigest()
    assert pulled.files[0].digest_source == "the hub"
    result = find_model("mini", models_folder=settings.models_folder, others=settings.others)
    assert (result.path, result.parameters) == (pulled.path, "tiny")


def test_a_downloaded_model_needs_no_network(hub: FakeHub, settings: Pull, models: dict[str, bytes]) -> None:
    offer(hub, models)
    first = pull("mini:Q4_K_M", settings)
    offline = replace(settings, endpoint="http://127.0.0.1:9")
    for expected in ("mini", "mini:Q4_K_M", "hf:me/mini-GGUF/mini-Q4_K_M.gguf"):
        again = pull(expected, offline)
        assert (again.path, again.files[0].existed) == (first.path, True)
    assert hub.fetched() == ["mini-Q4_K_M.gguf"]


def test_a_quantization_that_only_the_hub_lists_is_found_locally_later(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    pulled = pull("mini:Q6_K", settings)
    assert find_model("mini:Q6_K", models_folder=settings.models_folder).path == pulled.path


def test_the_best_quantization_that_fits_and_is_fast_is_selected(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    settings, output = recording(settings)
    assert pull("mini", settings).name == "mini:Q8_0"
    assert output[0].startswith(
        "Q8_0: the best of Q8_0, Q6_K, Q4_K_M that fits and is fast: takes 0.0 of 8.0 free GiB"
    )
    assert output[0].endswith("tokens/s, assuming 20 GB/s of memory")


def test_a_slow_machine_gets_the_fastest_acceptable_quantization(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    settings, output = recording(replace(settings, machine=lambda: machine_with(8 * GIBIBYTE, 1e6)))
    assert pull("mini", settings).name == "mini:Q4_K_M"
    assert output[0].startswith("Q4_K_M: the fastest of Q8_0, Q6_K, Q4_K_M that is still good: ")


def test_little_memory_gets_a_quantization_that_fits(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    room = len(models["Q6_K"])
    settings = replace(settings, machine=lambda: machine_with(room))
    output = refusal("mini", settings)
    assert output.startswith("mini: no quantization fits this machine; the smallest, Q4_K_M, has 0.0 GiB")
    assert output.endswith("take a smaller model, or name it: edgeinfer pull mini:Q4_K_M")
    assert pull("mini:Q4_K_M", settings).name == "mini:Q4_K_M"


def test_an_interrupted_pull_resumes_its_quantization(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    partial = settings.models_folder / "me/mini-GGUF/mini-Q6_K.gguf.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(models["Q6_K"][: 1 << 17])
    settings, output = recording(settings)
    assert pull("mini", settings).name == "mini:Q6_K"
    assert output == ["Q6_K: 0 MiB of it are downloaded already"]
    assert hub.ranges()[-1] == str(1 << 17)


def test_a_missing_quantization_lists_the_available_ones(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    assert refusal("mini:Q2_K", settings) == "mini: there is no Q2_K; there are Q4_K_M, Q6_K, Q8_0"


def test_a_file_that_differs_from_the_registry_is_not_downloaded(
    hub: FakeHub, settings: Pull, models: dict[str, bytes], tmp_path: Path
) -> None:
    offer(hub, models)
    write_own(tmp_path, OWN.replace("parameters", f'sha256.Q4_K_M = "{"0" * 64}"\nparameters'))
    output = refusal("mini:Q4_K_M", settings)
    assert output.startswith(f"mini:Q4_K_M: the model registry has sha256 {'0' * 64}, the hub has ")
    assert output.endswith("edgeinfer pull hf:me/mini-GGUF/mini-Q4_K_M.gguf")
    write_own(tmp_path, OWN.replace("parameters", "size_bytes.Q4_K_M = 7\nparameters"))
    assert "the model registry has bytes 7, the hub has" in refusal("mini:Q4_K_M", settings)
    assert hub.fetched() == []


def test_the_registry_digest_verifies_a_file(
    hub: FakeHub, settings: Pull, models: dict[str, bytes], tmp_path: Path
) -> None:
    offer(hub, models)
    digest = hashlib.sha256(models["Q4_K_M"]).hexdigest()
    write_own(tmp_path, OWN.replace("parameters", f'sha256.Q4_K_M = "{digest}"\nparameters'))
    assert pull("mini:Q4_K_M", settings).files[0].digest_source == "models.toml"


@pytest.mark.parametrize("revision", ["", "@main"])
def test_a_repository_file_is_downloaded_with_the_token(
    revision: str, hub: FakeHub, settings: Pull, models: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    offer(hub, models)
    pulled = pull(f"hf:me/mini-GGUF{revision}/mini-Q8_0.gguf", settings)
    assert files_of(pulled, settings) == ["me/mini-GGUF/mini-Q8_0.gguf"]
    seen = [{name.lower(): value for name, value in headers.items()} for _, headers in hub.seen]
    assert [headers.get("authorization") for headers in seen] == ["Bearer hf_secret"] * len(seen)
    assert pulled.name == "mini-Q8_0"


def test_a_repository_is_accepted_with_and_without_a_quantization(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    assert pull("hf:me/mini-GGUF", settings).path.name == "mini-Q8_0.gguf"
    assert pull("hf:me/mini-GGUF:Q6_K", settings).path.name == "mini-Q6_K.gguf"


def test_hub_page_and_file_urls_are_parsed(hub: FakeHub, settings: Pull, models: dict[str, bytes]) -> None:
    offer(hub, models)
    assert pull(hub.url("/me/mini-GGUF"), settings).path.name == "mini-Q8_0.gguf"
    for kind in ("blob", "resolve"):
        pulled = pull(hub.url(f"/me/mini-GGUF/{kind}/main/mini-Q6_K.gguf?download=true"), settings)
        assert files_of(pulled, settings) == ["me/mini-GGUF/mini-Q6_K.gguf"]


def test_a_file_missing_from_the_repository_lists_the_available_ones(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    offer(hub, models)
    output = refusal("hf:me/mini-GGUF/mini-Q9.gguf", settings)
    assert output.startswith(
        "me/mini-GGUF: mini-Q9.gguf isn't there; there are mini-Q8_0.gguf, mini-Q6_K.gguf"
    )


def test_a_split_model_is_downloaded_completely(hub: FakeHub, settings: Pull, tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    for name, content in parts.items():
        hub.put("me/mini-GGUF", f"Q8_0/{name}", content)
    pulled = pull("mini", settings)
    assert files_of(pulled, settings) == [f"me/mini-GGUF/Q8_0/{name}" for name in parts]
    result = find_model("mini:Q8_0", models_folder=settings.models_folder)
    assert result.size_bytes == sum(map(len, parts.values()))
    pulled.files[1].path.unlink()
    again = pull("mini:Q8_0", settings)
    assert [file.existed for file in again.files] == [True, False]


def write_parts(folder: Path) -> dict[str, bytes]:
    """A model split into two files, as llama.cpp does it."""
    folder.mkdir()
    whole = RandomModel("llama", formats=("Q8_0",), width=64).write(folder / "whole.gguf")
    names = ["mini-Q8_0-00001-of-00002.gguf", "mini-Q8_0-00002-of-00002.gguf"]
    with GGUFFile.open(whole) as file:
        tensors = list(file.tensors)
        for number, (name, part) in enumerate(zip(names, (tensors[:5], tensors[5:]), strict=True)):
            with GGUFWriter(folder / name, file.metadata if number == 0 else {}) as writer:
                for key, value in (("no", np.uint16(number)), ("count", np.uint16(2))):
                    writer.add_metadata(f"split.{key}", value)
                writer.add_metadata("split.tensors.count", np.int32(len(tensors)))
                for tensor in part:
                    info = file.tensors[tensor]
                    writer.add_tensor(tensor, file.raw(tensor), info.format, info.shape)
    return {name: (folder / name).read_bytes() for name in names}


HUB_REFUSALS = {
    "no such repository": ((404, "RepoNotFound"), "the hub has no such repository, or it is private"),
    "gated": ((403, "GatedRepo"), "accept its licence at "),
    "no such revision": ((404, "RevisionNotFound"), "the hub has no such revision of it"),
    "broken": ((500, ""), "the hub returned status 500; try again later"),
    "busy": ((429, ""), "the hub returned status 429; try again later"),
}


@pytest.mark.parametrize(("refuse", "message"), HUB_REFUSALS.values(), ids=list(HUB_REFUSALS))
def test_a_hub_refusal_gives_a_one_line_error(
    refuse: tuple[int, str], message: str, hub: FakeHub, settings: Pull
) -> None:
    hub.refuse = refuse
    assert refusal("hf:no/such-GGUF@main/x.gguf", settings).startswith(f"no/such-GGUF: {message}")


def test_an_unreachable_hub_gives_a_one_line_error(settings: Pull) -> None:
    output = refusal("mini", replace(settings, endpoint="http://127.0.0.1:9"))
    assert output.startswith("me/mini-GGUF: the hub can't be reached: ")
    assert "[Errno" not in output
    assert output.endswith("; on this disk: tiny")


def test_offline_mode_gives_a_one_line_error(settings: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    output = refusal("mini", settings)
    assert output.startswith("me/mini-GGUF: the hub can't be reached: HF_HUB_OFFLINE is set; on this disk: ")


def test_a_repository_without_models_is_reported(hub: FakeHub, settings: Pull) -> None:
    hub.put("me/mini-GGUF", "model.safetensors", b"...")
    assert refusal("hf:me/mini-GGUF", settings).startswith("me/mini-GGUF: there is no .gguf file in it")


def test_a_full_disk_is_reported_before_downloading(
    hub: FakeHub, settings: Pull, models: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(hub, models)
    monkeypatch.setattr(transfer, "SPARE_BYTES", 1 << 60)
    assert "more than the download; free" in refusal("mini:Q8_0", settings)
    assert hub.fetched() == []


NONSENSE = {
    "tiny": "tiny: is built in or a local file",
    "mine": "mine: is built in or a local file (mine.gguf); nothing to download",
    "no-such-model": "no-such-model: not in the model registry; name one of `edgeinfer list --all`",
    "hf:me": "hf:me: wanted hf:owner/name/file.gguf",
    "hf:me/x:Q4/file.gguf": "hf:me/x:Q4/file.gguf: wanted hf:owner/name/file.gguf",
    "https://example.org/": "https://example.org/: wanted an address that ends in .gguf",
}


@pytest.mark.parametrize(("expected", "message"), NONSENSE.items(), ids=list(NONSENSE))
def test_an_invalid_pull_gives_a_one_line_error(expected: str, message: str, settings: Pull) -> None:
    assert refusal(expected, settings).startswith(message)


def test_a_draft_is_downloaded_only_by_its_name(
    hub: FakeHub, settings: Pull, models: dict[str, bytes]
) -> None:
    hub.put("me/mini-GGUF", "mini-Q4_K_M.gguf", models["Q4_K_M"])
    hub.put("me/mini-GGUF", "mtp-mini-Q8_0.gguf", models["Q8_0"])
    assert pull("hf:me/mini-GGUF", settings).path.name == "mini-Q4_K_M.gguf"
    assert "there is no Q8_0; there are Q4_K_M" in refusal("hf:me/mini-GGUF:Q8_0", settings)
    assert pull("hf:me/mini-GGUF/mtp-mini-Q8_0.gguf", settings).path.name == "mtp-mini-Q8_0.gguf"
