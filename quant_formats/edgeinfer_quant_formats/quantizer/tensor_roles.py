"""The role of a tensor in its model, from its name, and which tensors are never quantized."""

import re
from collections.abc import Sequence
from enum import Enum, auto

TOKEN_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
OUTPUT = "output.weight"
LAYER_NUMBER = re.compile(r"blk\.(\d+)")


class Role(Enum):
    """The roles that mixes distinguish."""

    TOKEN_EMBEDDING = auto()
    OUTPUT = auto()
    ATTENTION_VALUE = auto()
    """Values, alone or fused with queries and keys: the attention matrix most sensitive to quantization."""
    ATTENTION_KEY = auto()
    ATTENTION_QUERY = auto()
    ATTENTION_OUTPUT = auto()
    FFN_UP = auto()
    FFN_GATE = auto()
    FFN_DOWN = auto()
    OTHER = auto()


# The first fragment contained in a name decides.
_ROLE_BY_FRAGMENT = (
    ("attn_qkv.weight", Role.ATTENTION_VALUE),
    ("attn_kv_b.weight", Role.ATTENTION_VALUE),
    ("attn_v.weight", Role.ATTENTION_VALUE),
    ("attn_k.weight", Role.ATTENTION_KEY),
    ("attn_q.weight", Role.ATTENTION_QUERY),
    ("attn_output.weight", Role.ATTENTION_OUTPUT),
    ("ffn_up", Role.FFN_UP),
    ("ffn_gate", Role.FFN_GATE),
    ("ffn_down", Role.FFN_DOWN),
)


def _any_of(*fragments: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, fragments)))


_NEVER_NAMES = ("position_embd.weight", "token_types.weight")

# Small tensors whose error costs more than their bytes: norms, expert routing, convolutions and decays of
# recurrent layers, positional tables, projections of images and sound.
_NEVER = _any_of(
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
_NEVER_IN_ARCHITECTURE = {
    "glm5-next": _any_of(
        "hc_",
        "indexer.attn_q_b",
        "indexer.attn_k",
        "indexer.proj",
        "indexer_compressor_gate",
        "indexer_compressor_ape",
        "ssm_f_a.weight",
        "ssm_f_b.weight",
        "ssm_g_a.weight",
        "ssm_g_b.weight",
        "ssm_beta.weight",
        "attn_kv_a_mqa.weight",
        "attn_k_b.weight",
        "attn_v_b.weight",
    ),
}


def role_of(name: str) -> Role:
    """The role of the tensor with that name."""
    if name == OUTPUT:
        return Role.OUTPUT
    if name in TOKEN_EMBEDDINGS:
        return Role.TOKEN_EMBEDDING
    return next((role for fragment, role in _ROLE_BY_FRAGMENT if fragment in name), Role.OTHER)


def is_quantized(name: str, shape: Sequence[int], architecture: str) -> bool:
    """Whether the tensor is quantized: matrices named weight, except those listed above."""
    matrix_dimensions = len(shape) - next((i for i, size in enumerate(shape) if size > 1), len(shape) - 1)
    if matrix_dimensions < 2 or not name.endswith("weight") or name in _NEVER_NAMES:
        return False
    own = _NEVER_IN_ARCHITECTURE.get(architecture)
    return not (_NEVER.search(name) or (own and own.search(name)))


def layer_of(name: str) -> int:
    """The layer index in a name, -1 without one."""
    match = LAYER_NUMBER.match(name)
    return int(match[1]) if match else -1
