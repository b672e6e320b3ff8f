"""Options of forks and what people's scripts and YAML leave to files, to Slurm and to variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.engines.megatron.test_importing import PLAIN, imported

from meshwright.engines.megatron import contract
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError
from meshwright.specs.model import RopeScaling


def test_an_unknown_option_is_left_out_when_it_is_named(tmp_path):
    path = tmp_path / "megatron_lm.args"
    plain = (f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    path.write_text("\n".join((*plain, "--forks-own 3 4", "--other-one")), encoding="utf-8")
    with pytest.raises(InputError, match=r"got '--forks-own'\n.*got '--other-one'") as caught:
        imported(str(path))
    assert "--ignore forks-own leaves out one of a fork" in caught.value.hint
    found = contract.import_run(str(path), cluster="h100-8x1", ignore=["--forks-own", "other-one"])
    assert "--ignore left out forks-own, other-one, which is not known" in found.notes
    with pytest.raises(InputError, match="this one is read: got 'seq-length'"):
        contract.import_run(str(path), cluster="h100-8x1", ignore=["forks-own", "other-one", "seq-length"])
    with pytest.raises(InputError, match="has no such key: got 'absent'"):
        contract.import_run(str(path), cluster="h100-8x1", ignore=["forks-own", "other-one", "absent"])


def script(tmp_path: Path, call: str, *, before: str = "") -> str:
    plain = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in PLAIN.items())
    path = tmp_path / "train.sh"
    path.write_text(f"{before}\npython pretrain_gpt.py {plain} {call}\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("call", ["--bf16 $ARGS --seed 3", "--bf16 ${ARGS[@]} --seed 3", "${MORE[@]} --seed 3"])
def test_options_of_a_checkpoint_that_depend_on_files(call, tmp_path):
    opened, closed = ("(", ")") if "[" in call else ('"', '"')
    if_there = f"if [[ -f $A/latest.txt ]]; then ARGS={opened}--load $A --seed 5{closed}\n"
    either = f"else ARGS={opened}--load B --seed 5 --no-load-optim --finetune{closed}; fi\nMORE=(--bf16 ${{ARGS[@]}})"
    run, notes = imported(script(tmp_path, call, before=if_there + either))
    assert (run.train.seed, run.precision.name, "not carried over: --finetune" in notes) == (3, "bf16", True)
    run, _ = imported(script(tmp_path, call.replace("--seed 3", ""), before=if_there + either))
    assert run.train.seed == 5  # in both


@pytest.mark.parametrize(
    "before",
    [
        "if [ -f x ]; then ARGS='--load a'; else ARGS='--load b --swiglu'; fi",
        "if [ -f x ]; then ARGS='--load a'; fi",  # else it may come from the environment
        "if [ -f x ]; then if [ -f y ]; then ARGS='--load a'; fi; else ARGS='--load b'; fi",
        "f() { local ARGS=1; }\n[ -f y ] && ARGS='--load a'\nif [ -f x ]; then f; else f; fi",
        "f() { :; }\n[ -f y ] && ARGS='--load a'\nif [ -f x ]; then ARGS=1 f; else ARGS=1 f; fi",
        "ARGS=''\nfor x in *; do ARGS=\"$ARGS --load a\"; done",
        "ARGS=''\nwhile grep x; do ARGS=\"$ARGS --load a\"; done",
        "if [ -f x ]; then ARGS='--load a'; else ARGS='--load b'; fi\nARGS=\"${ARGS:-c} --swiglu\"",
        "if [ -f x ]; then ARGS='--load a'; else ARGS='--load b'; fi\nARGS=\"$ARGS --swiglu\"",
        "if [ -f x ]; then ARGS=(--load a); else ARGS=(--load b); fi\nARGS+=(--swiglu)",  # has no subscript
    ],
)
def test_other_options_that_depend_on_files_are_refused(before, tmp_path):
    with pytest.raises(InputError, match=r"ARGS depends on files or programs|cannot be expanded"):
        imported(script(tmp_path, "--bf16 $ARGS", before=before))


def test_what_is_appended_to_options_that_depend_on_files_counts(tmp_path):
    before = "if [ -f x ]; then ARGS=(--load a); else ARGS=(--load b); fi\nARGS+=(--seed 7)"
    assert imported(script(tmp_path, '"${ARGS[@]}"', before=before))[0].train.seed == 7


def test_options_of_forks(tmp_path):
    scaled = "--rope-factor 8 --rope-low-freq-factor 1 --rope-high-freq-factor 4"
    call = f"--use-mpi --wandb-name x --use-z-loss --rope-theta 500000 {scaled}"
    whole = f"{call} --rope-original-max-positional-embeddings 8192 --begin-of-special-token-id 3"
    run, notes = imported(script(tmp_path, whole))
    rope = run.model.rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_context) == (500_000, RopeScaling.LLAMA3, 8, 8192)
    assert (run.train.z_loss, "not carried over: --begin-of-special-token-id 3" in notes) == (1e-4, True)
    assert "mpi" not in notes
    assert imported(script(tmp_path, "--z-loss-strength 0.001"))[0].train.z_loss == 1e-3
    with pytest.raises(InputError, match="lack values of --rope-factor: got 'rope-original-max"):
        imported(script(tmp_path, call))
    with pytest.raises(InputError, match="run files cannot express: --use-embedding-scaling"):
        imported(script(tmp_path, "--use-embedding-scaling"))


def test_counts_of_slurm_come_from_the_lines_of_the_script(tmp_path):
    head = (
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 8 # one a device\n#SBATCH --gpus-per-node=mi250:8\n"
        'if [ -z $SLURM_JOB_ID ]; then\n  sbatch "$0"\n  exit\nfi\n#SBATCH --nodes=16\n'
    )
    call = "--global-batch-size $((SLURM_JOB_NUM_NODES * 2 * SLURM_NTASKS))"
    assert imported(script(tmp_path, call, before=head))[0].global_batch == 256
    assert imported(f"{script(tmp_path, call, before=head)} SLURM_JOB_NUM_NODES=1")[0].global_batch == 64
    with pytest.raises(InputError, match="--seed cannot be expanded, it is not set"):
        imported(script(tmp_path, "--seed $SLURM_GPUS_PER_NODE", before=head))
    with pytest.raises(InputError, match="--global-batch-size cannot be expanded"):
        imported(script(tmp_path, call, before=head.replace("=4", "=2-4")))
    with pytest.raises(InputError, match="SLURM_JOB_ID depends on the machine"):
        imported(script(tmp_path, "--seed $SLURM_JOB_ID", before=head))


def test_a_comparison_of_what_is_not_set_is_an_error_that_counts_as_false(tmp_path):
    before = "if [ $1 = large ]; then\n  SEED=1\nelif [ $1 != large ]; then\n  SEED=2\nelse\n  SEED=3\nfi"
    assert imported(script(tmp_path, "--seed $SEED", before=before))[0].train.seed == 3
    assert imported(f"{script(tmp_path, '--seed $SEED', before=before)} large")[0].train.seed == 1


FLAGSCALE = """
system:
  tensor_model_parallel_size: 2
  no_shared_fs: ${experiment.runner.no_shared_fs}
  precision: {bf16: true, fp16: false}
  checkpoint: {load: "${experiment.load}"}
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 32
  max_position_embeddings: 32
  swiglu: true
  multiple_of: 48
  disable_bias_linear: True
  add_qkv_bias: null
  untie_embeddings_and_output_weights: true
  use_rotary_position_embeddings: true
  normalization: RMSNorm
  micro_batch_size: 2
  global_batch_size: ${batch:??}
  seed: ${experiment.seed}
  train_iters: 10
  optimizer: {weight_decay: 0.2, lr_scheduler: {lr: 1.0e-3, min_lr: 1.0e-4, lr_decay_style: cosine}}
data:
  data_path: ${data_path:??}
  tokenizer: {tokenizer_type: QwenTokenizerFS, tokenizer_path: x, vocab_size: 500}
"""
NAMING = """
defaults: [_self_, train: %s]
experiment: {seed: %d, load: null, task: {type: train, backend: megatron}, runner: {no_shared_fs: false}}
"""


def test_configurations_of_flagscale(tmp_path):
    path = tmp_path / "conf/train/4l.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(FLAGSCALE, encoding="utf-8")
    assert recognised(path).project == "FlagScale"
    with pytest.raises(InputError, match=r"needs variables: got 'batch, experiment\.seed'") as caught:
        imported(str(path))
    assert caught.value.hint == '"4l.yaml batch=... experiment.seed=..."'
    naming = tmp_path / "conf/train.yaml"
    naming.write_text(NAMING % ("4l", 9), encoding="utf-8")
    (tmp_path / "conf/train_other.yaml").write_text(NAMING % ("8l", 3), encoding="utf-8")
    assert recognised(naming).project == "FlagScale"
    for source in (path, naming):
        run, notes = imported(f"{source} batch=16")
        assert (run.model.ffn_hidden, run.model.vocab, run.model.attention.bias) == (192, 500, False)
        assert (run.plan.tensor, run.global_batch, run.train.seed, run.precision.name) == (2, 16, 9, "bf16")
        assert (run.optimizer.learning_rate, run.optimizer.weight_decay) == (1e-3, 0.2)
        assert "shared" not in notes
    hetero = "  enable_hetero: true\n  hetero_process_meshes: [[1, 2], [2]]\n  swiglu"
    path.write_text(FLAGSCALE.replace("  swiglu", hetero), encoding="utf-8")
    with pytest.raises(InputError, match=r"4l\.yaml:\d+: Megatron-LM has no such option: got '--enable-hetero'"):
        imported(f"{path} batch=16")
    naming.write_text(NAMING % ("absent", 9), encoding="utf-8")
    with pytest.raises(InputError, match="cannot read the configuration"):
        imported(str(naming))


def test_variables_in_yaml_of_options(tmp_path):
    lines = [f"  --{name}: {str(value).lower() if value is True else value}" for name, value in PLAIN.items()]
    more = ["  --moe-grouped-gemm: ${GROUPED}", "  --tensor-model-parallel-size: ${TP}", "  --save: ${OUT}/saved"]
    more += ["  --wandb-exp-name: TP${TP}-${COMMENT}"]
    path = tmp_path / "model.yaml"
    path.write_text("\n".join(["MODEL_ARGS:", *lines, *more]), encoding="utf-8")
    with pytest.raises(InputError, match="needs variables: got 'GROUPED, TP'"):
        imported(str(path))
    for grouped in ("true", "false"):
        assert imported(f"{path} TP=4 GROUPED={grouped}")[0].plan.tensor == 4
    with pytest.raises(InputError, match="not a variable of the file: got 'fast'"):
        imported(f"{path} fast")


def test_a_placeholder_of_several_words(tmp_path):
    run, notes = imported(script(tmp_path, "--save $SAVED --save-interval 5", before='SAVED="<your path>"'))
    assert (run.train.checkpoint.folder, "--save <your" in notes) == ("checkpoints", True)
    imported(script(tmp_path, "--merge-file $FILE", before='FILE="<folder of files>/merges.txt"'))
    with pytest.raises(InputError, match="--seed cannot be expanded, a placeholder stands for it: got '<any number>'"):
        imported(script(tmp_path, "--seed $SEED", before='SEED="<any number>"'))


def test_a_comment_that_ends_with_a_backslash_does_not_hide_the_call(tmp_path):
    path = tmp_path / "train.slurm"
    path.write_text('#    --universal-checkpoint \\\nCMD=" \\\n  pretrain_gpt.py --num-layers 2"\n# train.py\n')
    assert recognised(path).engine == "megatron"
    path.write_text("# pretrain_gpt.py \\\n#  --num-layers 2\necho\n")
    assert recognised(path) is None


def test_one_of_several_calls_is_chosen(tmp_path):
    path = Path(script(tmp_path, "--lr $x", before="for x in 1e-3 2e-3 2e-3; do"))
    path.write_text(f"{path.read_text(encoding='utf-8')}done\n", encoding="utf-8")
    for chosen, rate in (("", 1e-3), (" CALL=1", 1e-3), (" CALL=2", 2e-3)):
        run, notes = imported(f"{path}{chosen}")
        assert run.optimizer.learning_rate == rate
        assert f"different arguments, at lines 2, 2: those of CALL={chosen[-1:] or 1} are read" in notes
    for wrong in ("0", "3", "x"):
        with pytest.raises(InputError, match=r"CALL is not one of them: got .*, allowed: 1 to 2"):
            imported(f"{path} CALL={wrong}")
    run, notes = imported(f"{script(tmp_path, '')} CALL=5")
    assert "different arguments" not in notes
