"""Wordings of notes, as others write them, and what they state (`wordings.txt`, written before the reader was run)."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.every_member import check_every

from meshwright.accuracy.recomputation import recompute_of_note
from meshwright.accuracy.shipped import wordings
from meshwright.accuracy.statements import read_statements

_LINES = [
    line.split("=>")
    for line in (Path(__file__).parent / "wordings.txt").read_text("utf-8").splitlines()
    if line.strip() and not line.startswith("# ")
]


def _stated(note: str) -> dict[str, str]:
    said = read_statements(note)
    values = {name: said.value(name) for name in wordings()["switch"] if name != "recompute"}
    values["recompute"] = recompute_of_note(note) or None
    return {name: str(value) for name, value in values.items() if value is not None}


def test_each_note_states_what_is_written_beside_it() -> None:
    check_every(_LINES, _states, name=lambda line: line[0].strip())


def _states(line: list[str]) -> None:
    note, expected = line
    parts = [part.strip() for part in expected.split(";") if part.strip()]
    said = read_statements(note.strip())
    assert _stated(note.strip()) == dict(part.split("=", 1) for part in parts if part != "?")
    if "?" in parts:
        assert said.unread or said.not_modelled or said.contradictions()


_WORDS = st.sampled_from(
    [*(line[0].strip() for line in _LINES), "not", "no", "and", ",", "(", ")", ";", "=", "8", "99999999999"]
)


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(_WORDS, max_size=6).map(" ".join)))
def test_any_note_is_read_and_each_clause_is_kept(note: str) -> None:
    said = read_statements(note)
    assert set(said.unread) <= {clause.text for clause in said.clauses}
    for clause in said.clauses:
        assert all(0 <= m.start < m.end <= len(clause.text) for m in clause.mentions)
    recompute_of_note(note)
