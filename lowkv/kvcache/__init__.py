"""What a token costs and where it lives: KV formats, the per-layer plan, the arena, block tables, capacity."""

from lowkv.kvcache.arena import Arena, SlabGeometry
from lowkv.kvcache.cache import KVCache, SequenceCache, Step
from lowkv.kvcache.capacity import Capacity, max_resident, reservation
from lowkv.kvcache.formats import FORMATS, KVFormat, kv_format
from lowkv.kvcache.plan import CacheGroup, CachePlan, Counts, LayerPlan, added

__all__ = [
    "FORMATS",
    "Arena",
    "CacheGroup",
    "CachePlan",
    "Capacity",
    "Counts",
    "KVCache",
    "KVFormat",
    "LayerPlan",
    "SequenceCache",
    "SlabGeometry",
    "Step",
    "added",
    "kv_format",
    "max_resident",
    "reservation",
]
