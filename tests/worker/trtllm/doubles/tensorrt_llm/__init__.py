"""Stands in for TensorRT-LLM in tests, and says so: see tests/worker/trtllm/double.py."""

from tests.worker.trtllm.double import VERSION as __version__

__all__ = ["__version__"]
