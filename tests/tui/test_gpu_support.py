"""The line of `doctor` about GPUs: what is missing on each system, and how to get it."""

from pathlib import Path

import pytest

from edgeinfer_tui.system.gpu_support import GpuSupport, found_gpu_support, gpu_advice, torch_builds

NVIDIA = GpuSupport(system="linux", nvidia_driver=True)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (GpuSupport(system="linux"), "no GPU driver"),
        (NVIDIA, "PyTorch is missing: pip install 'edgeinfer[cuda]'"),
        (
            GpuSupport("linux", True, torch="2.13.0+cpu"),
            "torch 2.13.0+cpu is not built for CUDA: pip install",
        ),
        (GpuSupport("win32", True, torch="2.13.0"), "pytorch.org/get-started has the command for Windows"),
        (GpuSupport("win32", True, torch="2.13.0", cuda="12.8"), "pip install triton-windows"),
        (GpuSupport("linux", True, torch="2.13.0", cuda="12.8"), "pip install triton"),
        (
            GpuSupport("linux", True, torch="2.13.0", cuda="12.8", triton="3.6.0"),
            "ready: torch 2.13.0 for CUDA",
        ),
        (GpuSupport("linux", amd_driver=True, torch="2.13.0", cuda="12.8"), "is not built for ROCm"),
        (GpuSupport("linux", amd_driver=True, torch="2.13.0", hip="7.0", triton="3.6.0"), "experimental"),
        (GpuSupport("darwin", torch="2.13.0"), "--engine llama.cpp takes its Metal build"),
    ],
)
def test_one_line_says_what_is_missing(found: GpuSupport, wanted: str) -> None:
    line = gpu_advice(found)
    assert wanted in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", {"cuda": "12.8"}),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n", {"hip": "7.0.51831"}),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", {}),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    tmp_path: Path, text: str, wanted: dict[str, str]
) -> None:
    (tmp_path / "version.py").write_text(text)
    assert torch_builds(tmp_path) == wanted
    assert torch_builds(tmp_path / "nowhere") == torch_builds(None) == {}


def test_this_machine_has_a_line() -> None:
    assert gpu_advice(found_gpu_support(lambda name: None))
