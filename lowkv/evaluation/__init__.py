"""Quality of a KV format, measured with the kernels that serve: text, passkeys, arithmetic, agreement, and the gate."""

from lowkv.evaluation.evaluation import DEFAULT, MEASURES, Evaluation, evaluate
from lowkv.evaluation.intervals import Interval

__all__ = ["DEFAULT", "MEASURES", "Evaluation", "Interval", "evaluate"]
