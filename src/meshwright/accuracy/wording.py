"""Words by which tables of runs mean the same thing: yes and no, number formats, names of models."""

from __future__ import annotations

import re

from meshwright.accuracy.shipped import wordings

_YES = re.compile(r"(?:yes|y|true|on|enabled?|with|1)\b|w/(?!o)")
_NO = re.compile(r"(?:no|n(?!/)|none|false|off|disabled?|never|without|w/o|0)\b|-$")
_UNSTATED = re.compile(
    r"(?:n/?a|unknown|unspecified|unclear|not (?:stated|given|reported|specified)|\?+|tbd|-+|[\u2013\u2014])$"
)

_INSTANCE = re.compile(
    r"[-_ ]\(?(?:instruct|base|chat|it|hf|sft|dpo|thinking|pre-?train(?:ing)?|q?lora|peft"
    r"|(?:full[- ]?)?fine-?tun(?:e|ing)|dense|moe|(?:bf16|fp16|(?:mx)?fp8|(?:mx|nv)?fp4)(?: (?:weights|training))?"
    r"|\d{4}|\d+k(?: (?:ctx|context))?|1m|quanti[sz]ed|dynamic|w\da\d+|awq|gptq)\)?$",
    re.IGNORECASE,
)
"""Endings of names that tell weights, tasks and formats apart, and not shapes: "llama3.1_8B-FP8-pretrain"."""
_SUBJECT = re.compile(r"[-_ ](?:coder|math)(?=[-_ ]\d)", re.IGNORECASE)
"""Such a part of a name before a size: "Qwen2.5-Coder-7B"."""


def yes_or_no(text: str) -> bool | None:
    """Answer of a cell, by its first word; None where it is neither yes nor no.

    >>> yes_or_no("Enabled"), yes_or_no("none (perf preset)"), yes_or_no("selective")
    (True, False, None)
    """
    text = text.strip().lower()
    if _YES.match(text):
        return True
    return False if _NO.match(text) else None


def stated(text: str) -> str:
    """A cell in lower case; empty where its words say that nothing is known.

    >>> stated("Full"), stated("n/a"), stated("not reported")
    ('full', '', '')
    """
    text = text.strip().lower()
    return "" if _UNSTATED.match(text) else text


_THOUSANDS = re.compile(r"^\d{1,3}(?:[, \u00a0\u2009\u202f'_]\d{3})+(?:\.\d+)?$")


def plain_number(text: str) -> str:
    """A number without separators of thousands and without its percent sign.

    >>> plain_number("12,345.6"), plain_number("45.2 %"), plain_number("1,5")
    ('12345.6', '45.2', '1,5')
    """
    text = text.strip().removesuffix("%").rstrip()
    return re.sub(r"[^\d.]", "", text) if _THOUSANDS.match(text) else text


def number_format(text: str) -> str:
    """The precision recipe that a cell names, or the cell in lower case where no words are known.

    >>> number_format("bf16-mixed"), number_format("FP8 (blockwise)"), number_format("fp8 current scaling")
    ('bf16', 'fp8_blockwise', 'fp8')
    """
    text = text.strip().lower()
    found = next((name for pattern, name in wordings()["formats"] if re.match(pattern, text)), None)
    if found or not re.match(r"(?:fp|float)-?8|e4m3", text):
        return found or text
    return next((name for pattern, name in wordings()["eight_bits"] if re.search(pattern, text)), "fp8")


def shape_name(name: str) -> str:
    """A model's name without the owner before it and the kind of weights after it.

    >>> shape_name("meta-llama/Meta-Llama-3-70B-Instruct"), shape_name("Qwen3-8B-FP8-pretrain")
    ('Llama-3-70B', 'Qwen3-8B')
    """
    name = re.sub(r"^(?:[\w.-]+/)?(?:(?:meta|nvidia|megatron)[-_ ])?(?=\w)", "", name.strip(), flags=re.IGNORECASE)
    name = _SUBJECT.sub("", name)
    while (shorter := _INSTANCE.sub("", name)) != name:
        name = shorter
    return name
