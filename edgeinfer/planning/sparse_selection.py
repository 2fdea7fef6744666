"""Selects the layers whose feed-forward or experts read only active neurons, by option, support and gain."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan, nan

import numpy as np

from edgeinfer.errors import Detail, SettingError
from edgeinfer.loading.model_source import ModelSource
from edgeinfer.profiling.file_predictors import file_predictor
from edgeinfer.profiling.predictor_training import TrainedPredictor, read_predictor
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.cpu.disk.bundle_layout import BundleLayout
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles, window_bytes
from edgeinfer_kernels.cpu.layout.packed_matrix import interleaved_bytes
from edgeinfer_kernels.cpu.sparse import (
    SparseLayers,
    by_neuron,
    dense_layer,
    experts_of,
    factor_bytes,
    neuron_bytes,
    predictor_bytes,
    scattered_bytes,
    sparse_block,
    sparse_index,
    sparse_unit,
    sparse_workspace_bytes,
    why_dense,
    why_unbundled,
)
from edgeinfer_kernels.sizes.gathered_neurons import why_not_gathered
from edgeinfer_kernels.system.direct_files import can_read_directly
from edgeinfer_offload.machine.cost_constants import SCATTERED_SLOWDOWN
from edgeinfer_offload.planner.sparse_types import BundledLayer, BundledOptions, SparseLayer, SparseOptions
from edgeinfer_offload.runtime.activity_profile import ActivityProfile, ProfileError, find_profile
from edgeinfer_offload.runtime.bundle_file import BundleFile, BundleFileError, find_bundles

UNKNOWN_SHARE = 0.25
"""Assumed share of active neurons without a profile."""
MAX_COST_RATIO = 0.9
COVER_PARTS = 64
"""Points of the curve that says how active the hottest neurons are."""


@dataclass(frozen=True)
class DiskSelection:
    """The sparse layers whose neurons are in a bundle file, for a model that main memory can't hold."""

    layers: SparseLayers
    options: BundledOptions
    file: BundleFile


@dataclass(frozen=True)
class SparseSelection:
    """The sparse layers, their bytes in memory and read per token, and a message with the reason. `on_disk`:
    the same if memory is too small, None: there are no bundles.
    """

    layers: SparseLayers = field(default_factory=dict)
    options: SparseOptions | None = None
    note: str | None = None
    on_disk: DiskSelection | None = None
    bundle_error: str = ""
    """Why the model's bundle file can't be used."""

    def window_note(self, slots: int) -> Detail:
        """A sentence on what is read from the bundle file."""
        assert self.on_disk is not None
        neurons = self.on_disk.options.max_slots
        return Detail(
            f"main memory is too small: active neurons are read from {self.on_disk.file.path.name}, and "
            f"{min(slots, neurons)} of {neurons} neurons of each layer are held in memory"
        )

    def planned(self, options: SparseOptions | None) -> tuple[SparseLayers, Bundles | None]:
        """The sparse layers of a plan with these options, and the bundles from which it reads them."""
        if options is None:
            return {}, None
        if not options.window_slots:
            return self.layers, None
        assert self.on_disk is not None
        return self.on_disk.layers, self.on_disk.file.window(options.window_slots)


def select_sparse_layers(source: ModelSource) -> SparseSelection:
    """Select by the option `sparse`: "off"; "exact" and "predicted", in all supported layers; "auto", exact,
    if the model's profile predicts a gain.

    Raises:
        SettingError: "exact" or "predicted" if no layer can be sparse, or if there is no predictor.
    """
    requested = source.options.sparse
    if source.options.lora and requested in ("exact", "predicted"):
        raise SettingError(f"sparse: {requested!r} and lora exclude each other; leave one out")
    if source.options.lora:
        return SparseSelection()
    if requested == "off" or (requested == "auto" and not source.options.repack):
        return SparseSelection()
    if not source.options.repack:
        raise SettingError(f"sparse: {requested!r} needs repacked weights; leave it out, or repack=False")
    reasons = {
        layer: why_dense(source.specification, source.weights, layer)
        for layer in range(len(source.specification.layers))
    }
    able = [index for index, reason in reasons.items() if reason is None]
    if not able:
        if requested == "auto":
            return SparseSelection()
        raise SettingError(f"sparse: saw {requested!r}, but no layer of {source.name} can be: {reasons[0]}")
    try:
        profile = find_profile(source.file.path, user_folder("data"))
    except ProfileError as error:
        if requested == "predicted":
            raise SettingError(f"sparse: {error}") from error
        if requested == "auto":
            return SparseSelection(note=f"the feed-forward is dense: {error}")
        profile = None
    predictors = _predictors(source, able, profile) if requested == "predicted" else dict.fromkeys(able)
    if requested != "auto":
        selection = _selection(source, predictors, profile)
    else:
        selection = _where_profitable(source, able, profile) if profile else SparseSelection()
    return _with_disk(source, selection, predictors, profile)


def _with_disk(
    source: ModelSource,
    selection: SparseSelection,
    predictors: Mapping[int, TrainedPredictor | None],
    profile: ActivityProfile | None,
) -> SparseSelection:
    """The selection with the layers of the model's bundle file, if it has one."""
    feed_forwards = {
        layer: dense_layer(source.weights, layer)
        for layer in predictors
        if why_unbundled(source.specification, source.weights, layer) is None
    }
    if not feed_forwards or not can_read_directly():
        return selection
    try:
        file = find_bundles(source.file.path, feed_forwards)
    except BundleFileError as error:
        return replace(selection, bundle_error=str(error))
    if file is None:
        return selection
    layers = {layer: _bundled(source, predictors[layer], profile, layer) for layer in feed_forwards}
    own = {layer: trained.predictor if (trained := predictors[layer]) else None for layer in feed_forwards}
    shared, per_thread = sparse_workspace_bytes(source.specification.hidden_size, source.weights, own)
    return replace(selection, on_disk=DiskSelection(own, BundledOptions(layers, shared, per_thread), file))


def _bundled(
    source: ModelSource, trained: TrainedPredictor | None, profile: ActivityProfile | None, layer: int
) -> BundledLayer:
    weights, active = dense_layer(source.weights, layer), _share(source, profile, layer)
    is_predicted, layout = trained is not None, BundleLayout.of(weights)
    none, one = (window_bytes(layout, slots, predicted=is_predicted) for slots in (0, 1))
    return BundledLayer(
        sparse=_sizes(weights, trained, active, ()),
        resident=first_bytes(weights, predicted=is_predicted) + none,
        slot_bytes=one - none,
        read_bytes=layout.read_bytes(predicted=is_predicted),
        neurons=layout.neurons,
        named=trained.named if trained else active,
        cover=_cover(profile, layer),
    )


def _cover(profile: ActivityProfile | None, layer: int) -> tuple[float, ...]:
    """The value of `BundledLayer.cover`."""
    counts = profile.counts.get(f"neurons.{layer}") if profile else None
    if counts is None or not counts.any():
        return ()
    hottest = np.sort(counts.sum(0, dtype=np.int64))[::-1].cumsum() / counts.sum()
    parts = np.linspace(0, len(hottest), COVER_PARTS + 1).astype(np.int64)
    return (0.0, *hottest[parts[1:] - 1].tolist())


def _share(source: ModelSource, profile: ActivityProfile | None, layer: int) -> float:
    """The share of active neurons, of experts within those that a token uses."""
    name, block = f"neurons.{layer}", sparse_block(source.weights, layer)
    if profile is not None and isinstance(block, MoeWeights):
        experts, sizes = block.ffn_up_exps.experts, source.sizes.layers[layer].routed
        assert sizes is not None
        share = profile.share_in_experts(layer, experts, sizes.granules_per_token)
        return UNKNOWN_SHARE if share is None else share
    return profile.active_share(name) if profile and name in profile.counts else UNKNOWN_SHARE


def _activity(profile: ActivityProfile | None, layer: int) -> tuple[float, ...]:
    """The value of `SparseLayer.activity`."""
    counts = profile.counts.get(f"neurons.{layer}") if profile else None
    if counts is None or not counts.any():
        return ()
    groups = np.add.reduceat(counts.sum(0, dtype=np.int64), range(0, counts.shape[1], NEURON_GROUP))
    return (0.0, *(np.cumsum(groups) / groups.sum()).tolist())


def _predictors(
    source: ModelSource, able: list[int], profile: ActivityProfile | None
) -> dict[int, TrainedPredictor | None]:
    """The predictors of the profile. Raises `SettingError`: it has none, or they don't fit."""
    predictors: dict[int, TrainedPredictor | None] = {}
    for layer in able:
        if experts_of(source.weights, layer):
            continue  # experts have no predictors
        weights = dense_layer(source.weights, layer)
        try:
            trained = read_predictor(
                profile.arrays if profile else {}, layer, weights.ffn_gate or weights.ffn_up
            )
        except (ValueError, KeyError) as error:
            raise SettingError(f"sparse: the profile's predictor doesn't fit: {error}") from error
        trained = trained or _of_file(source, profile, layer)
        if trained:
            predictors[layer] = trained
    if not predictors:
        raise SettingError(
            f"sparse: saw 'predicted', but {source.name} has no predictors; "
            "train them with edgeinfer profile --predictor"
        )
    return predictors


def _of_file(source: ModelSource, profile: ActivityProfile | None, layer: int) -> TrainedPredictor | None:
    """The predictor of the model's file, of unknown quality."""
    found = file_predictor(source.file, source.specification, source.weights, layer)
    if found is None:
        return None
    share = _share(source, profile, layer)
    return TrainedPredictor(found, nan, share, share)


def _where_profitable(source: ModelSource, able: list[int], profile: ActivityProfile) -> SparseSelection:
    profitable_layers: dict[int, TrainedPredictor | None] = {}
    ratios = []
    for layer in able:
        ratios.append(_ratio(sparse_unit(source.weights, layer), _share(source, profile, layer)))
        if ratios[-1] < MAX_COST_RATIO:
            profitable_layers[layer] = None
    if profitable_layers:
        return _selection(source, profitable_layers, profile)
    return SparseSelection(
        note=Detail(
            "the feed-forward is dense: reading active neurons only would take "
            f"{min(ratios):.2f} times as long or more, wanted below {MAX_COST_RATIO}"
        )
    )


def _ratio(weights: FeedForwardWeights, active: float) -> float:
    """The time of an exact sparse feed-forward divided by that of the dense one, from the bytes of both."""
    matrices = [weights.ffn_up, weights.ffn_down, *([weights.ffn_gate] if weights.ffn_gate else [])]
    dense = sum(map(interleaved_bytes, matrices))
    whole = first_bytes(weights, predicted=False) + factor_bytes(weights)
    return (whole + SCATTERED_SLOWDOWN * scattered_bytes(weights, None, active, active)) / dense


def first_bytes(weights: FeedForwardWeights, *, predicted: bool) -> int:
    """Bytes of gate (up without one), which a token reads to find the active neurons, unless they are
    predicted.
    """
    return 0 if predicted else interleaved_bytes(weights.ffn_gate or weights.ffn_up)


def _selection(
    source: ModelSource,
    trained_layers: Mapping[int, TrainedPredictor | None],
    profile: ActivityProfile | None,
) -> SparseSelection:
    sizes, shares = {}, []
    for layer, trained in trained_layers.items():
        shares.append(_share(source, profile, layer))
        activity = _activity(profile, layer)
        sizes[layer] = _sizes(sparse_unit(source.weights, layer), trained, shares[-1], activity)
    predictors = {layer: trained.predictor if trained else None for layer, trained in trained_layers.items()}
    shared, per_thread = sparse_workspace_bytes(source.specification.hidden_size, source.weights, predictors)
    experts = any(experts_of(source.weights, layer) for layer in predictors)
    gathered = _gathered(source, predictors, profile) if source.options.asks_sparse else {}
    options = SparseOptions(sizes, shared, per_thread, experts, gathered)
    return SparseSelection(predictors, options, _note(source, trained_layers, shares, profile is not None))


def _gathered(
    source: ModelSource, layers: SparseLayers, profile: ActivityProfile | None
) -> dict[int, SparseLayer]:
    """The sparse layers of which a GPU may read only the active neurons, with the bytes of exact mode; not
    with "auto", until the slowdown of scattered reads on a GPU is measured.
    """
    found = {}
    for layer in layers:
        index = sparse_index(source.specification, layer)
        assert index is not None
        spec, weights = source.specification.residual(index).block, source.weights.residual(index).block
        if isinstance(weights, FeedForwardWeights) and why_not_gathered(spec, weights) is None:
            found[layer] = _sizes(weights, None, _share(source, profile, layer), _activity(profile, layer))
    return found


def _sizes(
    weights: FeedForwardWeights, trained: TrainedPredictor | None, active: float, activity: tuple[float, ...]
) -> SparseLayer:
    """Bytes that a sparse layer, or one of its experts, takes, and that a token reads with this share of
    active neurons.
    """
    predictor, named = (trained.predictor, trained.named) if trained else (None, active)
    finding = predictor_bytes(predictor) if predictor else 0
    first = first_bytes(weights, predicted=predictor is not None)
    scattered = round(scattered_bytes(weights, predictor, active, named))
    in_file = sum(matrix.nbytes for matrix in by_neuron(weights, predictor))
    held, read = first + neuron_bytes(weights, predictor), first + factor_bytes(weights) + scattered
    return SparseLayer(held, read, scattered, finding, in_file, activity)


def _note(
    source: ModelSource,
    trained_layers: Mapping[int, TrainedPredictor | None],
    shares: list[float],
    profiled: bool,
) -> Detail:
    layers = len(source.weights.layers)
    source_of_share = "by its profile" if profiled else "not profiled, assumed"
    line = (
        f"sparse feed-forward in {len(trained_layers)} of {layers} layers: short steps read "
        f"active neurons only ({sum(shares) / len(shares):.0%}, {source_of_share})"
    )
    trained = [each for each in trained_layers.values() if each]
    if trained:
        known = [each.recall for each in trained if not isnan(each.recall)]
        recall = f" with a recall of {min(known):.1%} or more" if known else " by the predictors of the file"
        line += f"; predicted,{recall}: the output differs slightly"
    return Detail(line)
