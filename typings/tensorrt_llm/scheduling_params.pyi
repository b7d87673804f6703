# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from dataclasses import dataclass

# The class is in 1.2.1; its fields are not verified.
@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = ...
    attention_dp_relax: bool | None = ...
