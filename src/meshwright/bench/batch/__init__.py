"""`bench offline` through the batch interfaces of engines, without a server."""

from __future__ import annotations
