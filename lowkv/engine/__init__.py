"""Engine directories: what `lowkv build` writes and the server loads. Verified before use, built whole or not at
all.
"""

from lowkv.engine.build import build_engine
from lowkv.engine.directory import EngineDir

__all__ = ["EngineDir", "build_engine"]
