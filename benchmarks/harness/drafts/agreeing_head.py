"""A model file whose draft head agrees with the model by its weights, so that other programs draft from it.

All blocks add zero, so the hidden state of a position is the embedding of its token, and the next token is a
random function of it. The head gets the same embedding, plus a share of the previous state, which is noise:
with more of it, the head selects another token more often.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import Bytes, RandomBlocks
from edgeinfer.benchmarking.random_files import random_file
from edgeinfer.speculation.draft_vocabulary import short_vocabulary
from edgeinfer_quant_formats import GGUFFile, GGUFWriter, encode

OUTPUT, OUTPUT_FORMAT = "output.weight", "Q6_K"
"""A separate output matrix: with the embedding as the output, each token would be followed by itself."""
RESULTS = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight")
"""The matrices whose products a block adds."""
INPUT_NORMS = ("enorm.weight", "hnorm.weight")
OUTPUT_NORMS = ("output_norm.weight", "head_norm.weight")
SELECTED, COVERED = 0.5, 0.975
"""The first tokens of the vocabulary; the others, as rare in a text, are never selected: half of them, or as
many as leave this share of a text's tokens to the short draft vocabulary, which is that of English text and
of code (docs/measurements/speculation.md)."""
SPREAD = 16.0
"""The spread of the logits: the largest has most of the probability, as in a trained model."""
SIMULATED = 400
"""Selections that are simulated for each share of noise."""
NOISE_STEP = 0.005

Floats = npt.NDArray[np.float32]


def agreeing_file(shape: str, kind: str, agreement: float, selected: float | None = None) -> Path:
    """The path of the file of a shape with a head; created if it doesn't exist. `selected`: the share of the
    vocabulary, its first tokens, that completions have; None: as in real text.
    """
    source = random_file(shape, kind)
    selected = selected_as_in_text(source) if selected is None else selected
    share = "" if selected == SELECTED else f"-of-{selected:.3f}"
    path = source.with_name(f"{source.stem}-agrees-{agreement:.2f}{share}.gguf")
    if not path.exists():
        write_agreeing(source, path, agreement, selected)
    return path


def selected_as_in_text(source: Path) -> float:
    """The share of a model's vocabulary that completions have so that the short draft vocabulary has COVERED
    of their tokens; SELECTED: there is no short one.
    """
    file = GGUFFile.open(source)
    try:
        vocabulary = file.tensors["token_embd.weight"].shape[0]
    finally:
        file.close()
    short = short_vocabulary(vocabulary, vocabulary)
    return short / COVERED / vocabulary if short else SELECTED


def write_agreeing(source: Path, path: Path, agreement: float, share: float) -> None:
    """Write a random file of a model with one MTP head again, with a head that agrees so often."""
    file = GGUFFile.open(source)
    try:
        vocabulary, width = file.tensors["token_embd.weight"].shape
        selected = int(share * vocabulary)
        noise = noise_for(agreement, selected)
        random = np.random.Generator(np.random.SFC64(7))
        with GGUFWriter(path, file.metadata) as writer:
            for name, tensor in file.tensors.items():
                if name != OUTPUT:
                    data = _changed(file, name, noise)
                    writer.add_tensor(name, data, tensor.format.name, tensor.shape)
            blocks = RandomBlocks(OUTPUT_FORMAT, width**-0.5, random)
            output = partial(_output, blocks, selected * width, (vocabulary - selected) * width)
            writer.add_tensor(OUTPUT, output, OUTPUT_FORMAT, (vocabulary, width))
    finally:
        file.close()


def _output(blocks: RandomBlocks, random: int, zeros: int) -> Iterator[Bytes]:
    """The blocks of `random` elements with random weights, and of `zeros` elements."""
    yield from blocks.stream(random)
    yield np.zeros((zeros // blocks.format.block_elements, blocks.format.block_bytes), np.uint8)


def _changed(file: GGUFFile, name: str, noise: float) -> Callable[[], list[Bytes]]:
    """The bytes of a tensor in the new file."""
    tensor = file.tensors[name]

    def data() -> list[Bytes]:
        raw = file.raw(name).reshape(-1)
        if name.endswith(RESULTS):
            return [np.zeros_like(raw)]
        if name.endswith(INPUT_NORMS + OUTPUT_NORMS):
            value = SPREAD if name.endswith(OUTPUT_NORMS) else 1.0
            return [np.full(tensor.shape, value, np.float32).view(np.uint8).reshape(-1)]
        if name.endswith("eh_proj.weight"):
            return [encode(_projection(tensor.shape[0], noise), tensor.format.name).reshape(-1)]
        return [raw]

    return data


def _projection(width: int, noise: float) -> Floats:
    """The embedding, plus the state before it with its elements moved by one place."""
    kept = np.eye(width, dtype=np.float32)
    return np.concatenate([kept, noise * np.roll(kept, 1, axis=1)], axis=1)


def noise_for(agreement: float, vocabulary: int) -> float:
    """The share of noise with which the largest of `vocabulary` logits stays the largest so often."""
    random = np.random.Generator(np.random.SFC64(5))
    # Only the largest matter: all others are far below them.
    largest = np.sort(random.standard_normal((SIMULATED, vocabulary), np.float32), axis=1)[:, -256:]
    drawn = random.standard_normal(largest.shape, np.float32)
    noise = 0.0
    while np.mean(np.argmax(largest + noise * drawn, axis=1) == largest.shape[1] - 1) > agreement:
        noise += NOISE_STEP
    return noise
