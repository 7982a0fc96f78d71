"""Quality of a KV format on real text, measured with the kernels that serve."""

from lowkv.evaluation.quality import FULL_TOKENS, TOKENS, Evaluation, Interval, Quality, evaluate

__all__ = ["FULL_TOKENS", "TOKENS", "Evaluation", "Interval", "Quality", "evaluate"]
