# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from .request import LoRARequest as LoRARequest
from .request import PromptAdapterRequest as PromptAdapterRequest
from .result import CompletionOutput as CompletionOutput
from .result import GenerationResult as GenerationResult
from .result import IterationResult as IterationResult
