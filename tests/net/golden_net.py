"""Digests of everything that a change of structure must not change; run it before and after.

    python tests/net/golden_net.py write net.json     # in the commit before
    python tests/net/golden_net.py check net.json     # after each step: prints what differs, exits with 1

Logits and greedy ids of every architecture on the reference, on every CPU path and on the interpreted
CUDA path, bit for bit; plans of six shapes on four described machines with 18 budgets; JSON of commands.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
for folder in (".", "benchmarks", "kernels", "offload", "quant_formats", "tui"):
    sys.path.insert(0, str(ROOT / folder))

import numpy as np  # noqa: E402

import edgeinfer  # noqa: E402
from tests.model_zoo import ZOO  # noqa: E402
from tests.random_models import RandomModel  # noqa: E402

IDS = [5, 9, 30, 7, 11, 270, 33, 64, 5, 9, 30, 8]
QUANTS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_1", "IQ4_NL", "MXFP4", "Q3_K", "Q2_K", "IQ4_XS")
CUDA_FIELDS = (
    *("llama", "gemma3", "gemma2", "olmo2", "starcoder2", "smollm3", "granite", "arcee", "mixtral"),
    *("granitemoe-shared", "smallthinker", "gpt-oss", "qwen3", "phi3"),
)
MACHINES = {
    "laptop": "rtx 4060 laptop, 32GiB ram, 64GB/s ram",
    "desktop": "rtx 3090, 64GiB ram, 80GB/s ram, 16 threads",
    "card": "rtx 5090, 96GiB ram, 90GB/s ram",
    "cpu": "cpu: 32GiB ram, 90GB/s ram",
}
SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "qwen3-30b-a3b", "smollm2-135m", "tinyllama-1.1b")
GIBIBYTES = (0, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)

RENAMED = {
    "limit_reason": "why_not",
    "relaxations": "steps",
    "stream_min_tokens": "send_weights_from_tokens",
    "decode_tokens_per_second_with_one_gib_more": "decode_tokens_per_second_with_one_gibibyte_more",
    "expert_cache": "changing",
    "sync_seconds": "hand_over_seconds",
}
"""Keys of JSON that were renamed since the digests were written: new, old."""


def renamed(value: Any) -> Any:
    """A JSON value with the old names of keys."""
    if isinstance(value, dict):
        return {RENAMED.get(key, key): renamed(member) for key, member in value.items()}
    return [renamed(member) for member in value] if isinstance(value, list) else value


Entry = tuple[str, str]


def digest(array: Any) -> str:
    """Of the exact bits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def random_files(folder: Path) -> Iterator[tuple[str, Path, RandomModel]]:
    """Every architecture in float32, and one of each weight type."""
    for name, model in ZOO.items():
        yield name, model.write(folder / f"{name}.gguf"), model
    for quant in QUANTS:
        model = replace(ZOO["llama"], width=256, heads=4, head_dim=64, feed_forward=512, formats=(quant,))
        yield f"llama-{quant}", model.write(folder / f"llama-{quant}.gguf"), model


def cpu_entries(folder: Path) -> Iterator[Entry]:
    """A prompt, all logits, single steps and greedy ids, with every instruction set."""
    from edgeinfer_kernels.cpu.compiler.features import detect

    for name, path, _ in random_files(folder):
        for isa in detect().available:
            options: dict[str, Any] = {"device": "cpu", "threads": 2, "instruction_set": isa.name}
            for kv in ("f16", "q8_0"):
                with edgeinfer.load(path, draft=None, kv=kv, **options) as model:
                    key = f"cpu {isa.name} {kv} {name}"
                    yield f"{key} logits", digest(model.logits(IDS))
                    engine: Any = model.engine
                    engine.rewind(0)
                    steps = [engine.append(IDS[:9]), *(engine.append([token]) for token in IDS[9:])]
                    yield f"{key} steps", digest(np.stack(steps))
                    completion = model.generate(IDS, max_tokens=12, temperature=0.0)
                    yield f"{key} ids", str(completion.ids)
                    seeded = model.generate(IDS, max_tokens=12, temperature=0.9, top_k=20, seed=5)
                    yield f"{key} seeded", str(seeded.ids)


def reference_entries(folder: Path) -> Iterator[Entry]:
    """The reference in float64."""
    from tests.kernels.cuda.decoders import opened

    for name, model in ZOO.items():
        with opened(model, folder, tuple(range(min(model.layers, 2)))) as decoder:
            yield f"reference {name}", digest(decoder.reference_logits(decoder.ids(9)))


def cuda_entries(folder: Path) -> Iterator[Entry]:
    """The interpreted CUDA path: a prompt and steps."""
    from tests.kernels.cuda.decoders import opened, read
    from tests.kernels.cuda.interpreter import fixed_interpreter

    with fixed_interpreter():
        for name in CUDA_FIELDS:
            with opened(ZOO[name], folder, (0,)) as decoder:
                backend = decoder.backend("cpu")
                result = read(backend, decoder.ids(9), (7, 1, 1))
                backend.close()
                yield f"cuda {name}", digest(np.stack([result[index] for index in sorted(result)]))


def plan_entries(_: Path) -> Iterator[Entry]:
    """Plans as JSON."""
    from edgeinfer.planning.device_plan import plan_devices
    from edgeinfer.planning.plan_request import PlanRequest
    from edgeinfer.shapes.known_shapes import find_shape
    from edgeinfer_kernels.sizes.model_sizes import ModelSizes
    from edgeinfer_offload.machine.description import describe_machine
    from harness.empty_decoders import empty_decoder

    for shape in SHAPES:
        sizes = ModelSizes.of(*empty_decoder(find_shape(shape), "Q4_K_M"))
        for machine, description in MACHINES.items():
            for budget in GIBIBYTES:
                cpu = machine == "cpu"
                nbytes = int(budget * 2**30)
                vram, ram = (None, nbytes) if cpu else (nbytes, None)
                request = PlanRequest(shape, sizes, 4096, 131072, vram=vram, ram=ram)
                try:
                    plan = plan_devices(request, describe_machine(description)).memory.to_dict()
                    result = json.dumps(renamed(plan), sort_keys=True)
                except ValueError as error:
                    result = str(error)
                except Exception as error:
                    result = f"{type(error).__name__}: {error}"
                yield f"plan {shape} {machine} {budget}", hashlib.sha256(result.encode()).hexdigest()[:16]


def command_entries(_: Path) -> Iterator[Entry]:
    """JSON output of commands."""
    commands = (
        ["show", "tiny", "--json", "--tensors"],
        ["plan", "tiny", "--json", "--device", MACHINES["laptop"]],
        ["plan", "tiny", "--json", "--device", "cpu: 8GiB ram, 50GB/s ram", "--ram", "40MiB"],
        ["list", "--all", "--json"],
        ["run", "tiny", "Once upon a time", "--seed", "1", "--max-tokens", "40", "--temperature", "0"],
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:5]), "NO_COLOR": "1"}
    start = "from edgeinfer_tui.command_line import main; main()"
    for command in commands:
        words = [sys.executable, "-c", start, *command]
        done = subprocess.run(words, env=environment, capture_output=True, check=False, text=True)
        printed = f"{done.returncode} {done.stdout}".replace(str(ROOT), "")
        yield f"command {' '.join(command)}", hashlib.sha256(printed.encode()).hexdigest()[:16]


PARTS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    "reference": reference_entries,
    "cpu": cpu_entries,
    "cuda": cuda_entries,
    "plan": plan_entries,
    "command": command_entries,
}


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    result: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            entries = dict(PARTS[part](Path(folder)))
            print(f"{part}: {len(entries)} digests", flush=True)
            result |= entries
    if given.action == "write":
        given.path.write_text(json.dumps(result, indent=1), encoding="utf-8")
        return 0
    expected = json.loads(given.path.read_text(encoding="utf-8"))
    expected = {key: value for key, value in expected.items() if key.split()[0] in given.parts}
    different = sorted(key for key in result.keys() | expected.keys() if result.get(key) != expected.get(key))
    for key in different:
        print(f"differs: {key}: {expected.get(key)} -> {result.get(key)}")
    print(f"{len(result) - len(different)} of {len(expected)} are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
