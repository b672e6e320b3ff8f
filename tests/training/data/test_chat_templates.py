"""Conversations become the tokens of transformers' `apply_chat_template`, and the loss counts the answers alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")


from tests.training.data import chat_templates as known

from meshwright.errors import InputError
from meshwright.training.data.chat import JinjaChat
from meshwright.training.data.conversations import Conversation, conversation_of
from meshwright.training.data.records import RecordCounts, read_records, rules_from_options
from meshwright.training.data.templates import TEMPLATE_DATE, render
from meshwright.training.data.tokenization import _encode, _parts
from meshwright.training.data.tokenizer import JsonTokenizer, tokenizer_from_path

TALK = [
    {"role": "user", "content": "What is <b>2 + 2</b>?"},
    {"role": "assistant", "content": "Four, ça va 🙂."},
    {"role": "user", "content": "And\n\nthree?"},
    {"role": "assistant", "content": "Six."},
]
BRIEF = [{"role": "system", "content": "Be brief."}, *TALK]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Now & here", "parameters": {"type": "object"}}}
]


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": arguments}}


def tool_talk(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "content": "sun <1>", "tool_call_id": "c1"},
        {"role": "assistant", "content": "No."},
    ]


@pytest.fixture(scope="module")
def vocabulary() -> str:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(known.SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(["the assistant and the user say system words in a line"] * 3, trainer)
    return model.to_str()


def our_tokenizer(text: str, template: Any) -> JsonTokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return JsonTokenizer(text, name="t", config=config)


def tokens_of(tokenizer: JsonTokenizer, record: dict[str, Any], **rules: str) -> tuple[list[int], list[str]]:
    """The tokens of a record, and the text of each run of trained tokens."""
    records = [("x:1", record)]
    documents = list(
        read_records(records, rules=rules_from_options(rules, name="x"), chat=tokenizer.chat, counts=RecordCounts())
    )
    (tokens,) = _encode([*_parts(documents)], tokenizer)
    assert tokens.trained_N is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.trained_N.astype(int), [0]])))
    decode = tokenizer._tokenizer.decode
    answers = [decode(tokens.ids_N[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]
    return tokens.ids_N.tolist(), answers


CASES: dict[str, tuple[str, list[dict[str, Any]], Any, list[str]]] = {
    "chatml": (known.CHATML, BRIEF, None, ["Four, ça va 🙂.<|im_end|>", "Six.<|im_end|>"]),
    "llama3": (known.LLAMA3, BRIEF, None, ["Four, ça va 🙂.<|eot_id|>", "Six.<|eot_id|>"]),
    "llama31": (known.LLAMA31, BRIEF, None, ["Four, ça va 🙂.<|eot_id|>", "Six.<|eot_id|>"]),
    "llama31-tools": (
        known.LLAMA31, tool_talk({"city": "Ulm"}), TOOLS,
        ['{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>', "No.<|eot_id|>"],
    ),
    "qwen2.5": (known.QWEN25, TALK, None, ["Four, ça va 🙂.<|im_end|>", "Six.<|im_end|>"]),
    "qwen2.5-tools": (
        known.QWEN25, tool_talk({"city": "Ulm"}), TOOLS,
        ['<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>', "No.<|im_end|>"],
    ),
    "qwen3": (known.QWEN3, BRIEF[:3], None, ["<think>\n\n</think>\n\nFour, ça va 🙂.<|im_end|>"]),
    "mistral": (known.MISTRAL, TALK, None, [" Four, ça va 🙂.</s>", " Six.</s>"]),
    "gemma": (known.GEMMA, TALK, None, ["Four, ça va 🙂.<end_of_turn>", "Six.<end_of_turn>"]),
    "phi3": (known.PHI3, BRIEF, None, ["Four, ça va 🙂.<|end|>", "Six.<|end|>\n</s>"]),
    "deepseek-tools": (
        known.DEEPSEEK, tool_talk('{"city": "Ulm"}'), None,
        ['weather\n```json\n{"city": "Ulm"}\n```</s>', "No.</s>"],
    ),
    "generation": (known.GENERATION, BRIEF, None, ["Four, ça va 🙂.<|im_end|>", "Six.<|im_end|>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers_and_answers_are_trained(vocabulary: str, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    template, messages, tools, answers = CASES[name]
    ours, trained = tokens_of(our_tokenizer(vocabulary, template), {"messages": messages, "tools": tools})
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(vocabulary), bos_token="<s>", eos_token="</s>"
    )
    given = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=True, return_dict=False,
        date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
    )  # fmt: skip
    assert ours == given
    assert trained == [answer.lstrip("\n") if answer.startswith("\n<tool") else answer for answer in answers]


def test_generation_blocks_are_those_of_transformers(vocabulary: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = our_tokenizer(vocabulary, known.GENERATION)
    (document,) = _encode([*_parts([tokenizer.chat.render(Conversation(messages=BRIEF))])], tokenizer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(vocabulary), bos_token="<s>", eos_token="</s>"
    ).apply_chat_template(BRIEF, chat_template=known.GENERATION, return_dict=True, return_assistant_tokens_mask=True)
    assert document.ids_N.tolist() == theirs["input_ids"]
    assert document.trained_N is not None
    assert document.trained_N.astype(int).tolist() == theirs["assistant_masks"]


def test_a_template_that_rewrites_earlier_answers_is_refused_unless_only_the_last_is_trained(vocabulary: str) -> None:
    qwen3 = our_tokenizer(vocabulary, known.QWEN3)
    mistral = our_tokenizer(vocabulary, known.MISTRAL)
    for tokenizer, messages in ((qwen3, TALK), (mistral, BRIEF)):
        with pytest.raises(InputError, match=r"x:1: the chat template rewrites.*message [23]") as found:
            tokens_of(tokenizer, {"messages": messages})
        assert "answers=last" in str(found.value)
    assert tokens_of(qwen3, {"messages": TALK}, answers="last")[1] == ["<think>\n\n</think>\n\nSix.<|im_end|>"]
    with pytest.raises(InputError, match="message 5"):  # without the answer the prompt has the system message
        tokens_of(mistral, {"messages": BRIEF}, answers="last")
    flagged = [TALK[0], TALK[1] | {"train": False}, *TALK[2:]]
    assert tokens_of(qwen3, {"messages": flagged})[1] == ["<think>\n\n</think>\n\nSix.<|im_end|>"]


def test_a_turn_that_opens_with_text_of_its_own_is_refused_with_a_way_on(vocabulary: str) -> None:
    """As DeepSeek-R1's templates do: the prompt ends with <think>, which finished answers do not have."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>{begin}{{ m.content }}</s>{end}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
    )
    plain = our_tokenizer(vocabulary, template.replace("{begin}", "").replace("{end}", ""))
    with pytest.raises(InputError, match="message 2 has no fixed place") as found:
        tokens_of(plain, {"messages": TALK[:2]})
    assert "{% generation %}" in str(found.value)
    marked = template.replace("{begin}", "{% generation %}").replace("{end}", "{% endgeneration %}")
    assert tokens_of(our_tokenizer(vocabulary, marked), {"messages": TALK[:2]})[1] == ["Four, ça va 🙂.</s>"]


def test_variables_of_the_template_and_reasoning_come_from_the_record(vocabulary: str) -> None:
    tokenizer = our_tokenizer(vocabulary, known.QWEN3)
    thought = [TALK[0], {"role": "assistant", "content": "Four.", "reasoning": "2 and 2"}]
    assert tokens_of(tokenizer, {"messages": thought})[1] == ["<think>\n2 and 2\n</think>\n\nFour.<|im_end|>"]
    quiet = {"messages": TALK[:2], "chat_template_kwargs": {"enable_thinking": False}}
    assert tokens_of(tokenizer, quiet)[1] == ["Four, ça va 🙂.<|im_end|>"]


def test_tools_that_a_template_does_not_write_are_refused(vocabulary: str) -> None:
    tokenizer = our_tokenizer(vocabulary, known.CHATML)
    with pytest.raises(InputError, match="x:1: the record has tools, which the chat template does not write"):
        tokens_of(tokenizer, {"messages": TALK, "tools": TOOLS})
    with pytest.raises(InputError, match="x:1: a message has tool_calls"):
        tokens_of(tokenizer, {"messages": tool_talk("{}")})


def test_named_templates_and_files_are_chosen_as_transformers_does(vocabulary: str, tmp_path: Path) -> None:
    named = [{"name": "default", "template": known.CHATML}, {"name": "tool_use", "template": known.QWEN25}]
    (tmp_path / "tokenizer.json").write_text(vocabulary)
    config = {"eos_token": "</s>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = tokenizer_from_path(tmp_path).chat
    assert "You are a helpful assistant." in chat.render(Conversation(messages=TALK, tools=TOOLS)).text
    assert "You are a helpful assistant." not in chat.render(Conversation(messages=TALK)).text
    (tmp_path / "chat_template.jinja").write_text("{{ 'of the file' }}")
    assert tokenizer_from_path(tmp_path).chat.render(Conversation(messages=TALK[:1])).text == "of the file"
    (tmp_path / "chat_template.jinja").unlink()
    config["chat_template"] = [{"name": "other", "template": ""}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="one called default"):
        tokenizer_from_path(tmp_path)


def test_the_day_of_a_template_is_always_the_same() -> None:
    chat = JinjaChat(template="{{ strftime_now('%Y-%m-%d') }}", marks={})
    assert chat.render(Conversation(messages=TALK[:1])).text == datetime(2024, 7, 26).strftime("%Y-%m-%d")


def test_a_prompt_ends_where_the_assistant_speaks() -> None:
    chat = JinjaChat(template=known.LLAMA3, marks={"bos_token": "<s>", "eos_token": "</s>"})
    assert chat.prompt(Conversation(messages=TALK[:1])).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ ['a'] * 1000000 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[10 ** 30].content }}{{ messages.pop() }}",
    ],
)
def test_a_hostile_template_is_bad_input_and_ends(template):
    with pytest.raises(InputError, match="chat template"):
        render(template, {"messages": TALK})


def test_loops_have_their_variables_and_short_products_their_value():
    template = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
    )
    assert render(template + "{{ '-' * 3 }}{{ 2 ** 3 * 1.5 }}", {"messages": TALK}) == "1/2False2/2True---12.0"


FORMS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": TALK[:2]},
    "system, two turns": {"messages": BRIEF},
    "thoughts": {"messages": [TALK[0], {"role": "assistant", "content": "Four.", "reasoning_content": "2 and 2"}]},
    "thoughts in the text": {"messages": [TALK[0], {"role": "assistant", "content": "<think>\n2\n</think>\n\nFour."}]},
    "quiet": {"messages": TALK[:2], "chat_template_kwargs": {"enable_thinking": False}},
    "tools": {"messages": tool_talk({"city": "Ulm"}), "tools": TOOLS},
    "tools that nobody calls": {"messages": TALK[:2], "tools": TOOLS},
    "developer": {"messages": [{"role": "developer", "content": "Be <brief>."}, *TALK[:2]]},
    "braces": {"messages": [{"role": "user", "content": "{{ x }} {% y %} \\n"}, TALK[1]]},
}
TEXTS = sorted(name for name, value in vars(known).items() if name.isupper() and isinstance(value, str))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_conversation_and_its_prompt_are_written_as_transformers_writes_them_or_refused(name: str, form: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    record, template = FORMS[form], getattr(known, name)
    whole = conversation_of(record, record["messages"])
    talks = {False: whole, True: replace(whole, messages=whole.messages[:-1])}
    for is_asked, talk in talks.items():
        chat = JinjaChat(template=template, marks=marks)
        variables = marks | dict(talk.settings or {}) | {"date_string": TEMPLATE_DATE.strftime("%d %b %Y")}
        given = [dict(message) for message in record["messages"][: len(talk.messages)]]
        try:
            ours = chat.prompt(talk) if is_asked else chat.render(talk).text
        except InputError:
            ours = None
        try:
            theirs = utils.render_jinja_template(
                [given], tools=record.get("tools"), chat_template=template, add_generation_prompt=is_asked, **variables
            )[0][0]
        except Exception:  # jinja2 and Python raise what templates do
            theirs = None
        if ours is not None and theirs is not None:
            assert ours == theirs
        else:
            assert ours is None or name == "DEEPSEEK"  # joins arguments of tools as text, which ours gives it
