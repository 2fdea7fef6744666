"""Decoders whose layers with a window have ring caches of a given size."""

from dataclasses import replace

from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec


def with_rings(spec: DecoderSpec, ring: int) -> DecoderSpec:
    """The same decoder with rings of `ring` positions; 0: with caches of all positions."""

    def changed(layer: LayerSpec) -> LayerSpec:
        blocks = (
            replace(each, block=replace(each.block, ring=ring)) if getattr(each.block, "window", 0) else each
            for each in layer.blocks
        )
        return LayerSpec(tuple(blocks))

    return replace(spec, layers=tuple(changed(layer) for layer in spec.layers))
