"""The engine: requests over a model and its state."""

from dspark.engine.llm import LLM, Completion
from dspark.engine.opening import embedded_folder
from dspark.engine.request import Emission, TokenLogprob

__all__ = ["LLM", "Completion", "Emission", "TokenLogprob", "embedded_folder"]
