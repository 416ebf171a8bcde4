"""Acceptance and speed, measured over HTTP: one harness for this server, vLLM and SGLang."""
