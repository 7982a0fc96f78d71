"""A KV format for every layer, under a budget of bits, by what each layer was measured to lose in each format.

`lowkv tune` stands on this. The search is three steps: measure every layer alone (`sensitivity`), choose (`selection`),
and hold the plan that was chosen against others on text that had no part in choosing it (`search`). The result is a
recipe (`recipe_file`), built and served like any other.
"""

from lowkv.tuning.search import Request, Tuning, tune

__all__ = ["Request", "Tuning", "tune"]
