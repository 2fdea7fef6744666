"""Quantized models with damaged weights: loaded repacked and memory-mapped, and run."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import edgeinfer
from edgeinfer_quant_formats import GGUFFile
from tests.faults.outcomes import Case, report
from tests.random_models import RandomModel

FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16", "F32")


def use(path: Path, repack: bool) -> None:
    with edgeinfer.load(path, device="cpu", threads=1, draft=None, repack=repack) as model:
        model.generate("the cat", max_tokens=3, temperature=0)
        model.embed("a")


def cases(folder: Path, count: int) -> Iterator[Case]:
    """Damaged bytes of a tensor, of each format in turn."""
    sources = {
        name: RandomModel("llama", width=256, layers=1, head_dim=64, feed_forward=256, formats=(name,)).write(
            folder / f"{name}.gguf"
        )
        for name in FORMATS
    }
    path = folder / "damaged.gguf"
    for number in range(count):
        noise, name = random.Random(number), FORMATS[number % len(FORMATS)]
        with GGUFFile.open(sources[name]) as file:
            info = noise.choice(list(file.tensors.values()))
        content = bytearray(sources[name].read_bytes())
        size = min(noise.choice((1, 2, 4, 64, 1024)), info.nbytes)
        start = info.offset + noise.randrange(info.nbytes - size + 1)
        content[start : start + size] = noise.choice((b"\xff" * size, noise.randbytes(size), b"\x7c" * size))
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        repack = number % 4 != 0
        yield f"{name} {info.name} {number}", lambda repack=repack: use(path, repack)  # type: ignore[misc]


if __name__ == "__main__":
    root_folder = Path(sys.argv[1])
    report(cases(root_folder, int(sys.argv[2])), root_folder / "report.json")
