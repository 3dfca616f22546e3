"""Chat templates: the same text as Hugging Face's, and bounds on what a hostile template may do."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggmlb.core.errors import ArgumentError, ModelError
from ggmlb.models.gguf import ChatTemplate, chat
from tests.support.processes import python

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello <b> & é\n"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "More"},
]

CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' ~ '\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HONEST = {
    "chatml": CHATML,
    "tokens": "{{ bos_token }}{% for m in messages %}[{{ m.role|upper }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}",
    "loop": "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}"
    "{{ loop.last }}{{ loop.previtem.role if loop.previtem }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "macro": "{% macro say(m, end='.') %}{{ m.role ~ ':' ~ m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ say(m, end='!') }}{{ say(m) }}{% endfor %}",
    "namespace": "{% set ns = namespace(last=-1, texts=[]) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% set ns.texts = ns.texts + [m.content] %}{% endif %}{% endfor %}"
    "{{ ns.last }}{{ ns.texts }}{{ ns.texts|join('|') }}{% set ns.ns = ns %}{{ ns|upper }}",
    "filters": "{{ messages|map(attribute='role')|list }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages[1:]|tojson }}{{ messages[0]|tojson(indent=2) }}{{ 'a b'|title|replace('A', 'x')|indent(4) }}"
    "{{ messages[0]|dictsort }}{{ messages[0]|items|list }}{{ 3.14159|round(2) }}{{ [3, 1, 2]|sort|sum }}",
    "methods": "{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ messages[0].get('no', 'none') }}{{ 'ab'[::-1] }}"
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ '<{}>'.format('x') }}"
    "{{ 'a'.startswith('a') }}{{ 'a'.encode() }}",
    "tests": "{{ tools is none }}{{ nosuch is defined }}{{ messages is iterable }}{{ messages is mapping }}"
    "{{ 'ell' in 'hello' }}{{ 7 is odd }}{{ 2 ** 10 }}{{ 7 // 2 * 3 % 5 - 1 }}{{ '-' * 10 }}{{ [0] * 3 }}",
    "blocks": "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text|length }}"
    "{{ text }}"
    "{% filter upper %}ab{{ 1 }}{% endfilter %}{% for m in messages %}{% if loop.index > 2 %}{% break %}"
    "{% endif %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}{% raw %}{{ }}{% endraw %}",
}


def by_hugging_face(source: str) -> str:
    """What the sandbox of `transformers` makes of a template."""

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    template = environment.from_string(source)
    return template.render(
        messages=MESSAGES, tools=None, bos_token="<s>", eos_token="</s>", add_generation_prompt=True
    )


@pytest.mark.parametrize("name", HONEST)
def test_the_text_is_that_of_hugging_face(name: str) -> None:
    source = HONEST[name]
    assert ChatTemplate(source, "<s>", "</s>").render(MESSAGES) == by_hugging_face(source)


def test_the_prompt_and_variables_are_given() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(MESSAGES[1:2]).endswith("é<|im_end|>\n\n<|im_start|>assistant\n")
    assert template.render(MESSAGES[1:2], add_generation_prompt=False).endswith("é<|im_end|>\n\n")
    assert ChatTemplate("{{ enable_thinking }}").render([], enable_thinking=False) == "False"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == time.strftime("%Y")
    assert ChatTemplate("a{% generation %}b{{ 1 }}{% endgeneration %}c").render([]) == "ab1c"


def test_a_template_can_refuse() -> None:
    template = ChatTemplate("{% if not messages %}{{ raise_exception('no messages\x1b[31m') }}{% endif %}")
    assert template.render(MESSAGES) == ""
    with pytest.raises(ModelError, match=r"refuses the messages: no messages\\x1b\[31m$"):
        template.render([])


FORMS = {
    "text": "{% for m in messages %}{{ m.role ~ ':' + m.content }};{% endfor %}",
    "parts": "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }};{% endfor %}"
    "{% endfor %}",
    "both": "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }};{% else %}"
    "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("a", ["a"] * 3),
        ([{"type": "text", "text": "a"}], ["a"] * 3),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a\nb", "a;b", "a;b"]),
        ([], ["", "", ""]),
        (None, ["", "", ""]),
    ],
)
def test_content_comes_in_the_form_that_the_template_takes(content: object, texts: list[str]) -> None:
    for source, text in zip(FORMS.values(), texts, strict=True):
        found = ChatTemplate(source).render([{"role": "user", "content": content}])
        assert found.removesuffix(";") == f"user:{text}"


@pytest.mark.parametrize("content", [5, object(), {"text": "a"}, ["a"], [{"type": "image_url"}], [None]])
def test_content_that_no_template_takes(content: object) -> None:
    with pytest.raises(ArgumentError, match="message 0: content"):
        ChatTemplate(FORMS["both"]).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ a | tojson }}", '{"city": "Bonn"}'),
        ("{% for k, v in a.items() %}<{{ k }}={{ v }}>{% endfor %}", "<city=Bonn>"),
        ("{% for k, v in a | items %}{{ k }}:{{ v }}{% endfor %}", "city:Bonn"),
        ("{{ a }}", '{"city": "Bonn"}'),
        ("{{ 'a' + a }}", 'a{"city": "Bonn"}'),
    ],
)
def test_arguments_of_calls_are_never_quoted_twice(shown: str, expected: str) -> None:
    """Given as JSON or as an object, they come as the template takes them, also beside no content."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{% set a = c.function.arguments %}"
        + shown
        + "{% endfor %}{% endfor %}"
    )
    for arguments in ('{"city": "Bonn"}', {"city": "Bonn"}):
        function = {"name": "weather", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        for given in (message, {key: message[key] for key in ("role", "tool_calls")}):
            assert ChatTemplate(source).render([given]) == expected
        assert function["arguments"] is arguments
    function["arguments"] = "{no JSON"
    ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}").render([message])


def nested(inner: str, depth: int) -> str:
    return "{% for i in range(99999) %}" * depth + inner + "{% endfor %}" * depth


def grown(expression: str, start: str = "'ab'", end: str = "{{ ns.x }}") -> str:
    """A value that grows in each turn of a loop."""
    loop = "{%% for i in range(99999) %%}{%% set ns.x = %s %%}{%% endfor %%}" % expression  # noqa: UP031
    return f"{{% set ns = namespace(x={start}) %}}{loop}{end}"


HOSTILE = {
    # attributes that lead to Python
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by format": "{{ '{0.__class__}'.format(messages) }}",
    "class by format_map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by map": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "template": "{{ self._TemplateReference__context.environment }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "function": "{{ raise_exception.__globals__['json'].loads('1') }}",
    "change": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
    "module": "{% import 'os' as os %}",
    "parent": "{% extends 'x' %}",
    # loops and calls without end
    "range": "{% for i in range(10 ** 12) %}x{% endfor %}",
    "long range": "{% for i in range(200000) %}x{% endfor %}",
    "loops": nested("", 2),
    "loops that write": nested("x", 2),
    "deep loops": nested("", 15),
    "macro": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "wide recursive loop": "{% set l = range(99999)|list %}{% for x in l recursive %}"
    "{% if loop.depth < 5 %}{{ loop(l) }}{% endif %}{% endfor %}",
    "comparisons": "{% set x = 'x' * 3000000 %}{% set y = x ~ 'y' %}"
    + nested("{% if x == y %}{% endif %}", 2),
    # values without end
    "text": "{{ 'a' * 10 ** 10 }}",
    "text in a test": "{% if 'a' * 10000000000 %}{% endif %}",
    "list": "{% set x = [1] * 10000000000 %}",
    "list of lists": "{{ [[1] * 100000] * 100000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "powers": "{{ (256 ** 256) ** (256 ** 256) }}",
    "product": grown("ns.x * ns.x", "7"),
    "sum": grown("ns.x + ns.x"),
    "concatenation": grown("ns.x ~ ns.x"),
    "shared lists": grown("[ns.x, ns.x]"),
    "shared tuples": grown("(ns.x, ns.x)", end="{{ {ns.x: 1} }}"),
    "shared mappings": grown("{'a': ns.x, 'b': ns.x}", end="{{ ns.x|tojson }}"),
    "deep lists": grown("[ns.x]"),
    "namespaces": grown("namespace(a=ns.x, b=ns.x)"),
    "namespace that grows": "{% set a = namespace(x=1) %}{% set b = namespace(p=[a] * 1000) %}"
    "{% set a.x = 'x' * 1000000 %}{{ b|string|length }}",
    "join": "{{ range(99999)|join('x' * 1000000) }}",
    "str.join": "{{ ('x' * 1000000).join(['a'] * 100000) }}",
    "replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "replace nothing": "{{ ('a' * 1000000)|replace('', 'b' * 1000000) }}",
    "str.replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "indent": "{{ 'a\nb'|indent(1000000000) }}",
    "center": "{{ 'a'|center(1000000000000) }}",
    "str.center": "{{ 'a'.center(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "width of format": "{{ '{0:>1000000000}'.format(1) }}",
    "many fields": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "json": "{{ [1, [2]]|tojson(indent=1000000000) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 1000000)|sum(start=[]) }}",
    "map": "{{ (['x' * 100000] * 100000)|map('upper')|list|length }}",
    "written": "{% for i in range(99999) %}" + "y" * 50000 + "{% endfor %}",
    "set": "{% set x %}{% for i in range(99999) %}" + "y" * 50000 + "{% endfor %}{% endset %}",
    "variables": "".join("{%% set a%d = ('x' * 3000000)|upper %%}" % i for i in range(1200)),  # noqa: UP031
    "parts": "{% set x = 'x' * 3000000 ~ 'a' %}"
    + "".join("{%% set a%d = x.split('a') %%}" % i for i in range(1200)),  # noqa: UP031
    # sources
    "parentheses": "{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}",
    "brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "terms": "{{ 1" + "+1" * 30000 + " }}",
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "length": " " * (chat.MAX_SOURCE + 1),
    "syntax": "{% if %}",
    "filter": "{{ 1|nosuch }}",
    "type": "{{ 1 + 'a' }}",
    "undefined": "{{ nosuch.a.b }}",
    "zero": "{{ 1 / 0 }}",
    "json source": "{{ ('[' * 100000)|from_json }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
}


ENDLESS = {
    "loops", "deep loops", "branching macro", "wide recursive loop", "comparisons", "power", "powers",
    "product", "list of lists", "shared tuples", "round", "sum of lists", "lipsum",
}  # fmt: skip
"""Those that the limit of time ends."""

LARGE = {
    "text", "text in a test", "list", "concatenation", "sum", "namespace that grows", "join",
    "str.join", "replace", "replace nothing", "str.replace", "indent", "center", "str.center", "tabs", "%",
    "width of format", "many fields", "json", "map", "set", "variables", "parts",
}  # fmt: skip
"""Those that the limit of memory ends."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_TIME_S", 1.0 if name in ENDLESS else 60.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"^the chat template (fails|is no Jinja|has)") as raised:
        ChatTemplate(HOSTILE[name]).render(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # [KiB]
    assert str(raised.value).endswith("it takes more than 1 s") == (name in ENDLESS)
    assert name not in LARGE or str(raised.value).endswith("or needs too much memory")
    assert ChatTemplate("{{ bos_token }}", "<s>").render([]) == "<s>"


def test_a_long_conversation_fits() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    text = ChatTemplate(CHATML).render(messages)
    assert 2_000_000 < len(text) < 4_194_304
    with pytest.raises(ModelError, match="more than 4,194,304 characters"):
        ChatTemplate(CHATML).render(messages * 3)


@pytest.mark.parametrize("value", [object(), float, {1, 2}])
def test_variables_must_be_values_of_json(value: object) -> None:
    with pytest.raises(ModelError, match="variables must be JSON values"):
        ChatTemplate("{{ x }}").render([], x=value)


def test_the_process_survives_a_fork_a_kill_and_threads() -> None:
    done = python("-W", "ignore", "-c", PROCESSES)
    assert (done.stdout, done.stderr) == ("done\n", "")


PROCESSES = """
import os
from concurrent.futures import ThreadPoolExecutor
from ggmlb.models.gguf import ChatTemplate, chat
template = ChatTemplate("{{ bos_token }}{{ n }}", "<s>")
def render(n):
    return template.render([], n=n)
assert render(0) == "<s>0"
if not (child := os.fork()):
    os._exit(0 if render(1) == "<s>1" else 1)
assert render(2) == "<s>2" and os.waitpid(child, 0)[1] == 0
chat._sandbox._process.kill()
chat._sandbox._process.wait()
assert render(3) == "<s>3"
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(render, range(200))) == [f"<s>{n}" for n in range(200)]
print("done")
"""


def test_without_jinja2_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from ggmlb.models.gguf import ChatTemplate\n"
        "try:\n    ChatTemplate('')\nexcept ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "chat templates need jinja2: pip install 'ggmlb[models]'\n"


def test_jinja2_is_imported_only_for_a_template() -> None:
    code = "import sys, ggmlb.models.gguf; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
