"""Decode throughput of the serving engine: against transformers, at 16 against 1, and Python's share of a step.

    python benchmarks/engine_decode.py [--json PATH] [--quick]

Three questions, one model (SmolLM2-135M, fp32 weights on both sides):

- 16 sequences of 1,024 tokens: output tokens per second of `ServingEngine` over those of transformers' `generate`
  (a static batch of the same prompts, its own dynamic fp32 cache).
- The same engine with 16 sequences over one with 1, at the same length.
- Milliseconds per step outside model and attention at 32 sequences: scheduling, block tables, sampling, text.

Steps alternate: after every step of `generate` each of our engines takes one, all are timed alone, and medians are
compared, so that a busy machine slows all alike. Prefill is not in any figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepared import decoding, engine_of, median, profile_of, prompts, serving

from lowkv.openmp import limit_spinning

if TYPE_CHECKING:
    import torch

    from lowkv.engine import EngineDir
    from lowkv.serving import ServingEngine

SEQUENCES, CONTEXT, STEPS = 16, 1024, 24
OVERHEAD_SEQUENCES, OVERHEAD_STEPS = 32, 40


def run(*, context: int = CONTEXT, steps: int = STEPS) -> dict[str, Any]:
    """Measure everything.

    Returns:
        `over_transformers_b16`, `c16_over_c1`, `python_ms_per_step_32`, and the medians behind them in seconds per
        step; `profile` is where a step's time goes.
    """
    engines = {kv_format: engine_of(kv_format) for kv_format in ("kivi2", "fp16")}
    vocab = engines["kivi2"].model_config.vocab
    batch = prompts(SEQUENCES, context, vocab)
    room = context + 2 * SEQUENCES * context // 200 + 3 * steps + 16  # those admitted first decode all the while
    ours: dict[str, ServingEngine] = {}
    for name, kv_format, count in (("kivi2_16", "kivi2", 16), ("fp16_16", "fp16", 16), ("kivi2_1", "kivi2", 1)):
        _say(f"prefilling {count} x {context} tokens: lowkv, {kv_format} KV")
        ours[name] = serving(engines[kv_format], count, room)
        decoding(ours[name], batch[:count], room - context)
    _say(f"prefilling {SEQUENCES} x {context} tokens: transformers")
    seconds = _alternate(transformers_model(engines["kivi2"]), batch, ours, steps)
    profile = {name: profile_of(engine) for name, engine in ours.items()}
    del ours
    _say(f"Python per step at {OVERHEAD_SEQUENCES} sequences")
    overhead = _overhead(engines["kivi2"], vocab)
    return {
        "over_transformers_b16": seconds["transformers_16"] / seconds["kivi2_16"],
        "over_transformers_b16_fp16": seconds["transformers_16"] / seconds["fp16_16"],
        "c16_over_c1": SEQUENCES * seconds["kivi2_1"] / seconds["kivi2_16"],
        "python_ms_per_step_32": 1e3 * overhead["python"],
        "seconds_per_step": seconds,
        "step_at_32": overhead,
        "profile": profile,
        "context": context,
    }


def transformers_model(engine: EngineDir) -> Any:
    """transformers' model in fp32 with the weights of the engine's checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowkv.models.sources import open_source

    checkpoint = open_source(engine.recipe.model)
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope.theta,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="sdpa",
        )
    )
    state = {name: checkpoint.tensor(name).to(torch.float32) for name in checkpoint.shapes()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    assert not unexpected, unexpected
    model.generation_config.eos_token_id = None
    return model.eval()


def _alternate(model: Any, batch: list[list[int]], ours: dict[str, ServingEngine], steps: int) -> dict[str, float]:
    """Median seconds per step of each side; `generate` sets the pace and everyone else steps in its pauses."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: dict[str, list[float]] = {name: [] for name in ("transformers_16", *ours)}

    class Pause(StoppingCriteria):  # type: ignore[misc]
        """Called by `generate` after every step."""

        resumed = time.perf_counter()

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            times["transformers_16"].append(time.perf_counter() - self.resumed)
            for name, engine in ours.items():
                began = time.perf_counter()
                deltas = engine.step()
                times[name].append(time.perf_counter() - began)
                assert len(deltas) == int(name.rpartition("_")[2]), "a sequence ended early"
            self.resumed = time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids = torch.tensor(batch)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Pause()]),
        )
    # transformers' first time is its prefill; everyone's first is not warm.
    return {name: median(values[1:]) for name, values in times.items()}


def _overhead(directory: EngineDir, vocab: int) -> dict[str, float]:
    """Median seconds of a decode step of 32 sequences: whole, in the model, and the difference."""
    engine = serving(directory, OVERHEAD_SEQUENCES, 256)
    decoding(engine, prompts(OVERHEAD_SEQUENCES, 48, vocab), 200)
    whole, model = [], []
    for _ in range(OVERHEAD_STEPS):
        before = engine.stats()
        engine.step()
        after = engine.stats()
        whole.append(after.step_seconds_total - before.step_seconds_total)
        model.append(after.model_seconds_total - before.model_seconds_total)
    python = [a - b for a, b in zip(whole, model, strict=True)]
    return {"step": median(whole), "model": median(model), "python": median(python)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--quick", action="store_true", help="128 tokens of context, 6 steps")
    options = parser.parse_args()
    limit_spinning(os.environ)
    result = run(context=128, steps=6) if options.quick else run()
    for name, value in result["seconds_per_step"].items():
        count = int(name.rpartition("_")[2])
        print(f"{name:>16}: {1e3 * value:8.1f} ms a step, {count / value:7.1f} tokens/s")
    for name, parts in result["profile"].items():
        print(f"{name:>16}:", ", ".join(f"{part[:-3].replace('_', ' ')} {ms:.1f} ms" for part, ms in parts.items()))
    step = result["step_at_32"]
    print(f"  32 sequences: step {1e3 * step['step']:.1f} ms, model and attention {1e3 * step['model']:.1f} ms")
    print(
        f"over transformers, batch 16, {result['context']} context (target 2): {result['over_transformers_b16']:.2f}x"
    )
    print(f"16 sequences over 1 (target 6): {result['c16_over_c1']:.2f}x")
    print(f"Python per step at 32 sequences (target under 3): {result['python_ms_per_step_32']:.2f} ms")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
