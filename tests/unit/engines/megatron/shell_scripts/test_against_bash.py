"""Random scripts: the arguments that we read are those that bash passes to the program, or the script is refused."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from meshwright.engines.megatron.shell_scripts.scripts import script_call
from meshwright.errors import InputError

STUB = '#!/bin/sh\nprintf "%s\\0" "$@" >> "$CALLS"\nprintf "END\\0" >> "$CALLS"\n'
LAUNCHERS = ("torchrun --nproc_per_node 8", "python", "numactl -N 0 python", "srun -n 8 python -u", "timeout 9 python")
WORDS = (
    "--bf16", "--lr", "1e-4", "--tensor-model-parallel-size", "2", "'two words'", '"a $A b"', "$A", "${B}",
    '"$C"', "$D", '"${LIST[@]}"', "${LIST[@]}", '"${LIST[*]}"', "${LIST[1]}", '"${LIST[@]:1}"', "${#LIST[@]}",
    "${#A}", "$((N*4))", "$((N / 3 + 2**2 % 3))", "$((N>2?N:7))", "${A:-x}", "${E:-def ault}",
    "${E:-\"one two\" three}", "${E:-\"\"}", '"${E:-def ault}"', "${E:+no}", "${A:+yes}", "${P%.*}", "${P##*/}",
    "${P%%_*}", "${P#*/}", "${A/x/y}", "${A^^}", "${P:2:3}", "a\\ b", "x{1,2}y", "{1..3}", "''", '""',
    "a'b'\"c\"", "--x=$A", '--y="$D"', "[0]*3+[1]*5", "$'tab\\there'", "it\\'s", "$(echo $A $N)",
    '"$(echo "$D")"', "`echo $A`", "%", "a#b", "--z='([0]*3+[1]*58)'", "$EMPTY", '"$EMPTY"', "\\$A", "'$A'",
    "~x", "a=b", "${!REF}", "$([ $N -gt 2 ] && echo --more)", "$(expr 64 / $N)", "$(expr $N - 7 \\* 2)",
)  # fmt: skip
REDIRECTIONS = (
    "2>&1", "> log", ">> log", "2> err", "< /dev/null", "&> log", "2>/dev/null", ">| log", "<<< text", "1>&2", ">log",
    "> >(cat)", '> "$A log"', "3>&1", "> log_$(echo x).txt", '2>> "$A.log"',
)  # fmt: skip
BEFORE = (
    "A=x1 B=--swiglu", "N=4", 'D="p  q"', "LIST+=(more 'and more')", "export Q=1", "# comment 'unclosed",
    "A+=tail", "if [ $N -eq 3 ]; then A=three; elif [[ $A == x* ]]; then A=starred; else A=other; fi",
    "true && B=both || B=none", "[[ -n $E || $N -lt 5 ]] && N=9", "for k in a b 'c d'; do LIST+=(\"$k\"); done",
    "((N++))", "let N=N*2 || true", "case $A in x*|y) A=cased ;; *) A=uncased ;; esac",
    "while [ $N -gt 1 ]; do N=$((N-1)); LIST+=($N); done",
    "f() { local A=inner; B=$1; shift; LIST=(\"$@\"); }\nf one 'two three' four",
    "cat > note <<'END'\n$A ' \" ( EOF\nEND", "cat <<END > note\n$A ${B} it's\nEND",
    "set -- p1 'p 2'\nLIST=(\"$@\" $# \"$1\")", "(A=sub; N=77)",
    "set -- p1\nset -oh emacs\nLIST=(\"$@\" $#)", "{ C=group; }", "A=1; B=2 C=3 ; D=4",
    "unset D\nD=${D-fresh}", "E=${E:=given}", "for ((i=0;i<3;i++)); do LIST[0]=x; A+=$i; done",
    "until [ $N -ge 6 ]; do ((N+=2)); done", "B=$(echo sub; echo two)", "test -n \"$A\" && C=tested",
    "! false && B=negated", "declare -a LIST=(declared\n  # a comment\n  'in lines' )",
    "for k in x y z; do [ $k = y ] && break; A=$k; done", "printf '%s' quiet", "readonly R=1; B=$R",
    "A='multi\nline'", 'B="con\\\ntinued"', "[ \"$A\" != x ] || C=same",
)  # fmt: skip
UNKNOWN = (
    "if [ -d / ]; then A=there; LIST=(1); fi", "command -v ls > /dev/null && B=found", "A=$(date +%Y)",
    "read C <<< text", "if grep -q root /etc/passwd; then N=8; else N=2; fi",
    "while read line; do A=$line; done < /dev/null", "A=$RANDOM", "for f in /etc/pass*; do A=$f; done",
    "mapfile -t LIST < /dev/null", "[[ $A =~ ^x ]] && C=matched", "B=${PWD}/x",
    "if ls /absent; then exit 1; fi", "grep -q x /dev/null || { N=12; }", "C=$(ls | wc -l)",
    "[ -f absent ] && LIST+=(more)", "case $(uname) in Linux) A=linux ;; *) A=other ;; esac",
    "nvidia-smi || N=1", "A=$?", "declare -A M=([k]=v)\nA=${M[k]}",
)  # fmt: skip
AROUND = (
    "{call}", "{call}", "{call} | tee log", "{call} 2>&1 | tee -a log", "( {call} )", "{{ {call}; }} > log",
    "{call} &\nwait", "exec {call}", "time {call}", "if {call}; then echo done; fi", "true && {call}",
    "false || {call}", "! {call}", "run() {{\n  {call}\n}}\nrun",
    "go() {{ {call} \"$@\"; }}\ngo --last 'one word'", "{call} && echo ok || exit 1",
    "for once in 1; do {call}; done", "CUDA_X=1 OMP=2 {call}", "env FOO=1 {call}", "nohup {call} > log &\nwait",
    "echo begin; {call}; echo end", "if [ -n \"$A\" ]; then\n  {call}\nfi", "case x in x) {call} ;; esac",
    "[ -f absent ] || {call}", "CMD=\"{plain}\"\necho $CMD\neval $CMD", "CMD=\"{plain}\"\n$CMD 2>&1 | tee log",
    "bash -c '{plain}'", "eval \"{plain} > log\"", "while true; do {call}; break; done", "yes | {call}",
    "cat <<EOF | {call}\nbody $A\nEOF", "bash <<'EOF'\n{plain}\nEOF", "exec > log 2>&1\n{call}",
    "ARGS=({arguments})\n{launcher} pretrain_gpt.py \"${{ARGS[@]}}\"",
    "{call}; exit 0\n{launcher} pretrain_gpt.py --other",
)  # fmt: skip


def random_script(seed: int) -> str:
    """Return a script that calls the program once."""
    choose = random.Random(seed)
    head = ["A=x0", "B=--b", 'C="c d"', 'D="e   f"', "E=", "EMPTY=", "N=3", "P=dir/file_name.tar.gz", "REF=A",
            "LIST=(one 'two 2' --three)"]  # fmt: skip
    lines = [*head, *(choose.choice(BEFORE) for _ in range(choose.randint(0, 4)))]
    if choose.random() < 0.3:
        lines.append(choose.choice(UNKNOWN))
    launcher = choose.choice(LAUNCHERS)
    words = [choose.choice(WORDS) for _ in range(choose.randint(1, 8))]
    with_noise = list(words)
    for _ in range(choose.choice((0, 1, 1, 2))):
        with_noise.insert(choose.randint(0, len(with_noise)), choose.choice(REDIRECTIONS))
    gaps = choose.choice((" ", " ", " \\\n    ", "  "))
    call = gaps.join((launcher, "pretrain_gpt.py", *with_noise))
    plain = f"{launcher} pretrain_gpt.py --plain {choose.choice(('1', '--bf16', 'x=y'))}"
    around = choose.choice(AROUND).format(call=call, plain=plain, launcher=launcher, arguments=" ".join(words))
    return "\n".join([*lines, around, ""])


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bash")
    for name in ("torchrun", "python", "numactl", "srun", "timeout"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    work = folder / "work"
    work.mkdir()

    def calls(text: str) -> list[list[str]] | None:
        """Return the arguments after the program in each call; None: bash finds an error in the script."""
        written = folder / "calls"
        written.write_bytes(b"")
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(written)}
        done = subprocess.run(
            ["bash", "-c", text], env=environment, cwd=work, capture_output=True, timeout=20, text=True
        )
        if "syntax error" in done.stderr:
            return None
        words = written.read_bytes().decode().split("\0")[:-1]
        found: list[list[str]] = [[]]
        for word in words:
            found[-1].append(word)
            if word == "END":
                found[-1].pop()
                found.append([])
        return [call[call.index("pretrain_gpt.py") + 1 :] for call in found[:-1]]

    return calls


def differences(seeds: range, bash) -> tuple[list[str], int]:
    """Return the scripts that are read otherwise than bash runs them, and the number of those refused."""
    wrong, num_refused = [], 0
    for seed in seeds:
        text = random_script(seed)
        expected = bash(text)
        try:
            words = script_call(text, path=Path("train.sh")).arguments
        except InputError as error:
            num_refused += 1
            if expected is not None and len({tuple(call) for call in expected}) == 1:
                wrong += [f"{seed}: refused: {error.message}\n{text}"] if is_ours(error) else []
            continue
        if any(word.unknown for word in words):
            num_refused += 1  # by those who need the value
            continue
        got = [word.text for word in words]
        if expected is None or got not in expected:
            wrong.append(f"{seed}: got {got}\nbash {expected}\n{text}")
    return wrong, num_refused


def is_ours(error: InputError) -> bool:
    """Return True for a refusal that no random script deserves."""
    return "not supported" not in error.message and "depends on" not in error.message


def test_random_scripts_are_read_as_bash_runs_them(bash):
    wrong, num_refused = differences(range(100), bash)
    assert not wrong, "\n\n".join(wrong[:3])
    assert num_refused < 30


@pytest.mark.slow  # more of the same
def test_more_random_scripts(bash):
    wrong, _ = differences(range(100, 2000), bash)
    assert not wrong, "\n\n".join(wrong[:3])
