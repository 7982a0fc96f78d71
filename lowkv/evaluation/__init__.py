"""Quality of a KV format on real text, measured with the kernels that serve."""

from lowkv.evaluation.quality import TOKENS, Evaluation, Interval, Quality, evaluate

__all__ = ["TOKENS", "Evaluation", "Interval", "Quality", "evaluate"]
