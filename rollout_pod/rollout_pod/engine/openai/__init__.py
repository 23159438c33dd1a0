"""vLLM's own OpenAI server in front of the engine, every request through the pod's gate."""
