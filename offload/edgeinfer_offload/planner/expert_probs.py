"""Usage probability of each expert from an activity profile, if it predicts better than uniform usage."""

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.concentration import coverage
from edgeinfer_offload.runtime.activity_profile import ActivityProfile


def expert_chances(profile: ActivityProfile, sizes: ModelSizes) -> tuple[tuple[float, ...], ...] | None:
    """For each layer, the mean number of uses of each expert per token; () for a dense layer.

    The hottest experts of a layer are learned from one half of the text. If they don't beat random ones on
    the other half, the layer's probabilities are uniform. None: the profile has no data on these experts.
    """
    counted = profile.layers("experts")
    found: list[tuple[float, ...]] = []
    for index, layer in enumerate(sizes.layers):
        block = layer.routed
        if block is None:
            found.append(())
            continue
        counts, count, used = counted.get(index), block.units, block.units_per_token
        if counts is None or counts.shape[1] != count or not counts.sum():
            return None
        if coverage([counts], profile.tokens).beats_uniform:
            each = counts.sum(axis=0).astype(float)
            found.append(tuple(float(used * share) for share in each / each.sum()))
        else:
            found.append((used / count,) * count)
    return tuple(found) if any(found) else None
