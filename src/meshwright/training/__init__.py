"""Parts that all engines on PyTorch share. No engine is imported here."""
