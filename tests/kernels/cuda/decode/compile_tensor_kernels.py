"""Compiles the kernels of products on tensor cores for an absent GPU, and prints their resources."""

import sys

from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from tests.kernels.cuda.decode.compile_lora_kernels import launch_step

KINDS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "NVFP4")
"""Different kinds of codes and of scales."""


def main() -> None:
    capability = int(sys.argv[1])
    for kind in KINDS:
        with recorded_launches() as launches:
            launch_step(kind, 0, 16, capability)
        for launch in {launch.key: launch for launch in launches}.values():
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
