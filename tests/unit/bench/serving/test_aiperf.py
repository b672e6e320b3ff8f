"""AIPerf as the client: its command line, and the same records as with ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from meshwright.bench.serving import aiperf
from meshwright.bench.serving.aiperf import AiperfClient, arguments, check
from meshwright.bench.serving.bench import ServingBenchRequest
from meshwright.bench.serving.endpoint import Endpoint
from meshwright.bench.serving.metrics import LatencyBounds
from meshwright.bench.serving.prompts import PromptSource, parse_lengths
from meshwright.errors import InputError, MissingDependencyError
from meshwright.records.serving import Arrivals, Load, read_serving

CLIENT = AiperfClient(program=Path("/opt/aiperf"), tokenizer=Path("/models/m"))


def request(**more) -> ServingBenchRequest:
    lengths = {name: parse_lengths(more.pop(name, "16"), option=name) for name in ("inputs", "outputs")}
    return ServingBenchRequest(
        **{
            "endpoint": Endpoint(base_url="http://h:1", model="m"), "loads": (Load(concurrency=2),),
            "source": PromptSource(**lengths), "num_requests": 8, **more,
        }
    )  # fmt: skip


def test_the_command_line():
    closed = arguments(CLIENT, request(inputs="normal:64,8"), Load(concurrency=4), seed=3, out=Path("out"))
    text = " ".join(closed)
    for part in ("--isl 64 --isl-stddev 8", "--osl 16", "--concurrency 4", "--extra-inputs ignore_eos:true",
                 "--use-server-token-count", "--warmup-request-count 4", "--streaming", "--random-seed 3"):  # fmt: skip
        assert part in text
    assert "--request-rate" not in text
    open_loop = Load(arrivals=Arrivals.GAMMA, offered_per_s=2.5, shape=0.5)
    bounds = LatencyBounds(ttft_s=0.5, tpot_s=0.03)
    text = " ".join(arguments(CLIENT, request(bounds=bounds), open_loop, seed=1, out=Path("out")))
    assert "--request-rate 2.5 --arrival-pattern gamma --arrival-smoothness 0.5" in text
    assert "--goodput time_to_first_token:500 inter_token_latency:30" in text


@pytest.mark.parametrize(
    "more", [{"ramp_s": 1.0}, {"duration_s": 1.0}, {"inputs": "5-9"}, {"outputs": "lognormal:5,1"}], ids=str
)
def test_what_aiperf_is_not_asked_for_is_refused(more, tmp_path):
    with pytest.raises(InputError, match="AIPerf"):
        check(request(**more), tokenizer=tmp_path, key_variable=None)


def test_an_absent_environment_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(aiperf.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(InputError, match="tokenizer"):
        check(request(), tokenizer=None, key_variable=None)
    with pytest.raises(MissingDependencyError) as caught:
        check(request(), tokenizer=tmp_path, key_variable=None)
    assert caught.value.hint == aiperf.COMMAND


@pytest.mark.slow
def test_both_clients_agree(meshwright, tmp_path):
    """On a server with known latencies, in turn: totals are equal, and medians within 30 %.

    The processes of AIPerf and the server share the cores, so its latencies are longer than ours.
    """
    if aiperf.find() is None:
        pytest.skip(f"AIPerf has no environment here; `{aiperf.COMMAND}` creates it")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["a text"], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    found = {}
    for client in ("meshwright", "aiperf"):
        outcome = meshwright(
            "bench", "serve", "--server", "mock", "--server-option", "ttft=0.2", "--server-option", "itl=0.03",
            "--client", client, "--tokenizer", str(folder), "--endpoint", "chat", "--concurrency", "2",
            "--requests", "8", "--input-tokens", "32", "--output-tokens", "20", "--json",
            "--out", str(tmp_path / client),
        )  # fmt: skip
        assert outcome.exit_code == 0, outcome.stderr
        (found[client],) = json.loads(outcome.stdout)["points"]
        assert read_serving(tmp_path / client).sidecar["client"]["name"] == client
    ours, theirs = found["meshwright"], found["aiperf"]
    for name in ("num_ok", "output_tokens", "num_failed"):
        assert ours[name] == theirs[name], name
    for name in ("ttft_s", "tpot_s", "e2e_s", "chunk_gap_s"):
        assert theirs[name]["median"] == pytest.approx(ours[name]["median"], rel=0.3), name
    assert theirs["output_tokens_per_s"] == pytest.approx(ours["output_tokens_per_s"], rel=0.3)
