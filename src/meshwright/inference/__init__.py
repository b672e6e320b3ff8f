"""Serving and offline inference, projected without a tensor framework.

    formats     bytes of a weight and of a cached value, scales included
    memory      weights and KV cache of a model on one device
    layout      how one replica is split over devices, and how many replicas there are
    capacity    sessions and tokens that a cluster holds: arithmetic, nothing fitted

Imports point downwards: `inference` reads `cost`, `calibration`, `catalog` and `specs`.
"""

from __future__ import annotations
