"""Records packed into samples have the loss and gradients of the same records alone: nothing leaks between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.processors import pretend, without_amx
from tests.rounding import assert_equals
from tests.tiny_models import DENSE, LATENT, MIXTURE

from meshwright.kernels import dispatch
from meshwright.kernels.dispatch import KernelRouting
from meshwright.kernels.processor import Multiplies
from meshwright.specs.model import Model
from meshwright.training.data import Batches
from meshwright.training.data.documents import TextDocument, TextSpan
from meshwright.training.data.packing import WholeSamples, whole_samples
from meshwright.training.data.records import RecordCounts
from meshwright.training.data.source import DocumentSource
from meshwright.training.data.split import everything
from meshwright.training.data.store import TokenStore
from meshwright.training.data.tokenization import tokenise
from meshwright.training.data.tokenizer import ByteTokenizer
from meshwright.training.models import Transformer, build_model, init_weights

PACKED, LONGEST = 64, 40
MODELS: dict[str, Model] = {
    "dense": DENSE,
    "window": replace(DENSE, attention=replace(DENSE.attention, window=5, num_windowed_layers=1)),
    "experts": MIXTURE,
    "latent": LATENT,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Records of 3 to 40 tokens, prompts and answers; several answers in one of them, none in another."""
    generator = np.random.default_rng(0)
    records = []
    for length in (9, 21, 3, 33, 14, LONGEST - 1, 6, 6, 25):
        text = "".join(chr(97 + c) for c in generator.integers(0, 26, length))
        records.append(TextDocument(text=text, trained=(TextSpan(length // 2, length),)))
    talk = "question answer more again"
    records.append(TextDocument(text=talk, trained=(TextSpan(9, 15), TextSpan(21, 26))))
    records.append(TextDocument(text="no answer", trained=()))

    def read(chat: Any, counts: RecordCounts) -> Any:
        return iter(records)

    source = DocumentSource(name="records", num_bytes=None, read=read, identify=lambda: "records")
    return tokenise(source, ByteTokenizer(), cache=tmp_path_factory.mktemp("cache"))


def drawn(model: Model) -> Transformer:
    module = build_model(replace(model, vocab=260), device="cpu")
    init_weights(module, seed=1, std=0.3)
    return module


def trained(module: Transformer, samples: WholeSamples) -> tuple[dict[str, Any], int]:
    """The gradients of the summed loss over all labels, the loss itself, and the number of labels."""
    module.zero_grad()
    batch = Batches(samples=samples, global_batch=samples.num_samples, is_shuffled=False).at(0)
    loss = module(batch.tokens_BT, batch.positions_BT, documents_BT=batch.documents_BT, labels_BT=batch.labels_BT)
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach()}, batch.num_trained_tokens


@pytest.mark.parametrize("is_blockwise", [False, True], ids=["fused", "blockwise"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_records_have_the_loss_and_gradients_of_single_ones(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, name: str, is_blockwise: bool
) -> None:
    if is_blockwise:
        without_amx(monkeypatch)
    else:
        pretend(monkeypatch, Multiplies.AMX)  # PyTorch's kernel is taken
    monkeypatch.setattr(dispatch, "_active", KernelRouting())
    packed = whole_samples(store, everything(store), sequence_length=PACKED)
    single = replace(
        packed, sequence_length=LONGEST,
        ranges_P2=np.array(
            [[store.start_of(d), store.start_of(d + 1)] for d in range(store.num_documents)], dtype=np.int64
        ),
    )  # fmt: skip
    assert packed.num_samples <= single.num_samples / 2
    module = drawn(MODELS[name])
    alone, num_alone = trained(module, single)
    assert trained(module, packed)[1] == num_alone
    assert_equals(lambda: trained(module, packed)[0], alone, weights=module.parameters(), terms=module.model.vocab)


def test_without_the_mask_records_would_leak(store: TokenStore) -> None:
    """The test above can fail."""
    packed = whole_samples(store, everything(store), sequence_length=PACKED)
    module = build_model(replace(DENSE, vocab=260), device="cpu")
    init_weights(module, seed=1, std=0.3)
    batch = Batches(samples=packed, global_batch=packed.num_samples, is_shuffled=False).at(0)
    with torch.no_grad():
        masked, leaking = (
            module(batch.tokens_BT, batch.positions_BT, documents_BT=documents, labels_BT=batch.labels_BT)
            for documents in (batch.documents_BT, None)
        )
    assert abs(masked.item() - leaking.item()) > 1e-3
