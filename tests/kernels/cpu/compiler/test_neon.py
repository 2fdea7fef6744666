"""ARM kernels, compiled here and checked as assembly: this machine can't run them."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.kernels.cpu.compiler.arm_assembly import Assemblies, Loop, assemblies, innermost_loops
from tests.kernels.shared_results import made_once

CALLED = re.compile(r"^\s+bl\s+(\w+)", re.MULTILINE)
FORMATS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
SETS = ("neon-i8mm", "neon-dotprod", "portable-arm")
DEFAULT = ("neon-i8mm", "Q4_K")
"""Compiled alone for the default tier; the slow tier compiles the other eleven."""
OTHERS = {
    "neon-dotprod": ("blocks", "latent_attention", "rows_IQ4_NL"),
    "portable-arm": ("rows_IQ4_NL",),
}
"""Slow. `blocks` multiplies no quants: it is the same code with and without sdot."""
GROUP_PARTS = {"Q8_0": 16, "Q4_0": 16, "Q4_K": 128, "Q6_K": 128}
"""32 weights of a row: how many of them a block of a group of sixteen rows has."""
MAX_INSTRUCTIONS = {
    **dict.fromkeys([("neon-i8mm", "Q8_0"), ("neon-dotprod", "Q8_0")], 6.0),
    **dict.fromkeys([("neon-i8mm", "Q4_0"), ("neon-dotprod", "Q4_0")], 7.0),
    **dict.fromkeys([("neon-i8mm", "Q4_K"), ("neon-dotprod", "Q4_K")], 12.0),
    **dict.fromkeys([("neon-i8mm", "Q6_K"), ("neon-dotprod", "Q6_K")], 16.0),
    ("portable-arm", "Q8_0"): 11.0,
    ("portable-arm", "Q4_0"): 11.0,
    ("portable-arm", "Q4_K"): 20.0,
    ("portable-arm", "Q6_K"): 21.0,
}
"""Instructions for 32 weights of one row and one token. llama.cpp's: Q8_0 18, Q4_0 19, Q4_K 16."""


RowKernels = Callable[[str, str], str]
"""(instruction set, format) -> the assembly of its rows."""


def of_tier(*values: str) -> object:
    """An instruction set and a format as a test's parameters."""
    return pytest.param(*values, marks=() if values == DEFAULT else pytest.mark.slow)


@pytest.fixture(scope="module")
def row_kernels(shared_folder: Path) -> RowKernels:
    @cache
    def compiled(is_default: bool) -> Assemblies:
        units = {
            isa: tuple(f"rows_{name}" for name in FORMATS if ((isa, name) == DEFAULT) == is_default)
            for isa in (DEFAULT[:1] if is_default else SETS)
        }
        path = shared_folder / ("arm_default.json" if is_default else "arm_rows.json")
        found: Assemblies = made_once(path, lambda: assemblies(units))
        return found

    return lambda isa, name: compiled((isa, name) == DEFAULT)[isa][f"rows_{name}"]


@pytest.fixture(scope="module")
def other_kernels(shared_folder: Path) -> Assemblies:
    found: Assemblies = made_once(shared_folder / "arm_others.json", lambda: assemblies(OTHERS))
    return found


def loops(kernels: RowKernels, isa: str, name: str, *dots: str) -> list[Loop]:
    """The loops of a format's rows that have these instructions: of one token first, then of a tile."""
    found = [loop for loop in innermost_loops(kernels(isa, name)) if loop.count(*dots)]
    return sorted(found, key=lambda loop: not loop.function.startswith("edgeinfer_rows"))


@pytest.mark.parametrize(("isa", "name"), [of_tier(*each) for each in MAX_INSTRUCTIONS])
def test_a_token_takes_few_instructions_for_32_weights(row_kernels: RowKernels, isa: str, name: str) -> None:
    loop = loops(row_kernels, isa, name, "sdot", "smull")[0]
    assert loop.function.startswith("edgeinfer_rows")
    assert len(loop.instructions) / GROUP_PARTS[name] <= MAX_INSTRUCTIONS[isa, name]


@pytest.mark.parametrize(("isa", "name"), [of_tier(isa, name) for isa in SETS[:2] for name in FORMATS])
def test_products_of_one_token_are_those_of_sdot(row_kernels: RowKernels, isa: str, name: str) -> None:
    loop = loops(row_kernels, isa, name, "sdot")[0]
    # 32 columns of 16 rows are 512 products, 16 to an instruction.
    assert loop.count("sdot") == 2 * GROUP_PARTS[name]
    assert loop.count("smull", "smlal", "mul", "mla") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_without_sdot_products_are_added_in_int16(row_kernels: RowKernels, name: str) -> None:
    loop = loops(row_kernels, "portable-arm", name, "smull")[0]
    products = loop.count("smull", "smull2", "smlal", "smlal2")
    assert products == 4 * GROUP_PARTS[name]
    assert loop.count("sdot", "usdot", "mul") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS[:3])
def test_a_tile_of_four_tokens_uses_matrix_products(row_kernels: RowKernels, name: str) -> None:
    (loop,) = loops(row_kernels, "neon-i8mm", name, "smmla")
    # 512 products of each of four tokens, 32 to an instruction.
    assert loop.count("smmla") == 64
    (plain,) = loops(row_kernels, "neon-dotprod", name, "sdot")[1:]
    assert len(loop.instructions) / 4 < len(plain.instructions)


@pytest.mark.slow
def test_atomics_are_single_instructions_and_waiting_threads_yield(other_kernels: Assemblies) -> None:
    text = other_kernels["neon-dotprod"]["blocks"]
    assert re.search(r"\bldaddal\b", text)
    assert not re.search(r"\bldaxr\b", text)
    assert re.search(r"\b(yield|hint\s+#0?x?1)\b", text)


@pytest.mark.parametrize(("isa", "name"), [of_tier(isa, name) for isa in SETS for name in FORMATS])
def test_arm_rows_have_no_external_calls(row_kernels: RowKernels, isa: str, name: str) -> None:
    check_calls(row_kernels(isa, name), f"rows_{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "unit"), [(isa, unit) for isa, units in OTHERS.items() for unit in units])
def test_arm_kernels_have_no_external_calls(other_kernels: Assemblies, isa: str, unit: str) -> None:
    check_calls(other_kernels[isa][unit], unit)


def check_calls(text: str, unit: str) -> None:
    blocks = {"blocks": "attention_block", "latent_attention": "latent_attention_block"}
    assert f"edgeinfer_{blocks.get(unit, unit)}:" in text
    assert "x86" not in text
    defined = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert set(CALLED.findall(text)) <= defined | {"memset", "memcpy"}


@pytest.mark.slow
@pytest.mark.parametrize("isa", OTHERS)
def test_f16_and_tables_use_native_instructions(other_kernels: Assemblies, isa: str) -> None:
    text = other_kernels[isa]["rows_IQ4_NL"]
    assert re.search(r"\bfcvtl\b", text)
    assert re.search(r"\btbl\b", text)
