"""Errors of torchrun: an exit code, and a line that a terminal does not obey."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.elastic.rendezvous import RendezvousError

from meshwright.engines import torchrun


def test_what_another_host_says_is_no_command_to_the_terminal(monkeypatch, capsys):
    def lose(args: object) -> None:
        raise RendezvousError("\x1b]0;owned\x07 is gone")

    monkeypatch.setattr(torchrun.torchrun, "run", lose)
    assert torchrun._start(SimpleNamespace()) == 1
    said = capsys.readouterr().err
    assert r"\x1b]0;owned\x07 is gone" in said
    assert said.isascii()
    assert said.rstrip("\n").isprintable()
