"""The hot experts of a model, from its activity profile (`edgeinfer profile`)."""

from pathlib import Path

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.expert_probs import expert_chances
from edgeinfer_offload.runtime.activity_profile import ProfileError, find_profile


def known_routing(
    path: Path, sizes: ModelSizes
) -> tuple[tuple[tuple[float, ...], ...] | None, tuple[str, ...]]:
    """The usage probability of each expert, None if unknown; and warnings on an unusable profile.

    Raises OSError: the model or its profile can't be read.
    """
    if not any(layer.routed for layer in sizes.layers):
        return None, ()
    try:
        profile = find_profile(path, user_folder("data"))
    except ProfileError as error:
        return None, (f"experts are taken to be used alike: {error}",)
    return (expert_chances(profile, sizes) if profile else None), ()
