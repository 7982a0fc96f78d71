"""Where the static scales of 8-bit KV formats come from, and how they are kept.

`scales` is what an engine records and the kernels get; `text` the tokens that are looked at, `probe` what the model's
keys and values look like on them, `estimate` the scales that follow, `routes` all of it from a recipe.
"""
