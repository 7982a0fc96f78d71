"""Load test: workloads, records, metrics, sweep, report.

Locust runs in processes of its own (`locust_user` is imported there and nowhere else, because gevent patches
the standard library of whatever imports it); everything here reads the raw records that those processes
write. No figure is taken from Locust's own statistics.
"""
