"""The torchtitan engine: TorchTitan 0.3.0, unpatched. Runs that it does not support are refused."""

VERSION = "0.3.0"
