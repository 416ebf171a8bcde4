"""`flashdraft serve --engine vllm` and `sglang`: the same pair and options, handed over to an engine for many GPUs."""
