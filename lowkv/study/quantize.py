"""Keys and values as they read back once they are cold: the codecs' own arithmetic, along either axis.

Nothing is packed. What KV formats serve comes out bit for bit as `kvattention.reference` gives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvattention.codec import VALUES_PER_PARAM, decode_group, decode_plain, encode_group, encode_plain

if TYPE_CHECKING:
    from lowkv.study.configurations import Side

Values = NDArray[np.float32]


def round_trip(side: Side, x: Values, group_size: int, scales: Values | None = None) -> Values:
    """x [T, Hkv, D] after encode and decode, T a multiple of `group_size`.

    `scales` of a scaled codec are float32 that broadcast to x.
    """
    codec = side.kind
    if not codec.grouped:
        multipliers = np.ones((), np.float32) if scales is None else scales
        return decode_plain(codec, encode_plain(codec, x, multipliers), multipliers)
    if side.axis == "channel":
        tokens, heads, size = x.shape
        blocks = x.reshape(-1, group_size, heads, size).transpose(0, 2, 3, 1)  # [B, Hkv, D, G]
        codes, params = encode_group(codec, np.ascontiguousarray(blocks))
        return decode_group(codec, codes, params).transpose(0, 3, 1, 2).reshape(tokens, heads, size)
    borders = range(VALUES_PER_PARAM, x.shape[2], VALUES_PER_PARAM)
    pieces = [decode_group(codec, *encode_group(codec, piece)) for piece in np.split(x, borders, axis=2)]
    return np.concatenate(pieces, axis=2)
