"""Grammars that can't be compiled give a one-line error: no crash, no hang, no long text."""

import json
import os
import threading
import time
from typing import Any

import pytest

from edgeinfer.errors import SettingError
from edgeinfer.structured import compiler
from edgeinfer.structured.grammars import grammar, json_schema

pytest.importorskip("llguidance")


def chained_schema(levels: int) -> dict[str, Any]:
    """Definitions that each refer to the next one; llguidance overflows an 8 MiB stack with a thousand."""
    inner = {"type": "object", "additionalProperties": False, "required": ["a"]}
    chain = {f"d{i}": {**inner, "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(levels)}
    return {"$defs": {**chain, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chained_rules(levels: int, separator: str, first: str) -> str:
    rules = [f"r{i}{separator} r{i + 1}" for i in range(levels)]
    return "\n".join([f"{first}{separator} r0", *rules, f'r{levels}{separator} "a"'])


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("arrow_and_first", [(" ::=", "root"), (":", "start")])
def test_thousands_of_chained_rules_are_refused_and_a_hundred_are_not(arrow_and_first: Any) -> None:
    with pytest.raises(SettingError, match=r"^grammar: too deep or too large to compile \("):
        grammar(chained_rules(3_000, *arrow_and_first))
    assert grammar(chained_rules(100, *arrow_and_first)).compiled


@pytest.mark.slow
def test_thousands_of_chained_references_are_refused_and_a_hundred_are_not() -> None:
    for levels in (1_000, 3_000):
        with pytest.raises(SettingError, match=r"^schema: too deep or too large to compile \("):
            json_schema(chained_schema(levels))
    assert json_schema(chained_schema(100)).compiled
    wrapped = "start: %json " + json.dumps(chained_schema(3_000))
    with pytest.raises(SettingError, match="too deep or too large"):
        grammar(wrapped)


@pytest.mark.slow
def test_a_compilation_over_the_time_limit_is_refused() -> None:
    many = " & ".join(f"/.*x{i}.*/" for i in range(30))
    begin = time.perf_counter()
    with pytest.raises(SettingError, match="too deep or too large"):
        grammar(f"start: T\nT: {many}")
    assert time.perf_counter() - begin < 30


@pytest.mark.parametrize("levels", [200, 5_000])
def test_a_deeply_nested_schema_is_refused(levels: int) -> None:
    nested: Any = {}
    for _ in range(levels):
        nested = {"items": nested}
    with pytest.raises(
        SettingError, match=r"^schema: saw more than 64 levels of nesting, wanted 64 at most$"
    ):
        json_schema(nested)
    with pytest.raises(SettingError, match=r"^schema: saw (more than 64 levels|no JSON)"):
        json_schema('{"items":' * levels + "{}" + "}" * levels)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(number: float) -> None:
    with pytest.raises(SettingError, match="wanted what JSON can hold"):
        json_schema({"type": "number", "minimum": number})


def test_a_text_over_the_limit_is_refused_without_parsing() -> None:
    with pytest.raises(SettingError, match=r"^grammar: saw 1048590 bytes, wanted 1048576 at most$"):
        grammar("root ::= " + '"a' + "x" * (1 << 20) + '" |')
    with pytest.raises(SettingError, match=r"^schema: saw \d+ bytes, wanted 1048576 at most$"):
        json_schema({"enum": ["x" * (1 << 20)]})


def test_errors_have_a_bounded_length() -> None:
    with pytest.raises(SettingError) as caught:
        grammar("start: /" + "(" * 5_000 + "a" + ")" * 5_000 + "/")
    assert len(str(caught.value)) < 400
    with pytest.raises(SettingError) as caught:
        json_schema({"type": "x" * 100_000})
    assert len(str(caught.value)) < 400


def test_the_compiler_recovers_from_a_crash_and_serves_several_threads() -> None:
    results: list[str] = []

    def compile_both(index: int) -> None:
        results.append(grammar(f'root ::= "ok{index}"').compiled)
        with pytest.raises(SettingError):
            grammar(chained_rules(5_000 + index, ":", "start"))
        results.append(grammar(f'root ::= "again{index}"').compiled)

    threads = [threading.Thread(target=compile_both, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_each_process_has_a_separate_compiler() -> None:
    grammar('root ::= "before the fork"')
    process = os.fork()
    if process == 0:
        try:
            grammar('root ::= "in the child"')
        except BaseException:
            os._exit(1)
        compiler.child_process.close()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    assert grammar('root ::= "in the parent"').compiled


def test_a_lone_surrogate_is_refused_in_one_line() -> None:
    with pytest.raises(SettingError, match=r"^schema: .+$"):
        json_schema({"enum": ["\ud800"]})
    with pytest.raises(SettingError, match=r"^grammar: .+$"):
        grammar('root ::= "\ud800"')
