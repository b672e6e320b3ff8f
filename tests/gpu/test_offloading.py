"""Tensors in host memory on a GPU: pinned copies on streams of their own change no loss, and free device memory."""

from __future__ import annotations

import pytest

WIDE = ("model.hidden=1024", "model.ffn_hidden=4096", "model.num_layers=8", "train.steps=8")


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_optimizer_states(train, losses, states):
    here = train("here", *WIDE, f"optimizer.states={states}")
    there = train("there", *WIDE, f"optimizer.states={states}", "parallel={data_shard: 1, offload: optimizer}")
    assert losses("there") == pytest.approx(losses("here"), rel=1e-3)  # kernels of attention add in any order
    peaks = [record["statistics"]["peak_memory_bytes"] for record in (here, there)]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations(train, losses, recompute):
    plan = f"parallel={{data_shard: 1, recompute: {recompute}}}"
    here = train("here", *WIDE, plan, "batch.micro=16", "batch.global_sequences=16")
    there = train("there", *WIDE, plan, "batch.micro=16", "batch.global_sequences=16", "stack.offloaded_activations=1")
    assert losses("there") == pytest.approx(losses("here"), rel=1e-3)
    peaks = [record["statistics"]["peak_memory_bytes"] for record in (here, there)]
    assert peaks[1] < peaks[0]


def test_pinned_memory_is_freed():
    torch = pytest.importorskip("torch")
    from meshwright.training.host_memory import HostCopies, host_zeros

    device = torch.device("cuda", 0)
    host = host_zeros(1000, dtype=torch.float32, device=device)
    assert host.is_pinned()
    copies = HostCopies(device)
    (fetched,), event = copies.fetch([host])
    copies.wait(event)
    fetched += 1
    copies.wait(copies.store([host], [fetched]))
    copies.settle()
    assert (host == 1).all()
    address = host.data_ptr()
    del host
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0  # done already
