"""Text to batches: sources, tokenizers, tokens in a cache, samples, and batches that are a pure function of the step.

open_data(run)  ->  Corpus(train, validations, tokenizer)
Batches(samples=corpus.train, global_batch=..., seed=..., data_rank=..., data_width=...).at(step)
"""

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.data.batches import Batch, Batches, joined
from meshwright.training.data.corpus import Corpus, open_data, open_tokenizer, require_sources
from meshwright.training.data.packing import PADDING_DOCUMENT, Samples
from meshwright.training.data.tokenization import TokenizationProgress
from meshwright.training.data.tokenizer import Tokenizer
from meshwright.training.data.workers import ReadAhead, WorkerChoice, measure_workers
