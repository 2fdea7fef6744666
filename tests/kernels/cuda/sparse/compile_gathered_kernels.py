"""Compiles the kernels of steps that read active neurons only, for a GPU that needn't be there, and prints
their resources.
"""

import sys
from dataclasses import replace

from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.cuda.backend import DEPENDENT_LAUNCH_FROM
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.sparse.gathered import launch_sum
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.decoder import DecoderSpec
from harness.empty_decoders import empty_decoder

NEW = (
    *("sparse_gated_kernel", "list_active_kernel", "gathered_down_kernel"),
    *("add_parts_kernel", "sum_parts_kernel"),
)
STEPS = (("Q4_0", 1), ("Q8_0", 1), ("Q4_K", 1), ("Q4_0", 4), ("Q4_K", 8))


def with_relu(spec: DecoderSpec) -> DecoderSpec:
    """The same decoder with a ReLU in its feed-forwards."""
    layers = []
    for layer in spec.layers:
        blocks = [
            replace(each, block=replace(each.block, activation="relu"))
            if isinstance(each.block, FeedForwardSpec)
            else each
            for each in layer.blocks
        ]
        layers.append(replace(layer, blocks=tuple(blocks)))
    return replace(spec, layers=tuple(layers))


def main() -> None:
    capability = int(sys.argv[1])
    shape = Shape("relu-7b", 1, 4096, 11264, 32, 32, 32000, 4096)
    for kind, tokens in STEPS:
        spec, weights = empty_decoder(shape, kind)
        spec, arena = with_relu(spec), Arena()
        model = DeviceModel(spec, weights, arena, 64, gathered=(0,))
        dependent = capability >= DEPENDENT_LAUNCH_FROM
        space = Workspace(model, arena)
        launches = StepLaunches(model, space, usual_tuning(capability), dependent=dependent)
        assert space.gathered is not None
        with recorded_launches() as recorded:
            DecodeStep(launches).launch(tokens)
            launch_sum(launches, space.gathered, 22, space.y, None, tokens)
        for launch in recorded:
            if launch.name in NEW:
                print(launch.name, kind, tokens, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
