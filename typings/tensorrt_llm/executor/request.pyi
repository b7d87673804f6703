# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from dataclasses import dataclass

# 1.2.1: no DEFAULT_REQUEST_PRIORITY here (1.3+ only).
@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ...

@dataclass(slots=True)
class PromptAdapterRequest:
    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str = ...
