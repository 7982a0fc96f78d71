"""What a model's KV cache costs in every format, and how many sequences fit, without building anything.

Everything here is arithmetic over (model geometry, KV settings, memory, lengths). The cache plan says what a
sequence costs, `kvcache.capacity` how many fit (block rounding, residual, sinks, slabs, scheduler policy);
this module puts memory around them and lays the formats side by side.

Memory of a device, all of it in bytes, never GB against GiB:

    KV budget = (memory - weights - workspace) * fraction

`fraction` is what TensorRT-LLM calls `kv_cache_free_gpu_mem_fraction` (0.9 there and here). With tensor
parallelism every figure is of one device: weights are split evenly, and a device holds at least one KV head,
so that more devices than KV heads store the same KV twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowkv.calibration.auto import choose
from lowkv.errors import LowkvError
from lowkv.kvcache.capacity import Capacity, max_resident
from lowkv.kvcache.formats import AUTO, FORMATS
from lowkv.kvcache.plan import CachePlan
from lowkv.recipe import KVCacheConfig, ServingConfig
from lowkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.table import Table

    from lowkv.models.config import ModelConfig
    from lowkv.recipe import Recipe

INT4_BITS = 4 + 16 / 128 + 4 / 128
"""AWQ and GPTQ with groups of 128: 4 bits, an fp16 scale and a 4-bit zero point per group."""

WEIGHT_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "fp8": 8.0, "int4": INT4_BITS}
SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

BASELINE = "fp16"
LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Load:
    """The sequences that are counted: all of one shape, under one scheduler policy."""

    prompt_tokens: int = 1024
    output_tokens: int = 256
    policy: str = "guaranteed_no_evict"
    max_tokens_per_step: int = 256
    max_sequences: int | None = None
    """The server's own limit on decoding together; None counts what memory alone allows."""


@dataclass(frozen=True)
class Memory:
    """Where the bytes of one device go. `device` None: the KV budget was given, not derived."""

    weights: int
    workspace: int
    budget: int
    device: int | None = None
    fraction: float = 1.0


@dataclass(frozen=True)
class Row:
    """One format (or the recipe itself) in the comparison."""

    name: str
    plan: CachePlan
    capacity: Capacity


@dataclass(frozen=True)
class PlanReport:
    """The whole plan: what was asked for, and every format beside it.

    `rows` holds a row for each format with its own defaults, in the table's order, and in front of them the asked plan
    where it is none of these.
    """

    title: str
    model: ModelConfig
    weights_dtype: str
    tensor_parallel: int
    load: Load
    memory: Memory
    asked: Row
    rows: tuple[Row, ...]
    lengths: tuple[int, ...]
    decimal: bool
    """Sizes are shown in GB (a card's unit) rather than GiB."""
    why: tuple[str, ...] = ()
    """Why the asked format is what it is, where the recipe leaves it open."""

    @property
    def baseline(self) -> Row:
        return next(row for row in self.rows if row.plan.default == BASELINE and not row.plan.seals)

    def gain(self, row: Row) -> float:
        """Sequences of `row` over those of the fp16 baseline; infinite where the baseline holds none."""
        fewest = self.baseline.capacity.sequences
        return row.capacity.sequences / fewest if fewest else float("inf") if row.capacity.sequences else 1.0

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for `--json`. All sizes in bytes, all lengths in tokens."""
        return {
            "title": self.title,
            "why": list(self.why),
            "model": {
                "architecture": self.model.architecture,
                "layers": self.model.layers,
                "kv_heads": self.model.kv_heads,
                "head_dim": self.model.head_dim,
                "weights": self.model.weight_count(),
            },
            "weights_dtype": self.weights_dtype,
            "tensor_parallel": self.tensor_parallel,
            "memory": {
                "device": self.memory.device,
                "weights": self.memory.weights,
                "workspace": self.memory.workspace,
                "fraction": self.memory.fraction,
                "kv_budget": self.memory.budget,
            },
            "load": {
                "prompt_tokens": self.load.prompt_tokens,
                "output_tokens": self.load.output_tokens,
                "policy": self.load.policy,
                "max_tokens_per_step": self.load.max_tokens_per_step,
                "max_sequences": self.load.max_sequences,
            },
            "asked": self.asked.name,
            "formats": [self._row_mapping(row) for row in self.rows],
        }

    def _row_mapping(self, row: Row) -> dict[str, Any]:
        plan = row.plan
        return {
            "name": row.name,
            "format": plan.default,
            "layers": [{"format": layer.format, "window": layer.window} for layer in plan.layers],
            "group_size": plan.group_size,
            "residual": plan.residual,
            "residual_length": plan.residual_length,
            "sink_tokens": plan.sink_tokens,
            "hot_block_bytes": plan.hot_block_bytes,
            "cold_block_bytes": plan.cold_block_bytes,
            "groups": [
                {
                    "window": group.window,
                    "layers": list(group.layers),
                    "hot_block_bytes": group.hot_block_bytes,
                    "cold_block_bytes": group.cold_block_bytes,
                }
                for group in plan.groups
            ],
            "scale_bytes": plan.scale_bytes,
            "bytes_per_token": plan.bytes_per_token,
            "effective_bits": plan.effective_bits(),
            "at": [
                {
                    "tokens": tokens,
                    "bytes": plan.bytes_at(tokens),
                    "saved_by_windows": plan.bytes_saved_by_windows(tokens),
                    "effective_bits": plan.effective_bits(tokens),
                    "compression": plan.compression(tokens),
                }
                for tokens in self.lengths
            ],
            "bytes_per_sequence": row.capacity.bytes_per_sequence,
            "slab_bytes": row.capacity.slab_bytes,
            "slabs": row.capacity.slabs,
            "most_sequences": row.capacity.sequences,
            "gain": self.gain(row),
        }


@dataclass(frozen=True)
class PlanOptions:
    """What a user asks of a plan beyond the recipe or the model; None is the recipe's value or the default."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    context: int | None = None
    """Prompt and output together; the prompt is what the output leaves."""
    budget: str | None = None
    memory: str | None = None
    """Of the device; the KV budget is derived from it."""
    memory_fraction: float = 0.9
    weights_dtype: str | None = None
    format: str | None = None
    group_size: int | None = None
    policy: str | None = None
    tensor_parallel: int = 1
    max_tokens_per_step: int | None = None
    max_sequences: int | None = None

    def load(self, serving: ServingConfig, max_sequences: int | None) -> Load:
        """The load, with what was not asked taken from `serving`. Raises LowkvError for what cannot be."""
        default = Load()
        if self.policy is not None:
            serving = replace(serving, policy=self.policy)  # type: ignore[arg-type]  # it checks itself
        output = default.output_tokens if self.output_tokens is None else self.output_tokens
        prompt = default.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
        if self.context is not None:
            if self.prompt_tokens is not None:
                raise LowkvError("--context and --prompt were both given", fix="leave one of the two out")
            prompt = self.context - output
        for option, tokens in (("--output", output), ("--context" if self.context else "--prompt", prompt)):
            if tokens < 1:
                raise LowkvError(f"{option} leaves no tokens", got=tokens, expected="at least 1 token")
        return Load(
            prompt,
            output,
            serving.policy,
            self.max_tokens_per_step or serving.max_tokens_per_step,
            self.max_sequences or max_sequences,
        )


@dataclass(frozen=True)
class _Shard:
    """A model as one of N tensor-parallel devices sees it."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    softmax_scale: float


def weights_bytes(model: ModelConfig, dtype: str, lm_head: str | None = None) -> int:
    """Bytes of the weights in `dtype`.

    The logits projection is counted in `lm_head` (`dtype` when None); a tied embedding is that same matrix and
    counts once. INT4 and FP8 apply to the layers' projections only: embeddings and, unless `lm_head` says
    otherwise, the logits projection stay in 16 bits, as AWQ, GPTQ and ModelOpt checkpoints have them.
    """
    narrow = WEIGHT_BITS[dtype] < 16
    rest_bits = 16.0 if narrow else WEIGHT_BITS[dtype]
    head_bits = rest_bits if lm_head is None else WEIGHT_BITS[lm_head]
    head = model.head_count()
    embedding = 0 if model.tied_embeddings else head
    layers = model.weight_count() - head - embedding
    return round((layers * WEIGHT_BITS[dtype] + embedding * rest_bits + head * head_bits) / 8)


def workspace_bytes(model: ModelConfig, load: Load, bytes_per_value: float) -> int:
    """Activations of one step, which its layers reuse, and its logits in float32.

    Per token: residual and normed hidden state, q/k/v, the attention's output, gate, up and their product. One
    row of logits per sequence that decodes.
    """
    per_token = 2 * model.hidden + 2 * model.q_width + 2 * model.kv_width + 3 * model.intermediate
    rows = load.max_sequences or load.max_tokens_per_step
    return round(load.max_tokens_per_step * per_token * bytes_per_value) + rows * model.vocab * 4


def memory_of_device(
    model: ModelConfig,
    device: int,
    load: Load,
    *,
    weights_dtype: str,
    lm_head: str | None = None,
    tensor_parallel: int = 1,
    fraction: float = 0.9,
) -> Memory:
    """What a device of `device` bytes leaves for KV. Raises LowkvError when that is nothing, saying what fits."""
    weights = -(-weights_bytes(model, weights_dtype, lm_head) // tensor_parallel)
    workspace = workspace_bytes(model, load, _activation_bytes(weights_dtype))
    budget = int((device - weights - workspace) * fraction)
    if budget <= 0:
        ways = [
            f"--weights-dtype {dtype}"
            for dtype in ("fp8", "int4")
            if WEIGHT_BITS[dtype] < WEIGHT_BITS[weights_dtype]
            and weights_bytes(model, dtype) / tensor_parallel + workspace < 0.9 * device
        ]
        shards = tensor_parallel
        while shards < model.heads:
            shards *= 2
            if model.heads % shards == 0 and weights * tensor_parallel / shards + workspace < 0.9 * device:
                ways.append(f"--tensor-parallel {shards}")
                break
        raise LowkvError(
            f"{model.weight_count() / 1e9:.3g} billion weights in {weights_dtype} leave no memory for KV: "
            f"{format_bytes(weights, decimal=True)} of weights and "
            f"{format_bytes(workspace, decimal=True)} of workspace on a device of "
            f"{format_bytes(device, decimal=True)}",
            fix="use " + " or ".join(ways) if ways else "use a larger device",
        )
    return Memory(weights, workspace, budget, device, fraction)


def report_from_recipe(recipe: Recipe, model: ModelConfig, options: PlanOptions) -> PlanReport:
    """The plan of a recipe, less what `options` changes. Raises LowkvError for what cannot be."""
    kv = recipe.kv_cache
    if options.format is not None:
        kv = replace(kv, format=options.format, residual_length=None, sink_tokens=None, overrides={})
    load = options.load(recipe.serving, recipe.serving.max_sequences)
    lm_head = recipe.lm_head.effective if options.weights_dtype is None else None
    weights = recipe.weights
    stored = weights.dtype if weights.quantization == "none" else weights.quantization
    return _report(recipe.name, model, kv, load, options, stored, lm_head, recipe.serving.max_model_len)


def report_from_config(path: Path, options: PlanOptions) -> PlanReport:
    """The plan of a model of which only the Hugging Face `config.json` is there.

    Weights are counted in bfloat16 and steps of 2,048 tokens unless `options` says otherwise. Raises LowkvError for a
    file that cannot be read, an unknown architecture, and when neither memory nor a budget is given.
    """
    from lowkv.models.config import ModelConfig

    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LowkvError(f"cannot read {path}: {error}", fix="give the path of a model's config.json") from error
    if not isinstance(plain, dict):
        raise LowkvError(f"{path} is not a model's config.json", got=plain, expected="a JSON object")
    if options.memory is None and options.budget is None:
        raise LowkvError(
            "how much memory is there?", fix="give --memory 80GB (the device's) or --budget 40GB (KV alone)"
        )
    model = ModelConfig.from_hf_config(plain)
    kv = KVCacheConfig(format=options.format or AUTO, model_dtype="bfloat16")
    load = options.load(ServingConfig(max_tokens_per_step=2048), None)
    title = path.stem if path.name != "config.json" else path.resolve().parent.name
    return _report(title, model, kv, load, options, "bfloat16", None, None)


def _report(
    title: str,
    model: ModelConfig,
    kv: KVCacheConfig,
    load: Load,
    options: PlanOptions,
    weights_dtype: str,
    lm_head: str | None,
    max_model_len: int | None,
) -> PlanReport:
    if options.group_size is not None:
        kv = replace(kv, group_size=options.group_size)
    why: tuple[str, ...] = ()
    if kv.format == AUTO:
        choice = choose(model, kv, min(max_model_len or model.max_positions, model.max_positions))
        kv, why = choice.kv_cache, choice.why
    asked = options.weights_dtype or weights_dtype
    dtype = SHORT_NAMES.get(asked, asked)
    if dtype not in WEIGHT_BITS:
        raise LowkvError("--weights-dtype is not known", got=asked, expected=" | ".join([*WEIGHT_BITS, *SHORT_NAMES]))
    if options.tensor_parallel < 1 or model.heads % options.tensor_parallel:
        raise LowkvError(
            "the query heads do not divide among the devices",
            got=options.tensor_parallel,
            expected=f"a divisor of {model.heads} for --tensor-parallel",
        )
    if not 0 < options.memory_fraction <= 1:
        raise LowkvError(
            "--memory-fraction is no share", got=options.memory_fraction, expected="more than 0, at most 1"
        )
    if options.memory is not None and options.budget is not None:
        raise LowkvError("--memory and --budget were both given", fix="leave one of the two out")
    if options.memory is not None:
        memory = memory_of_device(
            model,
            parse_bytes(options.memory),
            load,
            weights_dtype=dtype,
            lm_head=lm_head,
            tensor_parallel=options.tensor_parallel,
            fraction=options.memory_fraction,
        )
    else:
        weights = -(-weights_bytes(model, dtype, lm_head) // options.tensor_parallel)
        workspace = workspace_bytes(model, load, _activation_bytes(dtype))
        budget = kv.budget if options.budget is None else parse_bytes(options.budget)
        memory = Memory(weights, workspace, budget)
    # A card's memory is sold in GB; whoever writes GiB wants GiB back.
    size = options.memory or options.budget or "MiB"
    report = make_report(
        title,
        model,
        kv,
        load,
        memory,
        weights_dtype=dtype,
        tensor_parallel=options.tensor_parallel,
        decimal="i" not in size.lower(),
    )
    return replace(report, why=why)


def make_report(
    title: str,
    model: ModelConfig,
    kv: KVCacheConfig,
    load: Load,
    memory: Memory,
    *,
    weights_dtype: str,
    tensor_parallel: int = 1,
    decimal: bool = False,
) -> PlanReport:
    """Prices `kv`, and beside it every other format with its own default residual and sink.

    The others keep `kv`'s group size, skipped layers and residual policy, so that one thing differs: the format.
    """
    total = load.prompt_tokens + load.output_tokens
    if total > model.max_positions:
        raise LowkvError(
            "prompt and output are longer than the model reads",
            got=f"{load.prompt_tokens} + {load.output_tokens} tokens",
            expected=f"at most {model.max_positions} together",
            fix="use a smaller --prompt or --output",
        )
    shard = _Shard(
        model.layers,
        -(-model.kv_heads // tensor_parallel),
        model.head_dim,
        model.windows,
        model.softmax_scale,
    )

    def row(name: str, plan: CachePlan) -> Row:
        capacity = max_resident(
            plan,
            memory.budget,
            load.prompt_tokens,
            load.output_tokens,
            policy=load.policy,
            max_tokens_per_step=load.max_tokens_per_step,
        )
        return Row(name, plan, capacity)

    rows = []
    for name in FORMATS:
        uniform = replace(kv, format=name, residual_length=None, sink_tokens=None, overrides={})
        rows.append(row(name, CachePlan.from_config(shard, uniform)))
    plan = CachePlan.from_config(shard, kv)
    asked = next((row for row in rows if row.plan == plan), None)
    if asked is None:
        asked = row(title, plan)
        rows.insert(0, asked)
    lengths = sorted({total, *(length for length in LENGTHS if length <= model.max_positions)})
    return PlanReport(
        title, model, weights_dtype, tensor_parallel, load, memory, asked, tuple(rows), tuple(lengths), decimal
    )


def _activation_bytes(weights_dtype: str) -> float:
    return max(WEIGHT_BITS[weights_dtype], 16.0) / 8


# -- printing ----------------------------------------------------------------------------------------------


def render(report: PlanReport) -> list[RenderableType]:
    """The report as rich tables and lines."""
    return [
        _heading(report),
        "",
        _layers_title(report.asked.plan),
        _layers_table(report.asked.plan),
        *_windows(report),
        "[bold]One sequence[/bold]: bytes, and compression over 16 bit, residual and sink included",
        _lengths_table(report),
        _capacity_title(report),
        _capacity_table(report),
        *_notes(report),
    ]


def _size(report: PlanReport, size: float) -> str:
    return format_bytes(size, decimal=report.decimal)


def _heading(report: PlanReport) -> str:
    model, memory = report.model, report.memory
    what = (
        f"[bold]{report.title}[/bold]: {model.architecture}, {model.layers} layers, {model.heads} query heads, "
        f"{model.kv_heads} KV heads of {model.head_dim}, {model.weight_count() / 1e6:,.1f} M weights"
    )
    where = (
        f"weights {_size(report, memory.weights)} ({report.weights_dtype}), "
        f"workspace {_size(report, memory.workspace)}, KV budget {_size(report, memory.budget)}"
    )
    if memory.device is not None:
        where += f" = ({_size(report, memory.device)} - weights - workspace) x {memory.fraction:g}"
    if report.tensor_parallel > 1:
        where += f"\nall sizes are of one of {report.tensor_parallel} tensor-parallel devices"
    return f"{what}\n{where}"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _layers_title(plan: CachePlan) -> str:
    return (
        f"[bold]Plan[/bold]: blocks of {plan.group_size} tokens, residual {plan.residual_length} ({plan.residual}), "
        f"sink {plan.sink_tokens}, unsealed blocks {plan.hot}"
    )


def _layers_table(plan: CachePlan) -> Table:
    """The asked plan, a line for every run of layers that are alike."""
    table = _table("layers", "format", "chosen by", "window", "bytes/token", "bits")
    values = 2 * plan.kv_heads * plan.head_dim
    start = 0
    for end in range(1, len(plan.layers) + 1):
        layer = plan.layers[start]
        if end < len(plan.layers) and plan.layers[end] == layer:
            continue
        per_token = plan.cold_records[start].bytes / plan.group_size
        table.add_row(
            str(start) if end - start == 1 else f"{start}-{end - 1}",
            layer.format,
            layer.reason,
            "-" if layer.window is None else str(layer.window),
            f"{per_token:,.1f}",
            f"{8 * per_token / values:.2f}",
        )
        start = end
    return table


def _windows(report: PlanReport) -> list[RenderableType]:
    """What the asked plan's groups take of one sequence, and what their windows save; nothing without windows."""
    plan = report.asked.plan
    if not any(group.window for group in plan.groups):
        return []
    table = _table("window", "layers", *(f"{tokens:,} tokens" for tokens in report.lengths))
    for group in plan.groups:
        sizes = (_size(report, group.bytes_at(tokens)) for tokens in report.lengths)
        table.add_row("-" if group.window is None else f"{group.window:,}", str(len(group.layers)), *sizes)
    saved = (_size(report, plan.bytes_saved_by_windows(tokens)) for tokens in report.lengths)
    table.add_row("saved", "", *saved)
    return ["[bold]Windows[/bold]: bytes of one sequence; blocks that a group's window has left are freed", table]


def _marked(report: PlanReport, row: Row) -> str:
    return f"[bold]{row.name} <-[/bold]" if row is report.asked else row.name


def _lengths_table(report: PlanReport) -> Table:
    table = _table(
        "format",
        "bytes/token",
        "bits",
        *(f"{tokens:,} tokens" for tokens in report.lengths),
    )
    for row in report.rows:
        plan = row.plan
        table.add_row(
            _marked(report, row),
            f"{plan.bytes_per_token:,.0f}",
            f"{plan.effective_bits():.2f}",
            *(f"{_size(report, plan.bytes_at(tokens))} ({plan.compression(tokens):.2f}x)" for tokens in report.lengths),
        )
    return table


def _capacity_title(report: PlanReport) -> str:
    load = report.load
    return (
        f"[bold]Most sequences resident[/bold] in {_size(report, report.memory.budget)}: "
        f"{load.prompt_tokens:,} prompt + {load.output_tokens:,} output tokens each, {load.policy}"
    )


def _capacity_table(report: PlanReport) -> Table:
    tokens = report.load.prompt_tokens + report.load.output_tokens
    table = _table(
        "format",
        f"effective bits at {tokens:,}",
        "reserved a sequence",
        "slab",
        "slabs",
        "sequences",
        f"over {BASELINE}",
    )
    for row in report.rows:
        table.add_row(
            _marked(report, row),
            f"{row.plan.effective_bits(tokens):.2f}",
            _size(report, row.capacity.bytes_per_sequence),
            _size(report, row.capacity.slab_bytes),
            f"{row.capacity.slabs:,}",
            f"{row.capacity.sequences:,}",
            f"{report.gain(row):.2f}x",
        )
    return table


def _notes(report: PlanReport) -> list[str]:
    asked, limit = report.asked, report.load.max_sequences
    notes = [f"kv_cache.format auto: {why}" for why in report.why]
    if asked.capacity.sequences == 0:
        notes.append(
            f"[red]Not even one such sequence fits: it needs {_size(report, asked.capacity.bytes_per_sequence)} "
            f"of {_size(report, report.memory.budget)}. Raise kv_cache.budget or shorten --prompt.[/red]"
        )
    elif limit is not None and asked.capacity.sequences > limit:
        notes.append(
            f"serving.max_sequences {limit} is the limit, not memory: "
            f"{asked.capacity.sequences:,} would fit. Raise it to use them."
        )
    if report.tensor_parallel > report.model.kv_heads:
        notes.append(
            f"{report.model.kv_heads} KV heads on {report.tensor_parallel} devices: "
            "each KV head is stored more than once."
        )
    return notes
