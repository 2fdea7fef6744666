"""How often each expert is used, from a profile of the model, where that tells more than taking all alike."""

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.concentration import coverage
from edgeinfer_offload.runtime.activity_profile import ActivityProfile


def expert_chances(profile: ActivityProfile, sizes: ModelSizes) -> tuple[tuple[float, ...], ...] | None:
    """For each layer, how many times a token uses each of its experts on average; () for a dense layer.

    A layer whose hottest experts, learnt from one half of the text, don't beat any others on the other half
    has all alike. None: the profile doesn't tell of this model's experts.
    """
    counted = profile.layers("experts")
    found: list[tuple[float, ...]] = []
    for index, layer in enumerate(sizes.layers):
        if layer.experts is None:
            found.append(())
            continue
        counts, count, used = counted.get(index), layer.experts.count, layer.experts.used
        if counts is None or counts.shape[1] != count or not counts.sum():
            return None
        if coverage([counts], profile.tokens).beats_uniform:
            each = counts.sum(axis=0).astype(float)
            found.append(tuple(float(used * share) for share in each / each.sum()))
        else:
            found.append((used / count,) * count)
    return tuple(found) if any(found) else None
