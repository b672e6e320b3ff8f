"""Statements of a note in free text: the switches it names, and whether each was on, off, or only mentioned.

    clause      between ; . line ends and options of a command line
    segment     a part of a clause between commas and brackets
    mention     words of the vocabulary (`wordings.toml`) in a clause
    polarity    on, off, or open: compared with, planned, optional, of a part of the run

A word that switches off stands before a mention in its segment ("without CUDA graphs", "no A or B") or behind it
("A: off", "A and B disabled"). A word before a colon holds for its whole clause ("disabled: A, B"). An open
statement is no condition: it is listed with the clauses that gave none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property, lru_cache
from typing import Any

from meshwright.accuracy.shipped import wordings


class Polarity(Enum):
    """A mention's answer."""

    ON = "on"
    OFF = "off"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class Mention:
    """Words of a note that name a switch. `value`: the switch's by the polarity; None where the polarity
    decides none."""

    switch: str
    value: Any
    polarity: Polarity
    number: str  # what the pattern's group captures; empty without one
    start: int
    end: int
    is_generic: bool  # agrees with any more specific value
    rank: int  # position in the vocabulary of the switch: earlier words are the more specific ones


@dataclass(frozen=True, kw_only=True)
class Clause:
    """A clause in plain form with its mentions."""

    text: str
    mentions: tuple[Mention, ...]


@dataclass(frozen=True, kw_only=True)
class Statements:
    """Everything that a note states."""

    clauses: tuple[Clause, ...]

    def mentions(self, switch: str) -> list[Mention]:
        """Mentions of a switch that say something of the run, the most specific first."""
        return self._mentions.get(switch, [])

    @cached_property
    def _mentions(self) -> dict[str, list[Mention]]:
        found = sorted((m for c in self.clauses for m in c.mentions), key=lambda m: m.rank)
        switches = {m.switch for m in found}
        return {s: [m for m in found if m.switch == s and m.polarity is not Polarity.OPEN] for s in switches}

    def value(self, switch: str) -> Any:
        """The value that a note states for a switch; None where it states none, or several numbers.

        Switches that are on precede switches that are off.
        """
        found = [m for m in self.mentions(switch) if m.value not in (None, "")]
        if len({m.number for m in found if m.number and m.value == m.number}) > 1:
            return None
        return next((m.value for m in sorted(found, key=lambda m: m.polarity is Polarity.OFF)), None)

    def contradictions(self) -> tuple[str, ...]:
        """Switches of which the note says two things, with the one that is used."""
        found = []
        for switch in dict.fromkeys(m.switch for c in self.clauses for m in c.mentions):
            said = self.mentions(switch)
            on = [m for m in said if m.polarity is Polarity.ON and m.value is not None]
            special = {str(m.value) for m in on if not m.is_generic}
            opposite = [
                m for m in said if m.polarity is Polarity.OFF and (m.is_generic or m.rank in {n.rank for n in on})
            ]
            if len(special) > 1 or (on and opposite):
                values = sorted(special | {str(m.value) for m in (*on, *opposite)})
                used = "none" if (value := self.value(switch)) is None else value
                found.append(f"notes say {' and '.join(values)} of {switch}: {used} used")
        return tuple(found)

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Things that the note states and no prediction takes, each once."""
        found = {
            what: clause.text[match.start() : match.end()]
            for clause in self.clauses
            for pattern, what in _not_modelled()
            if (match := pattern.search(clause.text))
        }
        return tuple(f"{what}: not modelled ({phrase})" for what, phrase in found.items())

    @property
    def unread(self) -> tuple[str, ...]:
        """Clauses that name nothing known, or of which a part is open."""
        return tuple(c.text for c in self.clauses if _leaves_something(c))


# --- plain form ---

_NAME = r"(?:dp )?(?:[mg]bs|e?tp|v?pp|cp|ep|dp|vp|ga|fsdp|shard|replicate)"
_LISTS = tuple(
    re.compile(
        rf"(?<!\w)[(\[]?({_NAME}(?:{sign}{_NAME})+)[)\]]?[=: ][(\[]?({number}(?:{sign}{number})+)(?![\w.])[)\]]?"
    )
    for sign, number in ((r" ?[/x] ?", r"\d[\d,]*"), (r", ?", r"\d+"))
)
"""Degrees that share one list: "TP/PP = 4/8", "(TP, PP)=(4, 8)"."""
_NAMED_BEHIND = re.compile(rf"(?<![\w.])(\d+(?: ?[/x] ?\d+)+) ?\(({_NAME}(?: ?[/x] ?{_NAME})+)\)")
"""The same with its names behind it: "4x8 (TP x PP)"."""


def plain(text: str) -> str:
    """`text` in lower case with one spelling of signs; words that hyphens or underscores join stand apart.

    >>> plain("HybridEP; TE CUDA-graphs w/o `moe_router`")
    'hybridep; te cuda graphs without moe router'
    """
    text = text.lower()
    for pattern, spelling in wordings()["spellings"]:
        text = re.sub(pattern, spelling, text)
    text = _NAMED_BEHIND.sub(r"\2=\1", text)
    for pattern in _LISTS:
        text = pattern.sub(_paired, text)
    return text.strip()


def _paired(found: re.Match[str]) -> str:
    """Each name of a list with its number; the list as it stands where their counts differ."""
    sign = r" ?, ?" if re.search(r"[a-z] ?,", found[1]) else r" ?[/x] ?"
    names, numbers = re.split(sign, found[1]), re.split(sign, found[2])
    if len(names) != len(numbers):
        return found[0]
    group = "dp " if names[0].startswith("dp ") else ""  # "dp shard/replicate"
    return ", ".join(f"{group}{name.removeprefix(group)}={n}" for name, n in zip(names, numbers, strict=True))


_CLAUSES = re.compile(r";|\n|\||\. |\.$|\bbut\b|\bwhile\b|\bwhereas\b|\balthough\b|\bhowever\b")
_SEGMENTS = re.compile(r"[,()\[\]{}]")

# --- polarity ---

_JOINING = r"^\s*(?P<link>,? ?(?:and|or|nor|&)|/|,|\+)\s*(?:the |a |no )?$"


@dataclass(frozen=True)
class _Grammar:
    """Patterns of the words around a mention, from the lists of `wordings.toml`."""

    off_before: re.Pattern[str]
    off_behind: re.Pattern[str]
    off_value: re.Pattern[str]
    on_behind: re.Pattern[str]
    off_head: re.Pattern[str]
    open_before: re.Pattern[str]
    open_behind: re.Pattern[str]
    of_a_part: re.Pattern[str]
    tensor_before: re.Pattern[str]
    tensor_behind: re.Pattern[str]


@cache
def _grammar() -> _Grammar:
    lists = {name: "|".join(listed) for name, listed in wordings()["grammar"].items()}
    gap = rf"(?:\s+(?!(?:{lists['ends_a_gap']})\b)[\w.]+){{0,3}}\s*"
    links = rf"(?:(?:{lists['links']})\s+)*"
    scope = rf"(?:for|in|on|during|at|to|by)\s+(?!{lists['whole']})(?:the )?(?:{lists['part']})"
    return _Grammar(
        off_before=re.compile(rf"\b(?P<word>{lists['off_before']}){gap}$"),
        off_behind=re.compile(rf"^[\s=:(]*{links}(?:{lists['off_behind']})\b"),
        off_value=re.compile(
            r"^\s*(?:[=:(]\s*(?:none|null|never|0)|=(?:no|n)|[:(]\s*(?:no|n)(?= *(?:[,)/+]|$|and\b|or\b)))(?![\w.])"
        ),
        on_behind=re.compile(rf"^[\s=:(]*{links}(?:{lists['on_behind']})\b|^\s*[=:]\s*1(?![\w.])"),
        off_head=re.compile(r"^(?:disabled|off|without|not (?:used|enabled)|turned off|no|none)\s*:"),
        open_before=re.compile(rf"(?:{lists['open_before']})"),
        open_behind=re.compile(rf"^[\s(:]*{links}(?:{lists['open_behind']})"),
        tensor_before=re.compile(rf"\b(?:{lists['tensor_before']})(?: \w+)? ?(?:in|as|at|=|:) ?$"),
        tensor_behind=re.compile(rf"^ (?:routed |shared |primary )?(?:{lists['tensor_behind']})\b"),
        of_a_part=re.compile(
            rf"^[\s=:(]*(?:(?:only|on|off|enabled|disabled|used|not|{lists['links']})\s+)*(?:{scope}"
            rf"|{lists['but_a_part']})"
        ),
    )


_OF_PARTS = ("adapters",)
"""Switches that always name a part of the model: "LoRA on the output" is LoRA."""


def _polarity(text: str, start: int, end: int, *, is_of_parts: bool) -> tuple[Polarity | None, Polarity | None]:
    """Answers before and behind a mention; None: nothing is said there."""
    grammar, segment, behind = _grammar(), _SEGMENTS.split(text[:start])[-1], text[end:]
    if re.search(r"\bwith(?:out)? (?:and|or) with(?:out)?\s*$", segment) or re.match(r",\d", behind):
        return None, Polarity.OPEN
    if grammar.open_behind.match(behind) or (grammar.of_a_part.match(behind) and not is_of_parts):
        return None, Polarity.OPEN
    after = None
    if grammar.off_behind.match(behind) or grammar.off_value.match(behind):
        after = Polarity.OFF
    elif grammar.on_behind.match(behind):
        after = Polarity.ON
    if off := grammar.off_before.search(segment):
        talked = grammar.open_before.search(segment[: off.start()])
        return (Polarity.OPEN if talked else Polarity.OFF), after
    if grammar.open_before.search(segment):
        return Polarity.OPEN, after
    return None, after


def _settled(text: str, found: list[Mention]) -> list[Mention]:
    """`found` in the order of the clause with their polarities; joined mentions share one."""
    found = sorted(found, key=lambda m: (m.start, -m.end))
    answers = [_polarity(text, m.start, m.end, is_of_parts=m.switch in _OF_PARTS) for m in found]
    grammar = _grammar()
    for i, m in enumerate(found):
        is_of_a_tensor = grammar.tensor_before.search(text[: m.start]) or grammar.tensor_behind.match(text[m.end :])
        is_of_gemms = any(o.switch == "narrow_gemms" and o.start <= m.start and m.end <= o.end for o in found)
        if m.switch == "precision" and (is_of_a_tensor or is_of_gemms):
            answers[i] = (None if is_of_gemms else Polarity.OPEN, None)
    result: list[Polarity | None] = [
        before if before is Polarity.OPEN else after or before for before, after in answers
    ]
    if grammar.off_head.match(text):
        result = [answer or Polarity.OFF for answer in result]
    for chain in _chains(text, found):
        first, *others = chain.indexes
        if answers[first][0] is Polarity.OFF:
            for i in others:
                result[i] = result[i] or (Polarity.OPEN if chain.is_ambiguous else Polarity.OFF)
        elif result[first] is None:
            for i in chain.indexes:
                result[i] = result[i] or result[others[-1]]
    return [replace(m, polarity=answer or Polarity.ON) for m, answer in zip(found, result, strict=True)]


@dataclass(frozen=True)
class _Chain:
    """Neighbouring mentions that "and" or "or" joins: a word before the first or behind the last holds for all.

    is_ambiguous: "no A and B", where B may be on.
    """

    indexes: list[int]
    is_ambiguous: bool


def _chains(text: str, found: list[Mention]) -> list[_Chain]:
    chains: list[tuple[list[int], list[str]]] = []
    for i, mention in enumerate(found):
        gap = text[found[i - 1].end : mention.start] if i else ""
        joined = re.match(_JOINING, gap) if i and found[i - 1].end <= mention.start else None
        if joined:
            chains[-1][0].append(i)
            chains[-1][1].append(joined["link"].strip(", ") or ",")
        else:
            chains.append(([i], []))
    result = []
    for indexes, links in chains:
        if not links or links[-1] in (",", "+"):
            continue
        off = _grammar().off_before.search(_SEGMENTS.split(text[: found[indexes[0]].start])[-1])
        ambiguous = off is not None and off["word"] == "no" and links[-1] in ("and", "&", "/")
        result.append(_Chain(indexes, ambiguous))
    return result


# --- reading ---


def _pattern(say: str | list[str]) -> re.Pattern[str]:
    patterns = say if isinstance(say, str) else "|".join(say)
    return re.compile(rf"(?<!\w)(?:{patterns})(?![a-z]|\.[a-z])")


@cache
def _vocabulary() -> tuple[tuple[str, int, re.Pattern[str], dict[str, Any]], ...]:
    return tuple(
        (switch, rank, _pattern(entry["say"]), entry)
        for switch, entries in wordings()["switch"].items()
        for rank, entry in enumerate(entries)
    )


def _mentions(text: str) -> list[Mention]:
    taken: dict[str, list[tuple[int, int]]] = {}
    found = []
    for switch, rank, pattern, entry in _vocabulary():
        for match in pattern.finditer(text):
            span = match.span()
            spans = taken.setdefault(switch, [])
            if any(span[0] < end and start < span[1] for start, end in spans):
                continue
            spans.append(span)
            number = re.sub(r"(?<=\d),(?=\d)", "", next((g for g in match.groups() if g), ""))
            found.append(
                Mention(
                    switch=switch,
                    value=None,
                    polarity=Polarity.ON,
                    number=number,
                    start=span[0],
                    end=span[1],
                    rank=rank,
                    is_generic=entry.get("generic", False),
                )
            )
    return [m for m in found if not any(_holds(other, m) for other in found)]


_INNER = ("precision", "scaling")
"""Switches whose words do not count inside the words of another: the format of attention is not the GEMMs'."""


def _holds(outer: Mention, inner: Mention) -> bool:
    """True where `inner` is no statement of its own: a format or general words inside longer ones."""
    if outer.switch in (inner.switch, "narrow_gemms") or not (outer.start <= inner.start and inner.end <= outer.end):
        return False
    is_longer = outer.end - outer.start > inner.end - inner.start
    return (inner.switch in _INNER and outer.switch not in _INNER) or (inner.is_generic and is_longer)


def _with_value(mention: Mention) -> Mention:
    entry = wordings()["switch"][mention.switch][mention.rank]
    value = entry.get("on") if mention.polarity is Polarity.ON else entry.get("off")
    if mention.polarity is Polarity.OPEN:
        value = None
    return replace(mention, value=mention.number if value == "captured" else value)


def _clauses(note: str) -> list[str]:
    """Clauses of `note`; one that is only an answer belongs to the one before: "CUDA graphs - not enabled"."""
    clauses: list[str] = []
    grammar = _grammar()
    for part in _CLAUSES.split(plain(note)):
        text = part.strip(" ,")
        answers = (grammar.off_behind, grammar.on_behind, grammar.open_behind)
        if text and clauses and any(answer.fullmatch(text) for answer in answers):
            clauses[-1] = f"{clauses[-1]}: {text}"
        elif text:
            clauses.append(text)
    return clauses


@lru_cache(maxsize=4096)
def read_statements(note: str) -> Statements:
    """Return what `note` states.

    >>> said = read_statements("DeepEP, no CUDA graphs; compared with HybridEP; trial 7")
    >>> said.value("dispatcher"), said.value("cuda_graphs"), said.unread
    ('deepep', 'none', ('compared with hybridep', 'trial 7'))
    """
    clauses = []
    for text in _clauses(note):
        mentions = tuple(_with_value(m) for m in _settled(text, _mentions(text)))
        clauses.append(Clause(text=text, mentions=mentions))
    return Statements(clauses=tuple(clauses))


@cache
def _not_modelled() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((_pattern(entry["say"]), entry["what"]) for entry in wordings()["not_modelled"])


@cache
def _fillers() -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(wordings()['fillers'])})\b")


def _leaves_something(clause: Clause) -> bool:
    """True where words of a clause are open or name nothing known."""
    if any(m.polarity is Polarity.OPEN or (m.value is None and not m.is_generic) for m in clause.mentions):
        return True
    left = list(clause.text)
    spans = [m.span() for pattern, _ in _not_modelled() for m in pattern.finditer(clause.text)]
    for start, end in (*spans, *((m.start, m.end) for m in clause.mentions)):
        left[start:end] = " " * (end - start)
    return re.search(r"\w", _fillers().sub(" ", "".join(left))) is not None
