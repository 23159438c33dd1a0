"""Several processes that answer HTTP for one engine, behind one gate.

vLLM's part of a request and ours share one Python thread where there is one process. Here each
front end has an engine client, a gate and an HTTP server of its own; the process that steers
(``serve``) closes and opens all of their gates, and counts a request as gone only when its caller
was answered (docs/adr/0006-several-front-ends.md).
"""
