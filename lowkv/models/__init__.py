"""Decoder models: what they are (config), how they compute (decoder), and where their weights and tokenizers
come from (checkpoints).

Nothing is imported here: torch is heavy, and a plan for a model needs only `lowkv.models.config`.
"""
