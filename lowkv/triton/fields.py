"""The tensors of a generation model, one row each: the writer, the model and the client all read this table.

Names and types are those of TensorRT-LLM's `ensemble` (triton_backend/all_models/inflight_batcher_llm), so that
its clients and Triton's OpenAI frontend work unchanged. What is ours beside them: `ignore_eos` in, and
`finish_reason` out. Inputs of the ensemble that this engine cannot honour are either listed with the one value
that means "off" (`NEUTRAL`), or left out, so that Triton itself refuses them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["TYPE_STRING", "TYPE_INT32", "TYPE_UINT64", "TYPE_FP32", "TYPE_BOOL"]


@dataclass(frozen=True)
class Field:
    """One tensor. `dims` leaves out the batch dimension, which is always 1."""

    name: str
    dtype: DType
    dims: tuple[int, ...] = (1,)
    optional: bool = True

    @property
    def scalar(self) -> bool:
        return self.dims == (1,)


INPUTS: tuple[Field, ...] = (
    Field("text_input", "TYPE_STRING", optional=False),
    Field("max_tokens", "TYPE_INT32", optional=False),
    Field("stream", "TYPE_BOOL"),
    Field("min_tokens", "TYPE_INT32"),
    Field("temperature", "TYPE_FP32"),
    Field("top_k", "TYPE_INT32"),
    Field("top_p", "TYPE_FP32"),
    Field("repetition_penalty", "TYPE_FP32"),
    Field("presence_penalty", "TYPE_FP32"),
    Field("frequency_penalty", "TYPE_FP32"),
    Field("seed", "TYPE_UINT64"),
    Field("stop_words", "TYPE_STRING", (-1,)),
    Field("bad_words", "TYPE_STRING", (-1,)),
    Field("end_id", "TYPE_INT32"),
    Field("pad_id", "TYPE_INT32"),
    Field("ignore_eos", "TYPE_BOOL"),
    Field("exclude_input_in_output", "TYPE_BOOL"),
    Field("return_log_probs", "TYPE_BOOL"),
    Field("return_num_input_tokens", "TYPE_BOOL"),
    Field("return_num_output_tokens", "TYPE_BOOL"),
    # Older names of seed and min_tokens.
    Field("random_seed", "TYPE_UINT64"),
    Field("min_length", "TYPE_INT32"),
    # Accepted only at the value that switches them off.
    Field("length_penalty", "TYPE_FP32"),
    Field("beam_width", "TYPE_INT32"),
    Field("num_return_sequences", "TYPE_INT32"),
    Field("return_context_logits", "TYPE_BOOL"),
    Field("return_generation_logits", "TYPE_BOOL"),
    Field("return_perf_metrics", "TYPE_BOOL"),
)

OUTPUTS: tuple[Field, ...] = (
    Field("text_output", "TYPE_STRING", (-1,)),
    Field("cum_log_probs", "TYPE_FP32", (-1,)),
    Field("output_log_probs", "TYPE_FP32", (-1, -1)),
    Field("num_input_tokens", "TYPE_INT32"),
    Field("num_output_tokens", "TYPE_INT32"),
    Field("sequence_index", "TYPE_INT32"),
    Field("finish_reason", "TYPE_STRING"),
)

ALIASES: dict[str, str] = {"random_seed": "seed", "min_length": "min_tokens"}
"""Older name -> name."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "length_penalty": (0.0, 1.0),
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
}
"""Inputs that the engine has no use for, and the values that ask for nothing."""

INPUT_BY_NAME: dict[str, Field] = {field.name: field for field in INPUTS}
