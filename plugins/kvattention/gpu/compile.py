"""Ahead-of-time compilation of the Triton kernels to cubins, and the folder of cubins that an engine carries.

Compiling needs no GPU. It happens in processes of its own, one a core: a process either interprets kernels
(TRITON_INTERPRET, which Triton reads when a kernel is declared) or compiles them, and compiler settings that happen
to be in the environment must not reach the bytes. Loading the folder needs neither Triton nor a GPU. What loads a
cubin into a GPU is `driver`.

    kernels/kernels.json            what each kernel is launched with
    kernels/<variant>.cubin         machine code, of exactly one compute capability
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvattention.gpu.limits import REGISTERS

if TYPE_CHECKING:
    from kvattention.gpu.variants import Variant

KERNELS = "kvattention.gpu.kernels"
"""The module whose functions the variants name."""

INDEX = "kernels.json"
INDEX_FORMAT = 1

POINTER_ALIGNMENT = 16
"""Bytes to which every pointer argument is aligned; kernels are compiled for it and loads are as wide as it allows."""

_REGISTERS = (128, 168, 255)
"""Registers a thread, tried in turn when fewer were used and some spilled."""

Arguments = tuple[tuple[str, str], ...]


class CompileError(RuntimeError):
    """A kernel does not compile, or not to something that can be launched as we launch."""


@dataclass(frozen=True)
class Source:
    """A kernel function and what its compilation depends on; plain data, to be sent to a compiling process."""

    name: str
    module: str
    function: str
    arguments: Arguments
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    sm: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its machine code, and what launching it and judging it need."""

    name: str
    sm: int
    entry: str
    arguments: Arguments
    """(name, Triton type) of the launch's arguments, in order."""
    hidden: tuple[str, ...]
    """Types of the arguments behind them that Triton adds (scratch memory, which our kernels do not use: nulls)."""
    num_warps: int
    shared: int
    """Bytes of dynamic shared memory."""
    registers: int
    spilled: int
    """Bytes of each thread's registers that live in local memory."""
    triton: str
    image: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.image).hexdigest()


_Waiting = queue.SimpleQueue[tuple[int, Source] | None]
_Done = queue.SimpleQueue[tuple[int, Cubin | BaseException]]


def source(variant: Variant, sm: int) -> Source:
    """What compiling ``variant`` for ``sm`` takes. Raises ValueError when the variant needs a later generation."""
    if sm < variant.min_sm:
        raise ValueError(f"kernel {variant.name} needs compute capability {variant.min_sm} or later, got {sm}")
    return Source(
        name=variant.name,
        module=KERNELS,
        function=variant.kernel,
        arguments=tuple(variant.arguments),
        constants=dict(variant.constants),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        sm=sm,
    )


def compile_variant(variant: Variant, sm: int) -> Cubin:
    """One kernel, compiled. Raises CompileError with the compiler's words."""
    (result,) = compile_all([source(variant, sm)])
    if isinstance(result, CompileError):
        raise result
    return result


def compile_all(
    sources: Sequence[Source],
    *,
    workers: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Cubin | CompileError]:
    """Every source's cubin, or why there is none, in the order given.

    ``workers`` is the number of processes (None: one a usable core). ``progress(done, total, name)`` is called from
    this thread as each finishes.
    """
    count = max(1, min(workers or len(os.sched_getaffinity(0)), len(sources)))
    waiting: _Waiting = queue.SimpleQueue()
    done: _Done = queue.SimpleQueue()
    for item in enumerate(sources):
        waiting.put(item)
    for _ in range(count):
        waiting.put(None)
    threads = [threading.Thread(target=_feed, args=(waiting, done), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    results: dict[int, Cubin | CompileError] = {}
    try:
        while len(results) < len(sources):
            index, result = done.get()
            if not isinstance(result, Cubin | CompileError):
                raise result
            results[index] = result
            if progress is not None:
                progress(len(results), len(sources), sources[index].name)
    finally:
        _empty(waiting)
        for _ in range(count):
            waiting.put(None)
        for thread in threads:
            thread.join()
    return [results[index] for index in range(len(sources))]


def write_cubins(
    folder: Path,
    variants: Iterable[Variant],
    sm: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[str, ...]:
    """Compile ``variants`` into ``folder``; returns the names of the files written there, INDEX last.

    The same versions of Triton and of the kernels give the same bytes. Raises CompileError for the first kernel
    that does not compile, after all have been tried.
    """
    chosen = sorted({variant.name: variant for variant in variants}.values(), key=lambda variant: variant.name)
    cubins = []
    for result in compile_all([source(variant, sm) for variant in chosen], progress=progress):
        if isinstance(result, CompileError):
            raise result
        cubins.append(result)
    return write_index(folder, cubins, sm)


def write_index(folder: Path, cubins: Sequence[Cubin], sm: int) -> tuple[str, ...]:
    """Write compiled kernels into ``folder``; returns the names of the files written there, INDEX last."""
    folder.mkdir(parents=True, exist_ok=True)
    for cubin in cubins:
        (folder / _file(cubin.name)).write_bytes(cubin.image)
    (folder / INDEX).write_text(json.dumps(_index(cubins, sm), indent=1) + "\n", encoding="utf-8")
    return (*(_file(cubin.name) for cubin in cubins), INDEX)


class KernelSet:
    """The cubins of one folder, for one compute capability; read from disk when asked for."""

    def __init__(self, folder: Path, sm: int, kernels: dict[str, dict[str, Any]], triton: str) -> None:
        self.folder = folder
        self.sm = sm
        self.triton = triton
        self._kernels = kernels

    @classmethod
    def open(cls, folder: Path, sm: int) -> KernelSet:
        """The kernels of ``folder`` for a GPU of compute capability ``sm``.

        Raises ValueError when the folder holds no kernels, or those of another compute capability.
        """
        path = folder / INDEX
        if not path.is_file():
            raise ValueError(f"kernels {folder} lack {INDEX}; expected a folder written by write_cubins")
        index = json.loads(path.read_text(encoding="utf-8"))
        if index.get("format") != INDEX_FORMAT:
            raise ValueError(f"kernels {path} have format {index.get('format')}, expected {INDEX_FORMAT}; build again")
        if index["sm"] != sm:
            raise ValueError(
                f"kernels {folder} are for compute capability {index['sm']}, but this GPU's is {sm}; "
                f"build the engine for {sm}"
            )
        return cls(folder, sm, index["kernels"], index["triton"])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kernels)

    def load(self, variant: Variant) -> Cubin:
        """The cubin of ``variant``.

        Raises ValueError when the folder does not hold it, holds it with other arguments, or its bytes have changed.
        """
        record = self._kernels.get(variant.name)
        if record is None:
            raise ValueError(
                f"kernels {self.folder} lack {variant.name}; they hold {', '.join(self._kernels) or 'none'}; "
                "build the engine again"
            )
        image = (self.folder / record["file"]).read_bytes()
        fields = {key: value for key, value in record.items() if key not in ("file", "sha256")}
        fields |= {"arguments": _pairs(record["arguments"]), "hidden": tuple(record["hidden"])}
        cubin = Cubin(name=variant.name, sm=self.sm, triton=self.triton, image=image, **fields)
        if cubin.sha256 != record["sha256"]:
            raise ValueError(f"kernel {self.folder / record['file']} is damaged: its SHA-256 is not that in {INDEX}")
        if cubin.arguments != tuple(variant.arguments):
            raise ValueError(
                f"kernel {variant.name} in {self.folder} was built by another version: it takes "
                f"{cubin.arguments}, expected {tuple(variant.arguments)}; build the engine again"
            )
        return cubin


def _file(name: str) -> str:
    return f"{name}.cubin"


def _index(cubins: Sequence[Cubin], sm: int) -> dict[str, Any]:
    kernels = {}
    for cubin in cubins:
        record = asdict(cubin)
        for key in ("name", "sm", "triton", "image"):
            del record[key]
        kernels[cubin.name] = {"file": _file(cubin.name), "sha256": cubin.sha256, **record}
    triton = cubins[0].triton if cubins else ""
    return {"format": INDEX_FORMAT, "sm": sm, "triton": triton, "kernels": kernels}


def _pairs(items: Iterable[Sequence[str]]) -> Arguments:
    return tuple((name, kind) for name, kind in items)


# The compiling processes. One thread here feeds one process there, a line of JSON each way.


def _empty(waiting: _Waiting) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()


def _feed(waiting: _Waiting, done: _Done) -> None:
    """Send sources to one process of our own until None comes; every outcome goes to ``done``."""
    try:
        with _Worker() as worker:
            while (item := waiting.get()) is not None:
                index, wanted = item
                done.put((index, worker.compile(wanted)))
    except BaseException as error:
        done.put((-1, error))


class _Worker:
    """A process that compiles, ``python -m kvattention.gpu.compile``; started again when a compilation ends it."""

    def __enter__(self) -> _Worker:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def compile(self, wanted: Source) -> Cubin | CompileError:
        place = f"{wanted.name} for compute capability {wanted.sm}"
        line = self._ask(json.dumps(asdict(wanted)).encode() + b"\n")
        if not line:
            words = self._stop()
            self._start()
            return CompileError(f"{place}: the compiling process ended\n{words}")
        reply = json.loads(line)
        if "error" in reply:
            return CompileError(f"{place}: {reply['error']}")
        reply |= {"arguments": _pairs(reply["arguments"]), "hidden": tuple(reply["hidden"])}
        return Cubin(**reply | {"image": base64.b64decode(reply["image"])})

    def _start(self) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvattention.gpu.compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
        )

    def _ask(self, line: bytes) -> bytes:
        """The process's answer; empty when it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            return b""
        return stdout.readline()

    def _stop(self) -> str:
        """End the process; the last of what it wrote to standard error."""
        self._process.communicate()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace")[-2000:]
        self._errors.close()
        return f"exit status {self._process.returncode}\n{words}".strip()


def _environment() -> dict[str, str]:
    """This process's environment without what would change how or what Triton compiles."""
    kept = ("TRITON_CACHE_DIR", "TRITON_HOME")
    dropped = ("DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "USE_IR_LOC", "LLVM_EXTRACT_DI_LOCAL_VARIABLES")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not (name.startswith("TRITON_") or name in dropped)
    }
    # Line information would carry this checkout's path into the bytes.
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


def _serve() -> None:
    """In a compiling process: read sources from standard input, answer on what was standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints goes to standard error
    for line in sys.stdin.buffer:
        fields = json.loads(line)
        wanted = Source(**fields | {"arguments": _pairs(fields["arguments"])})
        try:
            reply = _compile(wanted)
        except Exception as error:
            words = str(error) if isinstance(error, CompileError) else traceback.format_exc(limit=-3)
            reply = {"error": words.strip()}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


def _compile(wanted: Source) -> dict[str, Any]:
    """The fields of a Cubin, as JSON carries them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(wanted.module), wanted.function)
    signature = dict(wanted.arguments) | dict.fromkeys(wanted.constants, "constexpr")
    names = function.arg_names
    if set(names) != set(signature):
        differ = sorted(set(names) ^ set(signature))
        raise CompileError(f"{wanted.function} takes {tuple(names)}; the variant differs in {differ}")
    if [name for name in names if name not in wanted.constants] != [name for name, _ in wanted.arguments]:
        raise CompileError(f"{wanted.function} takes its arguments in the order {tuple(names)}")
    aligned = [["tt.divisibility", POINTER_ALIGNMENT]]
    attributes = {(i,): aligned for i, name in enumerate(names) if signature[name].startswith("*")}
    ordered = {name: signature[name] for name in names}
    ast = ASTSource(function, signature=ordered, constexprs=dict(wanted.constants), attrs=attributes)
    options = {"num_warps": wanted.num_warps, "num_stages": wanted.num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(ast, target=GPUTarget("cuda", wanted.sm, 32), options=options)
    registers, spilled = _resources(kernel.asm["cubin"], kernel.metadata.name)
    # The assembler may spill some bytes so that one more block can be resident; told how many to take, it does not.
    for most in _REGISTERS:
        if spilled and registers < most and most * 32 * wanted.num_warps <= REGISTERS:
            kernel = triton.compile(ast, target=GPUTarget("cuda", wanted.sm, 32), options=options | {"maxnreg": most})
            registers, spilled = _resources(kernel.asm["cubin"], kernel.metadata.name)
    metadata = kernel.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise CompileError(
            f"{wanted.function} asks for scratch memory or clusters, which the launcher does not provide"
        )
    cubin = kernel.asm["cubin"]
    return {
        "name": wanted.name,
        "sm": wanted.sm,
        "entry": metadata.name,
        "arguments": wanted.arguments,
        "hidden": _hidden(kernel.asm["ptx"], metadata.name, wanted.arguments),
        "num_warps": metadata.num_warps,
        "shared": metadata.shared,
        "registers": registers,
        "spilled": spilled,
        "triton": triton.__version__,
        "image": base64.b64encode(cubin).decode(),
    }


def _resources(cubin: bytes, entry: str) -> tuple[int, int]:
    """(registers a thread, bytes a thread keeps in local memory) as the assembler recorded them in the cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(rf"Function {re.escape(entry)}:\s*\n\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", words)
    if usage is None:
        raise CompileError(f"cuobjdump does not report the resources of {entry}: {words.strip()}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


_PTX_SIZES = {".u64": 8, ".b64": 8, ".u32": 4, ".b32": 4, ".f32": 4, ".f16": 2, ".b16": 2, ".u16": 2, ".u8": 1}
_SIZES = {"i64": 8, "u64": 8, "i32": 4, "u32": 4, "fp32": 4, "i16": 2, "u16": 2, "i8": 1, "u8": 1, "i1": 1}


def _hidden(ptx: str, entry: str, arguments: Arguments) -> tuple[str, ...]:
    """Types of the entry's parameters behind ``arguments``; refuses an entry whose first ones are not those."""
    head = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.DOTALL)
    kinds = re.findall(r"\.param\s+(\.\w+)", head.group(1)) if head else []
    expected = [8 if kind.startswith("*") else _SIZES[kind] for _, kind in arguments]
    sizes = [_PTX_SIZES.get(kind) for kind in kinds]
    if sizes[: len(expected)] != expected or any(size != 8 for size in sizes[len(expected) :]):
        raise CompileError(f"{entry} has parameters of {sizes} bytes, expected {expected} and then pointers")
    return ("*i8",) * (len(sizes) - len(expected))


if __name__ == "__main__":
    _serve()
