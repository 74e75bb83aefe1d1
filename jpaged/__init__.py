"""jpaged: LLM inference in JAX with a paged KV cache and continuous batching."""

from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.engine import Engine
from jpaged.llm import LLM
from jpaged.request import CompletionOutput, Logprob, RequestOutput
from jpaged.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
]
