"""Compiles the kernels that keep a tree's path, for a GPU that needn't be there; prints their resources."""

import sys

from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks import latent_attention
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.trees.path_steps import PathSteps
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES
from harness.empty_decoders import empty_decoder
from tests.kernels.cuda.compile_latent_kernels import DEEPSEEK

POSITIONS, HEAD_DIM = 4096, 128
KINDS: tuple[CacheType, ...] = ("f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0")


def launch_all(kind: CacheType, capability: int, *, dependent: bool) -> None:
    """The path of a model with heads of 128 that keeps states, and of one with latent attention."""
    shape = Shape("small", 1, 8 * HEAD_DIM, 256, 8, 2, 1000, POSITIONS, head_dim=HEAD_DIM)
    spec, weights = empty_decoder(shape, "Q8_0")
    arena = Arena()
    model = DeviceModel(spec, weights, arena, POSITIONS, kv=kind)
    space = Workspace(model, arena, KEPT_STATES)
    paths = PathSteps(StepLaunches(model, space, usual_tuning(capability), dependent=dependent))
    paths.launch()
    paths.move(latent_attention.take_state(Arena(), DEEPSEEK, POSITIONS, kind))


def main() -> None:
    capability = int(sys.argv[1])
    for kind in KINDS:
        with recorded_launches() as launches:
            launch_all(kind, capability, dependent=capability >= 90)
        for launch in launches:
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
