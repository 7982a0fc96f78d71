"""The recipe that a search ends in: the given one with a format for every layer, and how that was found.

What the given recipe says is kept as it says it, its comments excepted: only `kv_cache.format` and
`kv_cache.overrides` change, and its name, which becomes the new file's, so that the two engines do not collide.
Relative paths are rewritten where the new file lies elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.configfile import read_document
from lowkv.errors import LowkvError
from lowkv.recipe import load_recipe

if TYPE_CHECKING:
    from lowkv.recipe import KVCacheConfig, Recipe

MARK = "# Written by `lowkv tune`"


def check_free(out: Path, recipe: Path) -> None:
    """Raises LowkvError when `out` cannot be written over: it is the recipe itself, or no recipe of ours."""
    if out.suffix not in (".yaml", ".yml"):
        raise LowkvError("a recipe is a YAML file", got=str(out), expected="--out NAME.yaml")
    if not out.exists():
        return
    if out.samefile(recipe):
        raise LowkvError(f"{out} is the recipe to be tuned", fix="give another path with --out")
    if not out.is_file() or not out.read_bytes().startswith(MARK.encode()):
        raise LowkvError(
            f"{out} is in the way: it was not written by lowkv tune",
            fix="give another path with --out, or move it away yourself",
        )


def write_recipe(out: Path, given: Path, settings: KVCacheConfig, comments: Sequence[str]) -> Recipe:
    """Writes `given` with the formats of `settings` at `out`, whole or not at all; returns it as it reads back."""
    import yaml

    plain = _moved(read_document(given, "recipe").value, given.parent, out.parent)
    plain.pop("name", None)
    plain["kv_cache"] = {"format": settings.format} | (plain.get("kv_cache") or {})
    plain["kv_cache"] |= {"format": settings.format, "overrides": dict(settings.overrides)}
    if not settings.overrides:
        del plain["kv_cache"]["overrides"]
    header = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    body = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    part.write_text(f"{MARK}.\n{header}\n{body}", encoding="utf-8")
    part.replace(out)
    return load_recipe(out)


def _moved(plain: dict[Any, Any], source: Path, target: Path) -> dict[Any, Any]:
    """The recipe in another folder: what its relative paths mean stays the same."""
    found = dict(plain)
    kind, _, spec = str(found["model"]).partition(":")
    if kind in ("folder", "gguf"):
        found["model"] = f"{kind}:{_path(spec, source, target)}"
    cache = found.get("kv_cache")
    if isinstance(cache, dict) and isinstance(cache.get("scales"), dict) and cache["scales"].get("text"):
        scales = cache["scales"] | {"text": _path(cache["scales"]["text"], source, target)}
        found["kv_cache"] = cache | {"scales": scales}
    return found


def _path(text: str, source: Path, target: Path) -> str:
    path = Path(text).expanduser()
    if path.is_absolute() or source.resolve() == target.resolve():
        return text
    return os.path.relpath((source / path).resolve(), target.resolve())
