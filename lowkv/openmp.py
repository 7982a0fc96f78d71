"""How long OpenMP's threads wait awake, set before Torch loads it.

A decode step is some hundred short parallel regions with microseconds of Python between them, so the team must
stay awake across such gaps. libgomp's own default, though, is to wait awake for milliseconds: on a machine that
also runs the server's front end, a client or a second engine, threads that wait burn the cores that others need,
and steps become several times slower. (docs/performance.md has the figures.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

SPINCOUNT = 3000  # rounds of libgomp's waiting loop, about a tenth of a millisecond


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Sets `GOMP_SPINCOUNT` in a process environment, unless the user has set it or `OMP_WAIT_POLICY`.

    libgomp reads it once, when it is loaded: call this first thing in a program, or on a child's environment.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINCOUNT))
