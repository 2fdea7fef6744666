"""ARM kernels, compiled here and checked as assembly: this machine can't run them."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from edgeinfer_kernels.cpu.compiler.features import INSTRUCTION_SETS

pytestmark = pytest.mark.slow

TRIPLE = "aarch64-unknown-linux-gnu"
CHILD = Path(__file__).with_name("cross_assembly.py")
CALLED = re.compile(r"^\s+bl\s+(\w+)", re.MULTILINE)


UNITS = {
    "neon-dotprod": ("blocks", "latent_attention", "rows_Q8_0", "rows_Q4_K", "rows_IQ4_NL"),
    "portable-arm": ("rows_Q4_0",),
}
"""`blocks` multiplies no quants: it is the same code with and without sdot."""


@cache
def assemblies(isa_name: str) -> dict[str, str]:
    """Unit -> its assembly, all of them by one process."""
    isa = next(isa for isa in INSTRUCTION_SETS if isa.name == isa_name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    target = json.dumps({"processor": isa.processor, "features": isa.feature_string})
    command = [sys.executable, str(CHILD), TRIPLE, target, *UNITS[isa_name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, str] = json.loads(done.stdout)
    return result


def assembly(isa_name: str, unit: str) -> str:
    return assemblies(isa_name)[unit]


def loops(text: str) -> list[str]:
    """The bodies of innermost loops: from a label to a branch back to it, with no label in between."""
    result, label, body = [], "", list[str]()
    for line in text.splitlines():
        head = re.match(r"(\.LBB\w+):", line)
        if head:
            label, body = head[1], []
        body.append(line)
        if label and re.search(rf"\bb\S*\s.*{re.escape(label)}\b", line):
            result.append("\n".join(body))
    return result


@pytest.mark.parametrize("unit", ["rows_Q8_0", "rows_Q4_K"])
def test_the_inner_loop_of_quantized_rows_is_made_of_sdot(unit: str) -> None:
    text = assembly("neon-dotprod", unit)
    # 32 columns of 16 rows are 512 products, 16 to an instruction.
    count = max(loop.count("sdot") for loop in loops(text))
    assert count >= 32
    assert not re.search(r"\bs(mull|mlal)\s+v", text)


@pytest.mark.parametrize(("isa", "unit"), [(isa, unit) for isa, units in UNITS.items() for unit in units])
def test_arm_kernels_have_no_external_calls(isa: str, unit: str) -> None:
    text = assembly(isa, unit)
    blocks = {"blocks": "attention_block", "latent_attention": "latent_attention_block"}
    symbol = f"edgeinfer_{blocks.get(unit, unit)}"
    assert f"{symbol}:" in text
    assert "x86" not in text
    defined = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert set(CALLED.findall(text)) <= defined | {"memset", "memcpy"}


def test_without_sdot_the_products_are_widened() -> None:
    text = assembly("portable-arm", "rows_Q4_0")
    assert "sdot" not in text
    assert "sadd" in text or "smlal" in text or "saddw" in text


def test_f16_and_tables_use_native_instructions() -> None:
    text = assembly("neon-dotprod", "rows_IQ4_NL")
    assert re.search(r"\bfcvtl\b", text)
    assert re.search(r"\btbl\b", text)
