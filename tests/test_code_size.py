"""No file and no function of the package is longer than `scripts/code_size.py` allows."""

from __future__ import annotations

from scripts import code_size


def test_no_file_or_function_is_too_long():
    """Split it where a split reads better."""
    assert code_size.excesses(code_size.sizes(code_size.PACKAGE, base=code_size.PACKAGE)) == []


def test_a_longer_function_and_a_longer_file_are_found(tmp_path):
    most = code_size.MOST
    docstring = '        """Text\n\n        of four\n        lines."""\n'
    (tmp_path / "long.py").write_text(f"class A:\n    def f(self):\n{docstring}" + "        pass\n" * most["function"])
    (tmp_path / "longer.py").write_text("pass\n" * (most["file"] + 1))
    assert code_size.excesses(code_size.sizes(tmp_path, base=tmp_path)) == [
        f"longer.py: {most['file'] + 1} lines, allowed {most['file']}",
        f"long.py: A.f: {most['function'] + 1} lines, allowed {most['function']}",
    ]


def test_the_page_has_every_room():
    text = code_size.PAGE.read_text(encoding="utf-8")
    rooms = {path.parent.name for path in code_size.PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}` |" not in text} == set()
