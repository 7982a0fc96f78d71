"""Serving an engine on NVIDIA Triton Inference Server.

`repository` writes the model repository, `distribution` finds a server, `server` runs it, `model` is what runs
inside it, `client` talks to it. What a request may carry stands once, in `fields`.
"""
