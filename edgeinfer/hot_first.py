"""Order of a model's neurons by activity, hottest first, and the activity profile in the new order."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeinfer.errors import SettingError
from edgeinfer.user_folders import user_folder
from edgeinfer_offload.runtime.activity_profile import (
    ActivityProfile,
    ProfileError,
    find_profile,
    model_hash,
    save_profile,
)
from edgeinfer_quant_formats import FormatError, GGUFFile
from edgeinfer_quant_formats.quantizer.neuron_order import Order, hottest_first, neurons_per_block


@dataclass(frozen=True)
class HotFirst:
    """Layer -> order of its neurons; the profile used; a line that says which rows move together."""

    orders: Mapping[int, Order] = field(default_factory=dict)
    profile: ActivityProfile | None = None
    note: str = ""


def hot_first_orders(file: GGUFFile) -> HotFirst:
    """Return the order of the neurons by the model's profile.

    Raises:
        SettingError: the model has no profile, or one that doesn't match it.
    """
    try:
        profile = find_profile(file.path, user_folder("data"))
    except ProfileError as error:
        raise SettingError(str(error)) from error
    if profile is None or not profile.layers("neurons"):
        raise SettingError(f"{file.path}: it has no activity profile; create one with edgeinfer profile")
    orders, together = {}, set()
    for layer, counts in profile.layers("neurons").items():
        try:
            block = neurons_per_block(file, layer)
        except FormatError as error:
            raise SettingError(str(error)) from error
        neurons = file.tensors[f"blk.{layer}.ffn_down.weight"].shape[-1]
        if counts.shape[1] != neurons:
            raise SettingError(
                f"{file.path}: profile of {counts.shape[1]} neurons for layer {layer}, wanted {neurons}; "
                "create it again with edgeinfer profile"
            )
        orders[layer] = hottest_first(counts.sum(axis=0), block)
        together.add(block)
    return HotFirst(orders, profile, _note(len(orders), together))


def _note(layers: int, together: set[int]) -> str:
    if together == {1}:
        return f"hot first: the neurons of {layers} layers by falling counts"
    blocks = " or ".join(map(str, sorted(together)))
    return (
        f"hot first: the neurons of {layers} layers in whole blocks of {blocks}, as ffn_down is quantized "
        "already; from F16 or F32 each moves by itself"
    )


def save_reordered(profile: ActivityProfile, orders: Mapping[int, Order], target: Path) -> Path:
    """Save the profile in the model's new order, for the file `target`."""
    counts = dict(profile.counts)
    arrays = dict(profile.arrays)
    for layer, order in orders.items():
        counts[f"neurons.{layer}"] = counts[f"neurons.{layer}"][:, order]
        for part in ("second", "bias"):
            name = f"predictor.{layer}.{part}"
            if name in arrays and len(arrays[name]) == len(order):
                arrays[name] = arrays[name][order]
    moved = replace(profile, model_hash=model_hash(target), counts=counts, arrays=arrays)
    return save_profile(moved, target, user_folder("data"))
