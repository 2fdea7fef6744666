"""Runs a module that compiles kernels, for an AMD GPU: `compile_for_amd.py GPU MODULE ARG…`.

torch then looks like its HIP build with such a GPU, so that kernels take their twins of PTX.
"""

import runpy
import sys
from types import SimpleNamespace

import torch

torch.version.hip = "none: kernels are only compiled"
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda index: SimpleNamespace(gcnArchName=sys.argv[1])

from edgeinfer_kernels.cuda.tuning import targets  # noqa: E402


def main() -> None:
    _, architecture, module, *arguments = sys.argv

    def compile_launch(launch: targets.Launch, capability: int) -> targets.Resources:
        return targets.compile_for_amd(launch, architecture)

    targets.compile_launch = compile_launch
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
