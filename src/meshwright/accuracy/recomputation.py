"""Recomputation of a published row: its own words, its note's words, or its framework's recipe."""

from __future__ import annotations

import re
from fractions import Fraction

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.shipped import wordings
from meshwright.accuracy.software import Software, own_defaults
from meshwright.accuracy.statements import Clause, Mention, Polarity, read_statements
from meshwright.accuracy.wording import stated, yes_or_no
from meshwright.specs.model import Model
from meshwright.specs.plan import Recompute

NO_RECOMPUTATION = "no recomputation"
"""The note on rows that do not state it."""

_WHOLE_LAYERS = (
    r"custom|full|recompute_|selective layer|all\b|every\b|whole|unsloth|block|uniform|\d+ layers|ac$"
    r"|(?:activation|gradient)[-_ ]?(?:check-?point|recomput)|nothing_saveable|save_nothing"
    r"|(?:ckpt|checkpoint(?:ing)?|remat|recompute)$"
)
"""Beginnings that mean whole layers. Block and uniform are the ways in which Megatron-LM chooses them."""
_OFFLOADED = re.compile(r"(?:cpu )?(?:activations?|act)[ _-]offload\w*(?: ratio [\d.]+)?")
_FILLERS = re.compile(r"(?:activation|gradient)s?[-_ ]?(?:check-?point|recomput)\w*")
"""Words that say that something is recomputed, and not what."""
_OF_SOME = re.compile(r"\b(?:off|none|no|on|yes|enabled|disabled) (?:for|in|on|during) (?!all|every|each)")


def read_recompute(
    row: CsvRow, model: Model, *, is_split: bool, software: Software, notes: list[str]
) -> tuple[Recompute, tuple[str, ...], int | None]:
    """Kind, modules and layers per pipeline rank of recomputation.

    is_split: tensor or pipeline ranks share the model. Adds assumptions and words it did not understand to
    `notes`.
    """
    text = stated(row.text("recompute"))
    if text == "custom":
        text = _kept_tensors(row.text("notes")) or software.recipe_recompute or text  # a default is not it
    of_note = recompute_of_note(row.text("notes"))
    if of_note and (not text or _is_more(of_note, text)):
        text = of_note
        notes.append(f"recomputation {text}, as the note says")
    elif of_note and (of_note == "none") != (yes_or_no(text) is False):
        notes.append(f"notes say {of_note} of recomputation: its column used, {text}")
    if _OPEN_SHARE.search(text) and (share := _share_of_flops(row)) is not None:
        held = model.num_layers / (row.count("pp") or 1)
        layers = round(share * held)
        notes.append(f"{LAYERS_OF_FLOPS}: {layers} of {held:g}")
        if layers == 0:
            return Recompute.NONE, (), None
        return Recompute.FULL, (), layers if layers < held else None
    if not text:
        stack = software.stack
        own = own_defaults(stack.framework, stack.vintage, model.name, is_split=is_split)
        text = software.recipe_recompute or own.get("recompute", "")
        notes.append(f"recomputation {text}, the recipe of {software.title}" if text else NO_RECOMPUTATION)
    if _SELECTIVE.fullmatch(text) and not software.recipe_recompute:
        own = own_defaults(software.stack.framework, software.stack.vintage, "", is_split=is_split)
        text = usual if re.search("selective|sac", usual := own.get("recompute", "")) else text
    return _from_text(row, text, model.num_layers, notes)


_SELECTIVE = re.compile(r"selective(?: (?:ac|sac|re-?comput\w+|(?:activation )?checkpoint\w*))?|selective modules=\[\]")
"""Words that leave open what is recomputed: what the framework's own configurations have then."""
_OPEN_SHARE = re.compile(r"(?:fraction|share|number) .*not stated|(?:unknown|unstated) (?:fraction|share|number)")
"""Words of a row that recomputes whole layers, and does not say how many."""
LAYERS_OF_FLOPS = "recomputed layers by the hardware FLOPs that the row prints over the model's"
_FORWARD_SHARE = 1 / 3
"""FLOPs of a forward pass, which recomputation repeats, over those of a step."""


def _share_of_flops(row: CsvRow) -> float | None:
    """Share of the forward pass that the row's hardware FLOPs count twice; None where it does not print both."""
    model, hardware = row.number("mfu_pct"), row.number("hfu_pct")
    if not model or not hardware:
        return None
    return min(max((hardware / model - 1) / _FORWARD_SHARE, 0.0), 1.0)


def _is_more(of_note: str, column: str) -> bool:
    """True where a column names a kind of recomputation only, and the note its layers or modules."""
    return column in ("full", "selective") and of_note.startswith(f"{column} ") and of_note != "selective modules=[]"


def _from_text(
    row: CsvRow, text: str, num_layers: int, notes: list[str]
) -> tuple[Recompute, tuple[str, ...], int | None]:
    text = _OFFLOADED.sub("", text).strip(" +,;&")
    answer = yes_or_no(text) if text and recompute_of_note(text) != "none" else False
    if text and _OF_SOME.search(text):
        notes.append(f"recomputation '{text}' is of a part of the layers: not understood, none used")
        return Recompute.NONE, (), None
    if answer is False:
        return Recompute.NONE, (), None
    names_parts = re.search(r"selective|policy", text) or bool(_modules(text))
    if (answer and not names_parts) or re.match(_WHOLE_LAYERS, text):
        return Recompute.FULL, (), _recomputed_layers(row, text, num_layers, notes)
    text = _FILLERS.sub("", text)
    for policy in wordings()["recompute_policy"]:
        if re.search(policy["say"], text):
            notes.append(f"recomputation '{text}' ({policy['what']}) read as {', '.join(policy['modules'])}")
            return Recompute.SELECTIVE, tuple(policy["modules"]), None
    modules = tuple(_modules(text))
    reworded = "" if modules or "selective" in text else recompute_of_note(text)
    of_some = recompute_of_note(f"recompute {text}")
    if not modules and re.match("none|full (?:share|layers)=|selective layer", of_some):
        reworded = of_some
    if reworded and reworded != text:
        return _from_text(row, reworded, num_layers, notes)
    if not modules:
        modules = ("core_attention",)
        notes.append(f"recomputation '{text}' read as core_attention")
    return Recompute.SELECTIVE, modules, None


def _modules(text: str) -> list[str]:
    """Modules that `text` names, of those that selective recomputation may have."""
    return [entry["name"] for entry in wordings()["recompute_module"] if re.search(entry["say"], text)]


_KEPT = re.compile(r"\b(\w+?)(?:_0|_1)?=(?:device|offload)\b")
"""Tensors that MaxText's remat_policy=custom keeps, as its options name them."""


def _kept_tensors(notes: str) -> str:
    """Modules that are recomputed where notes list the kept tensors; empty where they list no projection."""
    kept = set(_KEPT.findall(notes))
    if not kept & {"query_proj", "qkv_proj"}:
        return ""
    modules = ["norm", "activation"]
    modules += [] if "context" in kept else ["core_attn"]
    modules += [] if "mlpwi" in kept else ["mlp", "moe"]
    return f"selective modules={modules}"


def _recomputed_layers(row: CsvRow, text: str, num_layers: int, notes: list[str]) -> int | None:
    """Layers per pipeline rank that full recomputation covers; None: all of them."""
    if "uniform" in text:  # the layers are those of a unit, and all are recomputed
        return None
    if text.startswith("selective layer") or re.search(r"every (?:2|second|other)(?:nd)?\b", text):  # torchtitan
        notes.append("every second layer recomputed")
        return max(1, num_layers // (2 * (row.count("pp") or 1)))
    if share := re.search(r"share=(\d+)/(\d+)", text):
        return max(1, round(num_layers * int(share[1]) / int(share[2]) / (row.count("pp") or 1)))
    if counted := re.search(r"layers=(\d+)|(?<![-\d])(\d+) layers|block\W+(\d+)", text):
        if not text.startswith(("full", "recompute_")):
            notes.append(f"recomputation '{text}' read as full")
        return max(1, int(next(filter(None, counted.groups()))))
    if ids := re.search(r"layer_ids \[(.*)\]", text):
        listed = re.findall(r"(\d+)(?:-(\d+))?", ids[1])
        notes.append("recomputed layers spread evenly over the pipeline")
        count = sum(int(last or first) - int(first) + 1 for first, last in listed)
        return max(1, count // (row.count("pp") or 1))
    if not text.startswith("full") or re.search(r"\bexcept\b|\bfor (?!all|every|each)", text):
        notes.append(f"recomputation '{text}' read as full")
    return None


# --- notes ---

_COUNTED = re.compile(
    r"(?:num )?layers[=: ](\d+)|(\d+) (?:of \d+ )?(?:transformer |decoder )?(?:layers|blocks)|(?:first|last) (\d+)\b"
)
_EVERY = re.compile(r"(?:every |option[=: ])(?:(2nd|second|other|2)|(\d+|third|fourth)\w*)(?: layers?| blocks?|$)")
_SHARE = re.compile(
    r"(?:(half|third|quarter)|(\d+) ?%|(\d+) ?/ ?(\d+))(?: of)?(?: the| all)?(?: \w+)? (?:layers|blocks)"
    r"|(?:selective checkpointing|recompute ratio)[=: ](\d+(?:\.\d+)?)(?: ?/ ?(\d+))?"
)
_PARTS = {"half": 2, "third": 3, "quarter": 4}
_ANSWERED_NO = re.compile(
    r"(?<!\w)(?:granularity|recompute|remat|checkpointing|ac|mode)? ?[=:] ?(?:none|null|false|off|no)\b"
    r"|^ ?(?:zero|0(?: of \d+)? layers?) (?:activation )?re ?comp|everything saveable"
)
_POLICY = re.compile(r"policy[=: ]*([\w ]+)")


def recompute_of_note(note: str) -> str:
    """Recomputation that a note states, in the words of the column; empty where it states none."""
    said = read_statements(note)
    found = [(c, m) for c in said.clauses for m in c.mentions if m.switch == "recompute"]
    found = [(c, m) for c, m in found if m.polarity is not Polarity.OPEN]
    if not found:
        return ""
    if all(m.polarity is Polarity.OFF for _, m in found):
        return "none"
    text = " ".join(_around(c, m) for c, m in found if m.polarity is Polarity.ON)
    if "->" in text or "\u2192" in text:  # from one to another
        return ""
    return _as_column(text)


def _share_of_layers(text: str) -> Fraction | None:
    """The share of the layers that `text` names; None where it names none."""
    if (found := _SHARE.search(text)) is None:
        return None
    word, percent, part, whole, of_blocks, in_blocks = found.groups()
    if word:
        return Fraction(1, _PARTS[word])
    share = Fraction(percent or part or of_blocks) / (int(100 if percent else whole or in_blocks or 1) or 1)
    return share if 0 < share <= 1 else None


def _around(clause: Clause, mention: Mention) -> str:
    """The words of a mention's segment, and of a list of modules behind it."""
    start = max(clause.text.rfind(sign, 0, mention.start) for sign in ",(") + 1
    text = clause.text[start:]
    for other in clause.mentions:  # another switch ends it
        if other.switch != "recompute" and other.start >= mention.end:
            text = clause.text[start : other.start]
            break
    return text


def _as_column(text: str) -> str:
    if _ANSWERED_NO.search(text):
        return "none"
    if named := _POLICY.search(text):
        policy = named[1].strip().split(" and ")[0].replace(" ", "_")
        return "full" if policy == "nothing_saveable" else policy
    if text.strip() == "recompute activations":  # an option of Megatron-LM
        return "selective modules=['core_attention']"
    if share := _share_of_layers(text):
        return "full" if share == 1 else f"full share={share.numerator}/{share.denominator}"
    if every := _EVERY.search(text):
        return "selective layer" if every[1] else "full"
    modules = _modules(_FILLERS.sub("", text))
    if re.search(r"\bper op\b|\bop\b|\bsac\b", text):
        return "selective (per-op sac)"
    if re.search(r"\b(?:full|whole|entire|block|uniform|all)\b", text) or not (modules or "selective" in text):
        counted = None if "uniform" in text else _COUNTED.search(text)
        return "full" if counted is None else f"full layers={next(g for g in counted.groups() if g)}"
    return f"selective modules={[m for m in modules if m != 'activation' or 'moe' not in text or 'act' in text]}"
