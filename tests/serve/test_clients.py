"""The server as real clients use it: OpenAI's package, and several at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ggmlb.models import TextModel, default_text_model
from tests.serve.conftest import Served

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_are_those_of_the_model(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    status, told = served.call("/v1/chat/completions", body)
    assert status == 200
    with TextModel(default_text_model(), n_ctx=256) as model:
        expected = model.generate(HELLO, max_tokens=12, temperature=0, logprobs=3)
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == "length"
    assert told["usage"]["prompt_tokens"] == len(expected.prompt_tokens)
    assert told["usage"]["completion_tokens"] == 12
    tokens = choice["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in tokens] == [3] * 12
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == expected.text


def test_openai_streams_and_asks_for_forms_tools_and_embeddings(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    (model,) = client.models.list()
    given = {"model": model.id, "messages": HELLO, "temperature": 0, "max_tokens": 12}
    asked = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    stream = list(client.chat.completions.create(**given, **asked))
    choices = [part.choices[0] for part in stream if part.choices]
    pieces = [choice.delta.content or "" for choice in choices]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert bytes(b for token in tokens for b in token.bytes).decode() == "".join(pieces) and len(pieces) > 5
    assert len(tokens) == 12 and choices[-1].finish_reason == "length"
    assert stream[-1].usage.completion_tokens == 12
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = client.chat.completions.create(
        model=model.id, messages=HELLO, response_format=form, max_tokens=200, temperature=0
    )
    assert set(json.loads(person.choices[0].message.content)) == {"name", "age"}
    for streamed in (False, True):
        asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "stream": streamed}
        asked["temperature"] = 0
        found = client.chat.completions.create(model=model.id, messages=HELLO, **asked)
        if streamed:
            deltas = [part.choices[0].delta for part in found]
            assert not any(delta.content for delta in deltas)
            (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        else:
            calls = found.choices[0].message.tool_calls
            assert found.choices[0].finish_reason == "tool_calls"
        assert calls[0].function.name == "weather" and set(json.loads(calls[0].function.arguments)) == {
            "city"
        }
    rows = client.embeddings.create(model=model.id, input=["a cat", "a dog"]).data
    assert len(rows) == 2 and abs(sum(x * x for x in rows[0].embedding) - 1) < 1e-3
    text = client.completions.create(
        model=model.id, prompt=["One, two,", "A, B,"], n=2, max_tokens=8, stop=["\n"], logprobs=2
    )
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    assert all("\n" not in choice.text and choice.logprobs.token_logprobs for choice in text.choices)
    given = {"model": model.id, "prompt": "One, two,", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**given).choices[0].logprobs
    parts = [part.choices[0].logprobs for part in client.completions.create(**given, stream=True)]
    for name in ("tokens", "text_offset", "top_logprobs"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)
    assert whole.token_logprobs == [max(best.values()) for best in whole.top_logprobs]
    only = client.completions.create(model=model.id, prompt="One", max_tokens=3, logit_bias={"30": 1e6})
    assert only.usage.completion_tokens == 3 and len(set(only.choices[0].text)) <= 2
    with pytest.raises(openai.BadRequestError, match="n_ctx is 2048") as caught:
        client.completions.create(model=model.id, prompt="word " * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_langchain_answers(served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="any", max_tokens=8)
    assert chat.invoke("Hello").content
    assert "".join(part.content for part in chat.stream("Hello"))


def test_many_at_once_are_computed_together(served: Served) -> None:
    bodies = [{"prompt": f"The number {i} is", "max_tokens": 8, "ignore_eos": True} for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda body: served.call("/v1/completions", body), bodies))
    assert [(status, told["usage"]["completion_tokens"]) for status, told in found] == [(200, 8)] * 16


def test_a_conversation_computes_only_its_new_tokens(served: Served) -> None:
    messages = [{"role": "user", "content": "Tell me about the river Rhine and its cities."}]
    first = served.call("/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0})[1]
    messages += [first["choices"][0]["message"], {"role": "user", "content": "More."}]
    second = served.call("/v1/chat/completions", {"messages": messages, "max_tokens": 2})[1]["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] + 15
