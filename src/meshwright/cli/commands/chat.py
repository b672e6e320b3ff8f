"""`meshwright chat`: a conversation on a terminal, or of messages from the command line or a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meshwright.api.generate import as_generation, generate, open_generator
from meshwright.api.question import question_of
from meshwright.cli.commands.generate import end_line, read_stdin, write_text
from meshwright.cli.output import emit_json, note, progress, say, wants_json
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.targets import load

if TYPE_CHECKING:
    from meshwright.answers.generation import Generation
    from meshwright.training.generation import TextGenerator


Message = dict[str, str]
HELP = """/clear           begin a new conversation
/system TEXT     begin a new conversation with this system prompt; without TEXT, with none
/undo            take back the last turn
/adapter NAME    answer with another of several adapters; without NAME, with the base
/help            show this
/quit, Ctrl-D    end
Ctrl-C           stop the answer; a second one leaves"""


class ChatSession:
    """Messages so far and the generation of each answer."""

    def __init__(self, generator: TextGenerator, *, system: str | None) -> None:
        self.generator = generator
        self.begin(system)
        self.requests: list[list[Message]] = []
        self.prompts: list[Any] = []
        self.done: list[Any] = []

    def begin(self, system: str | None) -> None:
        """Forget all messages but the system prompt."""
        self.system = system
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def undo(self) -> bool:
        """Take back the last question and its answer; return False where there is none."""
        if self.messages[-1:] and self.messages[-1]["role"] == "assistant":
            del self.messages[-2:]
            return True
        return False

    def ask(self, text: str, *, is_shown: bool, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Add a turn: the user's text and the answer, which is written to stdout while it comes."""
        request = [*self.messages, {"role": "user", "content": text}]
        prompts = self.generator.prompts([request])
        (answer,) = self.generator.answer(prompts, on_text=write_text if is_shown else None, is_cancelled=is_cancelled)
        if is_shown:
            end_line(answer.text)
        self.messages = [*request, {"role": "assistant", "content": answer.text}]
        self.requests.append(request)
        self.prompts += prompts
        self.done.append(answer)

    def result(self, *, about: tuple[str, ...], command: tuple[str, ...]) -> Generation:
        """All answers."""
        return as_generation(
            self.generator, self.requests, self.prompts, self.done, batch=1, about=about, command=command
        )


def _lines(text: str) -> list[str]:
    """Lines that are not empty. Only line ends divide them: `str.splitlines` knows many characters more."""
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


@verb("chat", question="meshwright.api.generate:generate", without=["batch"])
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option("--system", metavar="TEXT", help="System prompt: the first message of the conversation.")
def command(*, asked: dict[str, Any], messages: Sequence[str], system: str | None) -> None:
    """Talk to a trained model.

    The conversation is written in the chat template of its tokenizer, or as ChatML where it has none. MODEL is as in
    `meshwright generate`. With MESSAGEs, or with stdin from a file or a pipe, each message or line is a turn of one
    conversation, and the answers go to stdout. On a terminal: Ctrl-C stops an answer, Ctrl-D ends, /help
    lists the commands.

    Earlier turns are not computed again. A conversation longer than the trained positions is refused, never cut.
    """
    is_terminal = not messages and sys.stdin.isatty()
    if is_terminal and wants_json():
        raise InputError("--json is for messages from the command line or a pipe", got="a terminal")
    turns = list(messages) if messages or is_terminal else _lines(read_stdin())
    if not turns and not is_terminal:
        raise InputError("there is no message", hint="give one after the model, or pipe one a line to stdin")
    settings = question_of(generate).checked(asked)
    with progress(f"loading {settings['model']}"):
        generator, about = open_generator(**settings)
    about += _notes_on_template(generator)
    note(*about)
    conversation = ChatSession(generator, system=system)
    if is_terminal:
        _talk(conversation)
    for turn in turns:
        conversation.ask(turn, is_shown=not wants_json())
    if not conversation.done:
        return
    done = conversation.result(about=about, command=("meshwright", *sys.argv[1:]))
    if wants_json():
        emit_json(done)
    note(*done.notes[len(about) :])
    say(done.summary())


def _notes_on_template(generator: TextGenerator) -> tuple[str, ...]:
    if isinstance(generator.tokenizer.chat, load("meshwright.training.data.chat:ChatML")):
        return ("the tokenizer has no chat template: the conversation is written as ChatML",)
    return ()


def _talk(conversation: ChatSession) -> None:
    """Read lines from the terminal until it ends."""
    load("readline:__name__")  # line editing for input()
    print("/help lists the commands, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
            continue
        if line in ("/quit", "/exit"):
            return
        if line.startswith("/"):
            try:
                say(_command(line, conversation))
            except InputError as error:
                say(f"error: {error}")
        elif line:
            _turn(line, conversation)


def _turn(line: str, conversation: ChatSession) -> None:
    """One turn on the terminal; an error does not end the conversation."""
    try:
        with _stopped_by_ctrl_c() as is_cancelled:
            conversation.ask(line, is_shown=True, is_cancelled=is_cancelled)
    except InputError as error:
        say(f"error: {error.message}\nhint: /clear begins a new conversation; {error.hint}")


@contextmanager
def _stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; the second time it interrupts the program."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _command(line: str, conversation: ChatSession) -> str:
    """Carry out a line that begins with a slash; the answer to the user."""
    name, _, text = line.partition(" ")
    if name == "/help":
        return HELP
    if name == "/clear":
        conversation.begin(conversation.system)
        return "a new conversation"
    if name == "/system":
        conversation.begin(text.strip() or None)
        return "a new conversation" + (" with this system prompt" if text.strip() else " without a system prompt")
    if name == "/adapter":
        conversation.generator.use_adapter(text.strip() or None)
        return f"{text.strip() or 'the base'} answers"
    if name == "/undo":
        return "the last turn is taken back" if conversation.undo() else "there is no turn to take back"
    return f"{name} is no command\n{HELP}"
