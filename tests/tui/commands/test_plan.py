"""`edgeinfer plan`: a table as text, JSON, and a one-line error for what can't be planned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import edgeinfer as library
from edgeinfer.planning import model_plan
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_offload.machine import measure
from edgeinfer_offload.machine.measured_figures import MeasuredFigures
from edgeinfer_offload.report.plan_text import PlanLine
from tests.edgeinfer.model_config.test_file_sizes import write_moe
from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine

LAPTOP = "rtx 4060 laptop"


def test_equal_layers_share_a_line_of_the_table(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("plan", "tiny", "--device", LAPTOP)
    assert (outcome.code, outcome.err) == (0, "")
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[0].startswith("Fits. 10 of 10 layers on the GPU, 0.6 of 8 GiB, about ")
    assert lines[2] == "item on size ms FLOP/B bound by"
    assert lines[3].startswith("layers 0-9 attention gpu ")
    assert len(lines) < 25
    assert "the machine was described, not measured: expect these speeds to be off by a quarter" in lines
    assert max(map(len, outcome.out.splitlines()[:-1])) <= 80
    by_layer = edgeinfer("plan", "tiny", "--device", LAPTOP, "--layers").out
    assert sum(line.startswith("layer ") for line in by_layer.splitlines()) == 30


def test_verbose_prints_budgets_and_speeds_after_the_same_table(edgeinfer: CommandLine) -> None:
    short = edgeinfer("plan", "tiny", "--device", LAPTOP).out
    verbose = edgeinfer("plan", "tiny", "--device", LAPTOP, "--verbose").out
    assert verbose.startswith(short[: short.index("\n\nthe machine")])
    lines = verbose.splitlines()
    assert any(line.startswith("decode: ") for line in lines)
    assert "gpu: 651 MiB of 8.00 GiB that may be used" in lines
    assert not any(line.startswith(("decode: ", "gpu: ")) for line in short.splitlines())


def test_several_described_machines_have_a_row_each(edgeinfer: CommandLine) -> None:
    machines = [LAPTOP, "rtx 3090", "tiny: 1MiB, 9GB/s, 9MiB ram"]
    options = [part for machine in machines for part in ("--device", machine)]
    outcome = edgeinfer("plan", "tiny", *options)
    assert (outcome.code, outcome.err) == (0, "")
    rows = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert rows[0] == "machine fits memory tokens/s prompt/s"
    assert rows[1].startswith("rtx 4060 laptop on the GPU 0.6 of 8 GiB ")
    assert rows[3].startswith("tiny: 1MiB, 9GB/s, 9MiB ram no - - -")
    assert any(row.startswith("tiny: 1MiB, 9GB/s, 9MiB ram: tiny: the model needs ") for row in rows[4:])
    message = json.loads(edgeinfer("plan", "tiny", *options, "--json").out)
    alone = json.loads(edgeinfer("plan", "tiny", "--device", LAPTOP, "--json").out)
    assert message["machines"][0] == {"device": LAPTOP, **{k: v for k, v in alone.items() if k != "model"}}
    assert list(message["machines"][2]) == ["device", "error"]


@pytest.mark.slow
def test_the_kind_of_split_is_shown_with_its_reason(edgeinfer: CommandLine) -> None:
    on_two = ("plan", "--shape", "llama-3.1-8b", "--device", "2x h200")
    lines = edgeinfer(*on_two, "--split", "tensor", "--verbose").out.splitlines()
    assert "32 of 32 layers on 2 GPUs" in lines[0]
    assert any(line.startswith("50% of every layer on H200 (cuda:0), 50%") for line in lines)
    assert any(line.startswith("gpu1: ") for line in lines)
    refused = edgeinfer("plan", "--shape", "qwen3.5-4b", "--device", "2x h200", "--split", "tensor")
    assert "can't be divided among GPUs: gated delta net (layer 0); take --split layers" in refused.err


def test_several_devices_of_this_machine_are_refused(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("plan", "tiny", "--device", LAPTOP, "--device", "cpu")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("edgeinfer: --device: saw 'cpu' among several, wanted descriptions of ")


def test_a_model_that_is_not_here_is_planned_by_its_shape(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    outcome = edgeinfer("plan", "qwen3-8b", "--device", LAPTOP)
    assert outcome.code == 0
    assert outcome.err == ("edgeinfer: planned from its shape in Q4_K_M: the file is not on this disk yet\n")
    assert outcome.out.startswith("Fits. 36 of 36 layers on the GPU, 6.1 of 8 GiB, about ")
    shape = edgeinfer("plan", "--shape", "qwen3-8b", "--device", LAPTOP)
    assert (shape.out, shape.err) == (outcome.out, "")
    options = ("--type", "q8_0", "--device", LAPTOP, "--json")
    larger = json.loads(edgeinfer("plan", "--shape", "qwen3-8b", *options).out)
    assert larger["model"] == "qwen3-8b:Q8_0"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["tiny", "--shape", "qwen3-8b"], "saw the model 'tiny' and --shape qwen3-8b; drop one of them"),
        (["tiny", "--type", "Q8_0"], "--type: only with --shape; a model's type is in its name, as "),
    ],
)
def test_a_shape_instead_of_a_model(edgeinfer: CommandLine, options: list[str], text: str) -> None:
    outcome = edgeinfer("plan", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"edgeinfer: {text}")


def test_the_curve_begins_with_the_speed_of_the_plan(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("plan", "tiny", "--device", LAPTOP, "--curve")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Fits. 10 of 10 layers on the GPU, ")
    assert lines[2].split() == ["context", "cache", "memory", "fits", "tokens/s", "prompt/s"]
    assert max(map(len, lines)) <= 80
    message = json.loads(edgeinfer("plan", "tiny", "--device", LAPTOP, "--curve", "--json").out)
    planned = message["prediction"]["decode_tokens_per_second"]
    point = next(p for p in message["curve"]["points"] if (p["batch"], p["context"]) == (1, 1024))
    assert point["tokens_per_second"] == pytest.approx(planned)


def test_json_reports_every_item(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("plan", "tiny", "--device", "cpu: 32GiB ram, 64GB/s ram", "--json")
    message = json.loads(outcome.out)
    assert message["model"] == "tiny"
    assert all({"item", "device", "bytes", "ms_per_token"} <= item.keys() for item in message["items"])
    assert {item["device"] for item in message["items"]} == {"cpu"}
    assert message["prediction"]["decode_tokens_per_second"] > 0


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("repack", [True, False])
def test_the_plan_of_this_machine_equals_loading(edgeinfer: CommandLine, repack: bool) -> None:
    options = ["--device", "cpu", "--threads", "2", "--json", *([] if repack else ["--no-repack"])]
    message = json.loads(edgeinfer("plan", "tiny", *options).out)
    assert message["machine"]["origin"] == "measured"
    with library.load("tiny", device="cpu", threads=2, repack=repack) as model:
        assert model.plan is not None
        loaded = {(item.item, item.device): item.bytes for item in model.plan.items}
    assert ("draft head", "cpu") in loaded
    assert {(item["item"], item["device"]): item["bytes"] for item in message["items"]} == loaded


def test_the_draft_that_loading_uses_is_planned(edgeinfer: CommandLine) -> None:
    drafts = []
    for device, draft in (("cpu:", "auto"), ("cpu:", "none"), (LAPTOP, "auto"), (LAPTOP, "tiny")):
        outcome = edgeinfer("plan", "tiny", "--device", device, "--draft", draft, "--json")
        items = json.loads(outcome.out)["items"]
        drafts.append([item["device"] for item in items if item["item"].startswith("draft ")])
    assert drafts == [["cpu"], [], ["gpu"], ["gpu"]]
    assert outcome.err == ""


def test_a_draft_that_loading_omits_is_not_planned(edgeinfer: CommandLine) -> None:
    sizes = {}
    for ram in ("1GiB", "37MiB"):
        outcome = edgeinfer("plan", "tiny", "--device", "cpu", "-t", "2", "--ram", ram, "--json", "--verbose")
        message = json.loads(outcome.out)
        sizes[ram] = {item["item"]: item["bytes"] for item in message["items"]}
        assert ("using prompt lookup instead" in outcome.err) == (ram != "1GiB")
        assert ("draft head" in sizes[ram]) == (ram == "1GiB")
    with library.load("tiny", device="cpu", threads=2, ram="37MiB") as model:
        assert model.plan is not None
        assert {item.item: item.bytes for item in model.plan.items} == sizes["37MiB"]
    outcome = edgeinfer("plan", "tiny", "--device", "cpu", "--threads", "2", "--context", "100000000")
    assert "draft head" not in outcome.err
    assert outcome.err.endswith("; with a context of 1024 it fits (--context)\n")


def test_a_draft_of_another_vocabulary_is_omitted_as_in_loading(
    edgeinfer: CommandLine, tmp_path: Path
) -> None:
    path = ZOO["llama"].write(tmp_path / "zoo.gguf")
    message = (
        "using prompt lookup instead of the draft model: draft: zoo has 288 tokens, the model 8192; "
        "wanted the same vocabulary"
    )
    for device in ("cpu:", LAPTOP):
        outcome = edgeinfer("plan", "tiny", "--device", device, "--draft", str(path), "-v")
        assert outcome.code == 0
        assert message in outcome.err
        assert "draft model" not in outcome.out
    with library.load("tiny", device="cpu", threads=1, draft=path) as model:
        assert message in model.warnings


def test_a_machine_without_a_gpu_is_reported_with_verbose(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plan, "usable_gpus", lambda device: ())
    outcome = edgeinfer("plan", "tiny", "--threads", "2")
    assert (outcome.code, outcome.err) == (0, "")
    outcome = edgeinfer("plan", "tiny", "--threads", "2", "--verbose")
    assert (outcome.code, outcome.err) == (0, "edgeinfer: no NVIDIA GPU here\n")


def test_a_machine_can_be_measured_again(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measurements = MeasuredFigures(tmp_path, "one machine")
    of_drafts = MeasuredFigures(tmp_path, "one machine", "drafting.json")
    for figures in (measurements, of_drafts):
        figures.keep({"2 threads": 1.0})
    monkeypatch.setattr(measure, "stored_figures", lambda folder: measurements)
    monkeypatch.setattr(measure, "stored_draft_figures", lambda folder: of_drafts)
    assert edgeinfer("plan", "tiny", "--device", LAPTOP).code == 0
    assert measurements.known() == of_drafts.known() == {"2 threads": 1.0}
    assert edgeinfer("plan", "tiny", "--device", LAPTOP, "--measure").code == 0
    assert measurements.known() == of_drafts.known() == {}


def test_the_gpu_of_this_machine_is_measured_and_planned_for(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    gpu = Gpu(0, "NVIDIA GeForce RTX 4060", 89, 8 << 30)
    measured = []
    monkeypatch.setattr(model_plan, "usable_gpus", lambda wished: (gpu,))
    monkeypatch.setattr(model_plan, "measure_gpu", lambda gpu, cache, formats: measured.append(formats))
    monkeypatch.setattr("edgeinfer_kernels.cuda.device_parts.free_bytes", lambda index: 7 << 30)
    message = json.loads(edgeinfer("plan", "tiny", "--threads", "2", "--json").out)
    assert measured == [["Q4_K", "Q6_K"]]
    assert message["machine"]["gpus"][0]["free_bytes"] == 7 << 30
    assert message["budgets"]["vram"] == 7 << 30


def test_an_unsupported_moe_architecture_is_planned(edgeinfer: CommandLine, tmp_path: Path) -> None:
    path = write_moe(tmp_path / "mixture.gguf")
    outcome = edgeinfer("plan", str(path), "--device", LAPTOP)
    assert outcome.code == 0
    assert outcome.err.startswith("edgeinfer: needs --engine llama.cpp: architecture mixture isn't")
    assert "layers 0-1 experts" in outcome.out
    assert "layers 0-1 router" in outcome.out


def test_budgets_bound_the_plan(edgeinfer: CommandLine, tmp_path: Path) -> None:
    path = replace(ZOO["llama"], width=256, feed_forward=2048, layers=6, formats=("Q4_K",)).write(
        tmp_path / "model.gguf"
    )
    nothing = edgeinfer("plan", str(path), "--device", LAPTOP, "--vram", "0", "--verbose")
    assert "nothing is on the GPU: its buffers and libraries alone take " in nothing.out
    outcome = edgeinfer("plan", str(path), "--device", LAPTOP, "--ram", "0", "--vram", "0")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("edgeinfer: model: the model needs ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "rtx 9060"], "--device: 'rtx 9060': no such card in the table; known are RTX "),
        (
            ["--device", "x: 8GiB, 12 bananas"],
            "--device: '12 bananas' in 'x: 8GiB, 12 bananas': wanted a known",
        ),
        (["--threads", "10000"], "--threads: saw 10000, wanted "),
        (["--draft", ""], "--draft: saw '', wanted 'auto', 'mtp', 'lookup', 'self', a model, a Drafter"),
        (["--draft", "nosuch"], "draft: nosuch: no such model; known: "),
        (["--device", ""], "--device: '': wanted a known card, or terms as"),
        (["--vram", "much"], "--vram: saw 'much', wanted bytes or a size like \"8GiB\""),
    ],
)
def test_an_invalid_plan_gives_a_one_line_error(
    edgeinfer: CommandLine, options: list[str], text: str
) -> None:
    outcome = edgeinfer("plan", "tiny", *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"edgeinfer: {text}")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--context", "--threads"])
def test_a_number_below_its_minimum_is_a_usage_error(edgeinfer: CommandLine, option: str) -> None:
    outcome = edgeinfer("plan", "tiny", option, "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"edgeinfer: {option}: saw 0, wanted a whole number of at least 1")


def test_a_draft_without_a_time_has_no_empty_cell() -> None:
    line = PlanLine("draft model", "cpu", 5 << 20, 0.0, "", overlapped=True)
    assert line.cells() == ("draft model", "cpu", "5.0 MiB", "-", "-", "drafting")
    line = PlanLine("draft model", "cpu", 5 << 20, 1.5, "memory", overlapped=True, intensity=3.5)
    assert line.cells() == ("draft model", "cpu", "5.0 MiB", "1.500", "3.5", "drafting")


def test_a_curve_of_several_machines_is_refused(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("plan", "tiny", "--device", "rtx 4090", "--device", "rtx 3090", "--curve")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("edgeinfer: --curve is for one machine; drop it, or all but one --device")


@pytest.mark.slow
def test_several_cards_hold_a_model_together(edgeinfer: CommandLine) -> None:
    shape = ("plan", "--shape", "llama-3-8b", "--type", "Q8_0", "--context", "4096", "--split", "layers")
    outcome = edgeinfer(*shape, "--device", "2x rtx 4060 laptop", "--verbose")
    assert outcome.code == 0
    assert outcome.out.startswith("Fits. 32 of 32 layers on 2 GPUs")
    assert "gpu1: " in outcome.out
    assert "no GPU alone holds the model; a token takes the sum of their times" in outcome.out
    fields = json.loads(edgeinfer(*shape, "--device", "2x rtx 4060 laptop", "--json").out)
    assert {item["device"] for item in fields["items"]} >= {"gpu", "gpu1", "link"}
    assert edgeinfer(*shape, "--device", "2x rtx 3090").out.startswith("Fits. 32 of 32 layers on the GPU")


@pytest.mark.slow
def test_budgets_of_several_described_cards_are_theirs(edgeinfer: CommandLine) -> None:
    shape = ("plan", "--shape", "llama-3-8b", "--type", "Q8_0", "--context", "4096", "--json")
    fields = json.loads(edgeinfer(*shape, "--device", "2x rtx 3090", "--vram", "8GiB,4GiB").out)
    assert fields["bytes"]["gpu"] > fields["bytes"]["gpu1"] > 0
    outcome = edgeinfer(*shape, "--device", "2x rtx 3090", "--vram", "2GiB,2GiB")
    fields = json.loads(outcome.out)
    assert fields["verdict"]["placement"] == "split"
    assert min(fields["bytes"][device] for device in ("gpu", "gpu1", "cpu")) > 1 << 30
    outcome = edgeinfer(*shape, "--device", "2x rtx 3090", "--kv", "f32")
    assert outcome.err.startswith("edgeinfer: planned for one GPU: ")
