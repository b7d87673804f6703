# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from . import executor as executor

def steady_clock_now() -> object: ...
