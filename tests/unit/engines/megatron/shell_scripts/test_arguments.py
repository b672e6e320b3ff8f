"""Arguments that reach the program, as the shell itself says it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from meshwright.engines.megatron.megatron_lm.options import read
from meshwright.engines.megatron.shell_scripts.scripts import script_call
from meshwright.errors import InputError

CALL = 'torchrun --nproc_per_node 8 pretrain_gpt.py $A $B "$C" ${D[@]} $TP'

SCRIPTS = {
    "case": """
        SIZE=${1:-8B}
        case $SIZE in  # the size
          8B|8b)
            A=32; B="--hidden 4096" ;;
          "70B") A=80
            # and esac here;; is a comment
            case "$2" in
              fast) B=fast ;;
              *) B=slow
            esac
            ;;
          13*) ;;
          *) echo "unknown ;; esac $SIZE"; A=none
        esac
        """,
    "both": """
        [ -n "${FAST:-}" ] && A=fast || A=slow
        [[ -z $TP ]] && TP=4
        [ $# -gt 1 ] && B="$#"
        [[ "$1" == 70* && -n "$2" ]] && C=starred
        true && D=(one two) || D=(three)
        """,
    "sums": """
        : ${TP:=8}
        A=$((TP * 4)); N=3
        (( N > 2 )) && B=large
        (( N <= 2 )) && B=small
        if (( N == 3 )); then C=three; fi
        if [ $N -ge 2 -a $TP -ge 2 ]; then D=(both); fi
        if [ $N -lt 2 -o "$1" = 70B ]; then D+=(either); fi
        """,
    "functions": """
        function log {
          echo "[x] $*"
        }
        usage() { echo "usage: $0"; }
        cat > /dev/null <<EOF
{"it's": (1), "unclosed
A=wrong
EOF
        log "reading" it
        for f in one two; do echo "$f"; done
        A=right
        """,
    "names": """
        A=${UNSET:+--load $UNSET}
        SET=here
        B=${SET:+--load $SET}
        C=${SET:?is needed}
        D=(${1:-first} ${EMPTY-second})
        TP=${TP:-${SET:-none}}
        """,
    "positional": """
        A=${1:-nothing}
        shift
        B="${1:-nothing}"
        D=("$@" "${@}")
        """,
}


@pytest.mark.parametrize("given", [(), ("8b",), ("70B", "fast"), ("70B", "other", "two words"), ("13B",)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_words_reach_the_program(name, given, tmp_path):
    text = f"{SCRIPTS[name]}\n{CALL}\n"
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "${@:4}" > "$WORDS"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
    subprocess.run(["bash", "-c", text, "train.sh", *given], env=environment, check=True, capture_output=True)
    words = [word.text for word in script_call(text, path=Path("train.sh"), given=given).arguments]
    words = [word for word in words if word not in ("$A", "$B", "$TP", "${D[@]}")]  # that nobody has set
    words = ["" if word == "$C" else word for word in words]
    assert words == (tmp_path / "words").read_text().removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("case $1 in\n 8B) A=3 ;;\n", "a case that is not closed or not supported"),
        ("alias python=torchrun\n", "train.sh:1: alias"),
        ("IFS=,\n", "another IFS"),
        ("select x in a b; do A=$x; done\n", "train.sh:1: a command that is not supported"),
        ("while true; do A=3; done\n", "train.sh:1: a loop that does not end"),
        ("A=x\nwhile true; do A=$A$A; done\n", "the value of A is too long"),
        pytest.param(
            "for i in {1..999}; do for j in {1..999}; do A=$i; done; done\n",
            "more than 100,000 commands",
            marks=pytest.mark.when_touched,  # a loop that does not end is counted too
        ),
        ("f() { f; }\nf\n", "call each other without end"),
        ("A=${B@Q}\n B=1; A=${B@Q}\n", "train.sh:2: an expansion that is not supported"),
        ("A=$((1 + ))\n", "train.sh:1: arithmetic that is not supported"),
        ("A=$((1 / 0))\n", "train.sh:1: arithmetic without a value"),
        ("python pretrain_gpt.py <(cat x)\n", "train.sh:1: process substitution"),
        ("echo x | xargs python pretrain_gpt.py\n", "train.sh:1: arguments from xargs"),
        ("declare -n A=B\n", "train.sh:1: references to variables"),
        ("A=" + "{1..9}" * 9 + "\necho " + "{1..9}" * 9 + "\n", "train.sh:2: a sequence that is too long"),
        ("readonly A=1\nA=2\n", "A is readonly, and is assigned again"),
        ("declare -r A=1\nexport A=2\n", "A is readonly, and is assigned again"),
    ],
)
def test_what_a_script_does_otherwise_is_refused_with_another_way(script, message):
    with pytest.raises(InputError, match=message) as caught:
        script_call(f"{script}{CALL}\n", path=Path("train.sh"))
    assert "called NAME.args" in caught.value.hint


def test_a_sourced_file_without_end_is_refused(tmp_path):
    """With its line, and not read whole."""
    with (tmp_path / "huge.sh").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(InputError, match=r"train.sh:1: cannot read .*: it has more than 1,000,000 bytes"):
        script_call(f"source {tmp_path}/huge.sh\n{CALL}\n", path=Path("train.sh"))


@pytest.mark.parametrize(
    "script",
    [
        "if command -v nvidia-smi; then A=3; fi", "[ -f here ] && A=3", "A=$(nproc)", "read A", "A=$RANDOM",
        "for f in *.txt; do A=$f; done", "case $(uname) in Linux) A=5 ;; esac", "[[ -d x ]] || { A=4; }",
        "declare -A M=([a]=b); A=${M[a]}",
    ],
)  # fmt: skip
def test_values_that_depend_on_files_or_programs_are_not_known(script):
    words = script_call(f"A=1\n{script}\ntorchrun pretrain_gpt.py --lr $A\n", path=Path("train.sh")).arguments
    assert words[0].text == "--lr"
    assert words[1].unknown


MORE = pytest.mark.when_touched  # seed 0 damages the same scripts


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=MORE), pytest.param(2, marks=MORE)])
def test_damaged_scripts_are_input_errors(seed):
    choose = random.Random(seed)
    whole = "\n".join(SCRIPTS.values()) + CALL
    for _ in range(200):
        at, length = choose.randrange(len(whole)), choose.randrange(40)
        put = "".join(choose.choice("\"'`$(){}[]|&;<>\\\n#=!a ") for _ in range(choose.randrange(6)))
        with contextlib.suppress(InputError):
            script_call(whole[:at] + put + whole[at + length :], path=Path("train.sh"))


def test_what_such_a_script_prints_is_read(tmp_path):
    (tmp_path / "a.args").write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --lr 1e-4 > log\n")
    options = read(str(tmp_path / "a.args"))
    assert (options.integer("num-layers", 0), options.number("lr", 0)) == (4, 1e-4)
    assert options.notes() == []


@pytest.mark.parametrize(
    "program",
    [
        "pretrain_bert.py",
        "../../pretrain_vlm.py",
        "pretrain_vision_classify.py",
        "x/multimodal/train.py",
        "train_rl.py",
    ],
)
def test_programs_of_other_models_are_one_reason(program):
    with pytest.raises(InputError, match=f"with other options than .*got '{program}', allowed: pretrain_gpt.py"):
        script_call(f"torchrun {program} --fork-option 1 --other 2\n", path=Path("train.sh"))


@pytest.mark.parametrize(
    "call",
    [
        "python -m torch.distributed.run --nproc_per_node 8 megatron/pretrain_gpt.py",
        'srun -N 4 --mpi=pmix bash -c "python -u $ROOT/pretrain_gpt.py --lr 1"\n:',
        "mpirun -np 8 -x PATH python pretrain_llama.py",
    ],
)
def test_launchers_are_followed(call):
    words = script_call(f"ROOT=/code\n{call} --lr 1\n", path=Path("train.sh")).arguments
    assert [word.text for word in words] == ["--lr", "1"]


@pytest.mark.parametrize(
    "call",
    [
        "TP=2 bash -e inner/train.sh 4 fast",
        "export TP=2\nsbatch -N 4 inner/train.sh 4 fast",
        "TP=2 ./inner/train.sh 4 fast",
    ],
)
def test_a_script_that_starts_another_is_followed(call, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/train.sh").write_text(
        "HERE=1\ntorchrun pretrain_gpt.py --lr $1 --seed ${TP:-1} $2 $OUTER\nexit 1\n"
    )
    text = f"OUTER=--not-exported\nbash absent.sh\n{call}\necho $HERE\n"
    words = [word.text for word in script_call(text, path=tmp_path / "run.sh").arguments]
    assert words == ["--lr", "4", "--seed", "2", "fast", "$OUTER"]
    (tmp_path / "inner/train.sh").write_text("\nif x\n")
    with pytest.raises(InputError, match=r"inner/train.sh:3"):
        script_call(text, path=tmp_path / "run.sh")
    (tmp_path / "inner/train.sh").write_text("bash train.sh\n")
    with pytest.raises(InputError, match="call each other without end"):
        script_call(text, path=tmp_path / "run.sh")


def test_an_exit_for_want_of_a_variable_is_assumed_not_to_happen():
    """The variable may come from the environment; a reader that needs its value asks for it."""
    text = """
        if [ -z $ROOT ]; then echo "set ROOT"; exit 1; elif [ $# -lt 2 ]; then exit 2; else A=else; fi
        [ -n "$DATA" ] || { echo "set DATA"; exit 1; }
        [[ -z ${TP} ]] && exit 1
        if [ -z "$N" ]; then N=4; fi
        torchrun pretrain_gpt.py --lr $ROOT $A $N
        """
    words = [word.text for word in script_call(text, path=Path("train.sh")).arguments]
    assert words == ["--lr", "$ROOT", "else", "4"]
    for ending in ("[ 1 = 1 ] && exit 1", "if [ -z $X ]; then exit 0; fi", "X=1; [ $X = 1 ] && exit 1"):
        with pytest.raises(InputError, match="calls no"):
            script_call(f"{ending}\npython pretrain_gpt.py\n", path=Path("train.sh"))
