"""`edgeinfer pull` and `edgeinfer rm`, and `run` of a model that isn't downloaded."""

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer_tui.commands import run_command
from edgeinfer_tui.output.transfer_progress import TransferProgress
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.fake_hub import FakeHub
from tests.edgeinfer.download.hostile_server import HostileServer
from tests.random_models import RandomModel
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import FakeModel
from tests.tui.terminal import ROOT, Terminal, environment

COMMAND = (sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of a new user, on a machine without other programs."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "data" / "edgeinfer" / "models"


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return RandomModel("llama", formats=("Q8_0",)).write(tmp_path / "small.gguf").read_bytes()


@pytest.fixture
def server(model: bytes) -> Iterator[HostileServer]:
    with HostileServer(model) as running:
        yield running


@pytest.fixture
def hub(model: bytes) -> Iterator[FakeHub]:
    with FakeHub() as running:
        for quant in ("Q8_0", "Q4_K_M"):
            running.put("Qwen/Qwen3-4B-GGUF", f"Qwen3-4B-{quant}.gguf", model)
        yield running


def put(models: Path, name: str, content: bytes = b"GGUF") -> Path:
    (models / name).parent.mkdir(parents=True, exist_ok=True)
    (models / name).write_bytes(content)
    return models / name


def test_pull_prints_the_path_to_stdout_and_the_rest_to_stderr(
    edgeinfer: CommandLine, server: HostileServer, models: Path
) -> None:
    outcome = edgeinfer("pull", server.url("/small.gguf"))
    path = models / "127.0.0.1" / "small.gguf"
    assert (outcome.code, outcome.out) == (0, f"{path}\n")
    lines = outcome.err.splitlines()
    assert lines[-2].startswith("edgeinfer: small is here: ")
    assert lines[-2].endswith("run it with: edgeinfer run small")
    assert "small.gguf: not verified, because no expected sha256 is known; it is " in lines[-1]
    again = edgeinfer("pull", server.url("/small.gguf"))
    assert (again.out, again.err.count("is here already")) == (f"{path}\n", 1)


def test_a_failed_pull_gives_a_one_line_error(
    edgeinfer: CommandLine, server: HostileServer, models: Path
) -> None:
    server.default = does.status(404)
    outcome = edgeinfer("pull", server.url("/small.gguf"))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"edgeinfer: {server.url('/small.gguf')}: 404 Not Found; no such file\n"


def in_subprocess(hub: FakeHub, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    variables = {**environment(home), "HF_ENDPOINT": hub.url("").rstrip("/"), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [*COMMAND, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_registry_model_is_pulled_from_the_hub_of_the_environment(
    hub: FakeHub, models: Path, tmp_path: Path
) -> None:
    done = in_subprocess(hub, tmp_path, "pull", "qwen3-4b")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parts[-3:] == ("Qwen", "Qwen3-4B-GGUF", "Qwen3-4B-Q8_0.gguf")
    assert "edgeinfer: Q8_0: the best of Q8_0, Q4_K_M that fits and is fast: " in done.stderr
    assert "edgeinfer: Qwen3-4B-Q8_0.gguf: sha256 as the hub says" in done.stderr
    assert done.stderr.endswith("which may make it faster: edgeinfer pull qwen3-0.6b\n")
    assert in_subprocess(hub, tmp_path, "rm", "qwen3-4b:Q8_0").returncode == 0
    assert not path.parent.parent.exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_partial_download_and_names_the_resume_command(
    server: HostileServer, models: Path, tmp_path: Path, opened: list[Terminal]
) -> None:
    server.script = [does.stall(100_000)]
    url = server.url("/small.gguf")
    terminal = Terminal(tmp_path, "pull", url, command=COMMAND)
    opened.append(terminal)
    terminal.wait_for("0 B/144.4 KiB (0%)")
    for _ in range(500):
        if any(path.stat().st_size == 100_000 for path in tmp_path.rglob("small.gguf.partial")):
            break
        select.select([], [], [], 0.01)
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.exit_code() == 130
    assert f"stopped; partial data is kept, continue with: edgeinfer pull {url}" in terminal.seen
    partial = list(tmp_path.rglob("small.gguf.partial"))
    assert [path.stat().st_size for path in partial] == [100_000]


def test_run_of_a_missing_model_names_the_pull_command(
    edgeinfer: CommandLine, fake: FakeModel, models: Path
) -> None:
    outcome = edgeinfer("run", "qwen3-8b", "Hi")
    assert (outcome.code, outcome.out) == (1, "")
    assert (
        outcome.err == "edgeinfer: qwen3-8b: not on this disk yet; fetch it with: edgeinfer pull qwen3-8b\n"
    )


def test_run_with_yes_pulls_without_a_question(
    edgeinfer: CommandLine, fake: FakeModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[tuple[str, str]] = []
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(run_command, "pull_model", lambda *given: pulled.append(given))
    outcome = edgeinfer("run", "qwen3-8b", "Hi", "--yes")
    assert outcome.code == 0
    assert pulled == [("qwen3-8b", "edgeinfer")]


@pytest.mark.slow
def test_run_on_a_terminal_offers_to_pull(tmp_path: Path, models: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "run", "qwen3-8b", "Hi")
    opened.append(terminal)
    terminal.wait_for("qwen3-8b isn't on this disk yet. Pull it now? [Y/n]")
    terminal.type("n\n")
    assert terminal.exit_code() == 1
    assert "fetch it with: edgeinfer pull qwen3-8b" in terminal.seen


def test_rm_frees_the_reported_bytes_and_resolves_all_names_first(
    edgeinfer: CommandLine, models: Path
) -> None:
    own = put(models, "deep/own.gguf")
    partial = put(models, "deep/own.gguf.partial", b"GG")
    assert edgeinfer("rm", "own", "no-such").code == 1
    assert own.exists()
    dry = edgeinfer("rm", "own", "--dry-run")
    assert dry.err == "edgeinfer: own: would free 6 B\n"
    assert own.exists()
    outcome = edgeinfer("rm", "own")
    assert (outcome.code, outcome.err) == (0, "edgeinfer: own: removed, freed 6 B\n")
    assert outcome.out.split() == [str(own), str(partial)]
    assert not own.parent.exists()
    assert models.exists()


def test_rm_lists_other_uses_of_the_file(edgeinfer: CommandLine, models: Path) -> None:
    draft = put(models, "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf")
    put(models, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf")
    os.link(draft, models / "backup")
    outcome = edgeinfer("rm", "qwen3-0.6b")
    assert "edgeinfer: qwen3-0.6b: qwen3-8b:Q4_K_M (it drafts for it) uses the same file" in outcome.err
    assert "edgeinfer: qwen3-0.6b: a hard link keeps its bytes on the disk" in outcome.err
    assert "removed, freed 0 B" in outcome.err


def test_rm_deletes_a_partial_download(edgeinfer: CommandLine, models: Path) -> None:
    put(models, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf.partial", b"GGUF" * 10)
    put(models, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf.partial.json", b"{}")
    assert edgeinfer("rm", "qwen3-8b").err == "edgeinfer: qwen3-8b: removed, freed 42 B\n"
    assert list(models.iterdir()) == []
    assert "there is nothing to remove" in edgeinfer("rm", "qwen3-8b").err


def test_rm_keeps_files_of_other_programs(edgeinfer: CommandLine, models: Path, tmp_path: Path) -> None:
    own = put(tmp_path / "elsewhere", "mine.gguf")
    assert "built in; it is removed with edgeinfer itself" in edgeinfer("rm", "tiny").err
    assert f"{own}: a file outside {models}" in edgeinfer("rm", str(own)).err
    ollama = tmp_path / ".ollama" / "models"
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}]
    put(ollama, "blobs/sha256-ab")
    for tag in ("1b", "latest"):
        put(
            ollama,
            f"manifests/registry.ollama.ai/library/small/{tag}",
            json.dumps({"layers": layers}).encode(),
        )
    generated = edgeinfer("rm", "ollama/small:1b").err
    assert "belongs to Ollama; remove it with ollama rm; ollama/small:latest shares its file" in generated


def test_show_of_a_missing_model_shows_its_registry_entry(edgeinfer: CommandLine, models: Path) -> None:
    outcome = edgeinfer("show", "qwen3-8b")
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "from hf:Qwen/Qwen3-8B-GGUF" in lines
    assert any(line.startswith("Q4_K_M Qwen3-8B-Q4_K_M.gguf, 4.7 GiB, sha256 d98cdcbd") for line in lines)
    assert (
        outcome.err == "edgeinfer: qwen3-8b: not on this disk yet; fetch it with: edgeinfer pull qwen3-8b\n"
    )
    shown = json.loads(edgeinfer("show", "qwen3-8b", "--json").out)
    assert (shown["draft"], shown["here"], len(shown["files"])) == ("qwen3-0.6b", False, 4)


def test_show_reports_the_sampling_parameters_of_a_model(edgeinfer: CommandLine, models: Path) -> None:
    lines = [" ".join(line.split()) for line in edgeinfer("show", "qwen3.5-4b").out.splitlines()]
    wanted = "temperature 1.0, top_p 0.95, top_k 20, min_p 0.0, presence_penalty 1.5"
    assert f"sampling {wanted}" in lines
    assert json.loads(edgeinfer("show", "qwen3.5-4b", "--json").out)["sampling"]["top_k"] == 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_reports_the_current_rate_and_the_time_left() -> None:
    clock, stream = Clock(), FakeTerminal()
    progress = TransferProgress(stream, clock)
    progress.update(100 << 20, 1000 << 20)  # from an earlier run: no rate yet
    assert stream.getvalue().endswith("100.0 MiB/1.0 GiB (10%)")
    for second in range(1, 21):
        clock.now = second
        progress.update((100 + 10 * second) << 20, 1000 << 20)
    assert stream.getvalue().endswith("300.0 MiB/1.0 GiB (30%), 10.0 MiB/s, 70 s left")
    progress.erase()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_without_a_terminal_is_a_line_for_each_tenth() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = TransferProgress(stream, clock)
    for step in range(101):
        clock.now = step
        progress.update(step * 1024, 100 * 1024)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[5] == "50.0 KiB/100.0 KiB (50%), 1.0 KiB/s, 50 s left"
    assert lines[-1] == "100.0 KiB/100.0 KiB (100%), 1.0 KiB/s"


def test_progress_of_an_unknown_length_reports_the_received_bytes() -> None:
    stream = FakeTerminal()
    TransferProgress(stream, Clock()).update(5000, None)
    assert stream.getvalue().endswith("4.9 KiB")
