import copy
import pickle

import pytest

from meshwright import errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "bad"),
        ({"got": 0}, "bad: got 0"),
        ({"allowed": ">= 1"}, "bad: allowed: >= 1"),
        ({"got": "x", "allowed": "1 to 8", "hint": "try 8"}, "bad: got 'x', allowed: 1 to 8\nhint: try 8"),
    ],
)
def test_input_error_says_what_got_allowed_hint(arguments, text):
    assert str(errors.InputError("bad", **arguments)) == text


def test_run_file_error_begins_with_the_place():
    error = errors.RunFileError("unknown key", file="run.yaml", line=3, key="parallel.tensr", hint="tensor")
    assert error.message == "run.yaml:3: parallel.tensr: unknown key"
    assert (error.file, error.line, error.key) == ("run.yaml", 3, "parallel.tensr")
    assert errors.RunFileError("empty", file="run.yaml").message == "run.yaml: empty"


def test_unknown_name_suggests_the_nearest_whatever_its_case():
    assert errors.UnknownNameError("cluster", "MI355X-8X8", known=["h100-8x8", "mi355x-8x8"]).hint == (
        "did you mean 'mi355x-8x8'?"
    )


def test_unknown_name_without_a_near_one_lists_what_is_known():
    assert errors.UnknownNameError("model", "zzz", known=["b", "a"]).hint == "known: a, b"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.MeshwrightError, 2),
        (errors.InputError, 2),
        (errors.InfeasibleError, 1),
        (errors.MissingDependencyError, 3),
    ],
)
def test_exit_codes_of_the_command_contract(error, exit_code):
    assert error("message").exit_code == exit_code


def test_every_error_is_caught_by_the_base():
    subclasses = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(subclasses) >= 6
    assert all(issubclass(e, errors.MeshwrightError) for e in subclasses)


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        errors.MeshwrightError("a", hint="h"),
        errors.InputError("a", got=1, allowed="2", hint="h"),
        errors.RunFileError("a", file="run.yaml", line=3, key="k", got=1, hint="h"),
        errors.UnknownNameError("model", "lama3", known=["llama3"]),
        errors.InfeasibleError("a", hint="h"),
        errors.MissingDependencyError("a", hint="h"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_cross_processes_as_they_are(error, again):
    """A process pool whose worker raises what cannot be unpickled hangs or breaks."""
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_what_cannot_be_shown_is_named_by_its_type():
    assert str(errors.InputError("bad", got=Unshowable())) == "bad: got a value of type Unshowable"
    assert str(errors.InputError("bad", got=10**5000)) == "bad: got a value of type int"


def test_a_long_value_is_shortened():
    assert len(str(errors.InputError("bad", got="x" * 10**6))) < 1100
