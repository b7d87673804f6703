# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from .disaggregated_params import DisaggregatedParams as DisaggregatedParams
from .llmapi import LLM as LLM
from .sampling_params import SamplingParams as SamplingParams

__version__: str
