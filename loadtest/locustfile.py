"""Locust's entry point: `locust -f locustfile.py --headless --run-folder DIR`. Started by `lowkv loadtest`,
which writes DIR.
"""

from lowkv.loadtest.locust_user import FollowControl, StreamingUser

__all__ = ["FollowControl", "StreamingUser"]
