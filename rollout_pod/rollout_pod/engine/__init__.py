"""The inference engine behind its protocol; the only package that knows vLLM."""
