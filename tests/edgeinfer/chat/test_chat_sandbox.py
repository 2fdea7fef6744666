"""A hostile template can't reach Python objects, run without end, or use much memory."""

import pytest

from edgeinfer.chat_templates import budget as chat_budget
from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.errors import ChatTemplateError

HELLO = [{"role": "user", "content": "Hi"}]
LONG = "{% set s = 'a' * 1000000 %}"

DOUBLINGS = {
    "joining": "ns.s ~ ns.s",
    "adding": "ns.s + ns.s",
    "a list": "[ns.s, ns.s]",
    "a tuple": "(ns.s, ns.s)",
    "a dict": "{'a': ns.s, 'b': ns.s}",
    "a call": "dict(a=ns.s, b=ns.s)",
    "batches": "[ns.s]|batch(2, ns.s)|list",
    "a join": "[ns.s, ns.s]|join",
    "a format": "'%s%s'|format(ns.s, ns.s)",
    "a format method": "'{0}{0}'.format(ns.s)",
    "a percent sign": "'%s%s' % (ns.s, ns.s)",
    "a macro": "twice(ns.s)",
}


def render(source: str) -> str:
    return ChatFormat(source).render(HELLO)


def failure(source: str) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ self._TemplateReference__context.eval_ctx }}",
        "{{ dict.mro() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({}) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ ('a').translate({97: 'b'}) }}",
    ],
)
def test_python_objects_are_unreachable(source: str) -> None:
    assert failure(source).startswith("chat template, line 1: ")


@pytest.mark.slow
def test_a_list_can_grow_and_shrink_within_the_budget() -> None:
    assert render("{% set a = [1] %}{% set _ = a.append(2) %}{{ a.pop(0) }}{{ a }}") == "1[2]"
    growing = "{% set a = [] %}{% for _ in range(60) %}{% set b = [] %}{% set _ = b.append(a) %}"
    growing += "{% set _ = b.append(a) %}{% set _ = a.append(b) %}{% endfor %}{{ a|length }}"
    assert "characters" in failure(growing)
    assert "characters" in failure("{% set a = [] %}{% set _ = a.append(a) %}{{ a }}")


def test_a_method_in_a_loop_and_the_result_of_a_filter_are_accepted() -> None:
    loop = "{% for x in ['a', 'b'] %}{{ x.replace('a', 'c') }}{{ ','.join([x]) }}{{ x.expandtabs() }}"
    loop += "{% endfor %}"
    assert render(loop) == "caabbb"
    assert render("{{ [{'n': 1}]|map(attribute='n')|tojson }}") == "[1]"


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "messages|attr('__class__')",
        "'{0.__class__}'.format(1)",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "tojson",
        "lipsum",
    ],
)
def test_hidden_attributes_are_undefined(expression: str) -> None:
    assert render("[{{ " + expression + " }}]") == "[]"


@pytest.mark.parametrize("expression", DOUBLINGS.values(), ids=DOUBLINGS)
def test_repeated_doubling_is_stopped(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_budget, "MAX_CHARACTERS", 500_000)
    macro = "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s=['ab']) %}"
    if expression not in ("ns.s + ns.s", "[ns.s]|batch(2, ns.s)|list"):
        macro = macro.replace("['ab']", "'ab'")
    assert "characters besides" in failure(
        macro
        + "{% for i in range(60) %}{% set ns.s = "
        + expression
        + " %}{% endfor %}{{ ns.s|string|length }}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [0] }}",
        "{{ [[0] * 1000] * 100000 }}",
        LONG + "{{ s|replace('a', s) }}",
        LONG + "{{ s.replace('', s) }}",
        LONG + "{{ range(100000)|join(s) }}",
        LONG + "{{ range(100000)|map('string')|join(d=s) }}",
        LONG + "{{ s.join(s) }}",
        "{{ ('\n' * 1000000)|indent(100000) }}",
        "{{ ('\t' * 100000).expandtabs(100000) }}",
        "{{ range(100000)|batch(1)|sum(start=[]) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}",
        "{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    ],
)
def test_text_multiplication_is_stopped_before_allocation(source: str) -> None:
    assert "characters besides" in failure(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ range(10**9) }}", "a number beyond 1000000"),
        ("{{ range(500000) }}", "Range too big"),
        ("{{ 'a'|center(10**10) }}", "a number beyond 1000000"),
        ("{{ 'a'.ljust(10**10) }}", "a number beyond 1000000"),
        ("{{ '%*d' % (10**10, 1) }}", "a number beyond 1000000"),
        ("{{ '{:{w}}'.format(1, w=10**10) }}", "a number beyond 1000000"),
        ("{{ '%10000000000d'|format(1) }}", "a field wider than 1000000"),
        ("{{ '%10000000000d' % 1 }}", "a field wider than 1000000"),
        ("{{ '{:10000000000}'.format(1) }}", "a field wider than 1000000"),
        ("{{ [1]|tojson(indent=100) }}", "an indent of 100, wanted 64 at most"),
        ("{{ 9 ** 99999999 }}", "a number of more than 4096 bits"),
    ],
)
def test_wide_fields_and_large_numbers_are_refused(source: str, message: str) -> None:
    assert message in failure(source)


def test_repeated_squaring_is_stopped() -> None:
    squares = "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    assert "4096 bits" in failure(squares)


def test_nested_loops_are_stopped_by_iteration_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_budget, "MAX_STEPS", 5_000)
    inner = "{% for b in range(1000) %}{% endfor %}"
    assert "more than 5000 loop iterations" in failure("{% for a in range(1000) %}" + inner + "{% endfor %}")


def test_nested_loops_are_stopped_by_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_budget, "MAX_SECONDS", 0.05)
    inner = "{% for b in range(100000) if false %}{% endfor %}"
    assert "still not done after 0.05 seconds" in failure(
        "{% for a in range(1000) %}" + inner + "{% endfor %}"
    )


def test_recursive_macros_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_budget, "MAX_STEPS", 5_000)
    macro = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    assert "RecursionError" in failure(macro + "{{ m(500) }}")
    assert "loop iterations and macro calls" in failure(macro + "{{ m(30) }}")


def test_each_rendering_has_a_separate_budget() -> None:
    chat_format = ChatFormat("{{ 'a' * 7000000 }}")
    assert len(chat_format.render(HELLO)) == len(chat_format.render(HELLO)) == 7_000_000


def test_a_long_chat_stays_within_the_limits() -> None:
    source = "{% for m in messages %}{{ ('<' ~ m.role ~ '>' ~ m.content|trim + '\n')|string }}{% endfor %}"
    chat = [{"role": "user", "content": "long " * 40_000}] * 40
    assert len(ChatFormat(source).render(chat)) > 7_000_000


@pytest.mark.parametrize("arguments", ["1", "width=1", "2, true"])
def test_wrapping_a_long_word_counts_copied_bytes(arguments: str) -> None:
    assert "characters besides" in failure(LONG + "{{ s|wordwrap(" + arguments + ") }}")
    assert render("{{ 'a b'|wordwrap(1) }}") == "a\nb"


def test_a_template_of_more_than_a_megabyte_is_not_compiled() -> None:
    message = failure("{{ 1 }}" * 200_000)
    assert message == "chat template: saw 1400000 bytes of template, wanted 1048576 at most"


def test_every_error_is_one_short_line() -> None:
    nested = "{% for a in messages %}" * 30 + "{% endfor %}" * 30
    for source in ("{{ raise_exception('x' * 100000) }}", nested, "{{ messages|map('x' * 100000)|list }}"):
        message = failure(source)
        assert message.startswith("chat template")
        assert len(message) < 600
        assert "\n" not in message
