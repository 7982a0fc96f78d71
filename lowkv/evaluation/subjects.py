"""What is measured: models with a cache plan under a name, and FP16 KV over the same weights to compare them with.

Weights are loaded when something is really to be measured, and once per content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.calibration.scales import KVScales
    from lowkv.engine import EngineDir
    from lowkv.engine.progress import Progress
    from lowkv.kvcache import CachePlan
    from lowkv.models.decoder import Decoder

BASELINE = "fp16"


@dataclass(frozen=True)
class Subject:
    """A model with a cache plan, under a name; `scales` are those of its 8-bit formats (None: all ones)."""

    name: str
    decoder: Decoder
    plan: CachePlan
    scales: KVScales | None = None


@dataclass(frozen=True)
class Candidate:
    """A subject whose weights need not be loaded yet.

    Attributes:
        name: what it is reported under.
        engine: where its weights are.
        plan: the engine's, or another one over its weights.
        digest: what identifies the two, in hexadecimal.
        own: the plan is the engine's own, and so are its scales.
    """

    name: str
    engine: EngineDir
    plan: CachePlan
    digest: str
    own: bool = True


class Loader:
    """Makes candidates into subjects, their engines verified first."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._decoders: dict[frozenset[Any], Decoder] = {}

    def load(self, candidate: Candidate) -> Subject:
        """Raises LowkvError when the engine's files were altered, or are not what Torch runs."""
        from lowkv.engine import EngineDir

        engine = candidate.engine
        key = frozenset((file, record.sha256) for file, record in engine.manifest.files.items())
        if key not in self._decoders:
            self._decoders[key] = EngineDir.open(engine.path, progress=self._progress).load_decoder()
        scales = engine.scales if candidate.own else None
        return Subject(candidate.name, self._decoders[key], candidate.plan, scales)


def candidates_of(engines: Mapping[str, EngineDir], baseline: str | None) -> tuple[list[Candidate], Candidate]:
    """Every engine, in order, and the one that the others are compared with.

    That is the engine called `baseline`; else the first with FP16 KV; else FP16 KV over the first engine's weights,
    put in front of the others.

    Raises:
        LowkvError: no engines, an unknown baseline, or engines whose vocabularies differ.
    """
    if not engines:
        raise LowkvError("there is no engine to evaluate", expected="at least one")
    if baseline is not None and baseline not in engines:
        raise LowkvError("no engine has the baseline's name", got=baseline, expected=", ".join(engines))
    vocabularies = {name: engine.model_config.vocab for name, engine in engines.items()}
    if len(set(vocabularies.values())) > 1:
        raise LowkvError("the engines are not of one model: their vocabularies differ", got=vocabularies)
    found = [Candidate(name, engine, engine.cache_plan, engine.manifest.digest) for name, engine in engines.items()]
    if baseline is not None:
        return found, next(candidate for candidate in found if candidate.name == baseline)
    exact = next((candidate for candidate in found if not candidate.plan.seals), None)
    if exact is None:
        exact = _half_precision(found[0].engine, BASELINE if BASELINE not in engines else f"{BASELINE} KV")
        found.insert(0, exact)
    return found, exact


def _half_precision(engine: EngineDir, name: str) -> Candidate:
    """FP16 KV over an engine's weights; the same for every engine of the same payload."""
    from lowkv.kvcache import CachePlan
    from lowkv.recipe import KVCacheConfig

    plan = CachePlan.from_config(engine.model_config, KVCacheConfig(format=BASELINE))
    parts = [plan.to_mapping(), {file: record.sha256 for file, record in engine.manifest.files.items()}]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Candidate(name, engine, plan, digest, own=False)
