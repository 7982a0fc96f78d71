"""Continuous-batching engine: sequences, scheduler, sampler, detokenizer, executors. No Triton in it."""

from lowkv.serving.engine import Completion, Delta, EngineStats, Request, ServingEngine
from lowkv.serving.loop import EngineLoop
from lowkv.serving.params import SamplingParams

__all__ = ["Completion", "Delta", "EngineLoop", "EngineStats", "Request", "SamplingParams", "ServingEngine"]
