"""The code-block runner itself: a wrong document must fail (a checker that cannot fail checks nothing)."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["pytester"]

DOCUMENTS = {
    "bash that fails": ("```bash\nexit 3\n```", 1),
    "bash whose pipe fails": ("```bash\nfalse | true\n```", 1),
    "bash that works": ("```bash\ntrue\n```", 0),
    "blocks share a folder": ("```bash\necho hello > file\n```\n\n```console\n$ cat file\nhello\n```", 0),
    "output differs": ("```console\n$ echo one\ntwo\n```", 1),
    "output continues": ("```console\n$ echo one \\\n  two\none two\n$ echo three\nthree\n```", 0),
    "output in part": ("```console\n$ printf 'a\\nb\\nc\\n'\na\n...\nc\n```", 0),
    "an exit code is output too": ("```console\n$ meshwright plna || echo $?\nerror: ...\nhint: ...\n2\n```", 0),
    "python that differs": ("```python\n>>> 1 + 1\n3\n```", 1),
    "python that raises": ("```python\n1 / 0\n```", 1),
    "skipped with a reason": ('<!--- skip: next "needs a GPU" -->\n```bash\nexit 3\n```', None),
    "set-up of a fresh machine is left out": (
        "```bash\npython3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/meshwright --version\n```",
        0,
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(pytester, request, name):
    text, num_failed = DOCUMENTS[name]
    pytester.makeconftest((request.config.rootpath / "conftest.py").read_text())
    (pytester.path / "page.md").write_text(text)
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "page.md").parseoutcomes()
    assert outcome.get("failed", 0) == (num_failed or 0)
    assert ("skipped" in outcome) == (num_failed is None)


def test_blocks_of_one_document_stay_in_one_process(pytester, request, monkeypatch):
    paths = [str(request.config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # the conftest imports `tests.warm`
    pytester.makeconftest((request.config.rootpath / "conftest.py").read_text())
    blocks = [f"```console\n$ echo {i} >> file; wc -l < file\n{i}\n```\n" for i in range(1, 9)]
    (pytester.path / "page.md").write_text("\n".join(blocks))
    options = [o for o in request.config.getini("addopts") if o.startswith("--dist")]
    outcome = pytester.runpytest_subprocess("-n", "2", *options, "page.md").parseoutcomes()
    assert outcome == {"passed": 8}
