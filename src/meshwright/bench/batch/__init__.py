"""`bench offline` through the batch interfaces of engines, without a server.

engines     adapters by name: vLLM, llama.cpp, transformers
worker      process of one replica: loads a model and answers batches
replicas    all replicas of a measurement, pinned to devices or cores, measured together
"""

from __future__ import annotations
