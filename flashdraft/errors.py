"""Errors a user can mend: one sentence that says what is wrong and what to do. The CLI prints them and exits with code 2."""

import re

_OPTIONS = (
    "max_model_len",
    "num_speculative_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "deterministic",
    "enforce_eager",
    "async_scheduling",
)


class FlashdraftError(Exception):
    """Base of every error that the user, not the program, has to mend."""


class ConfigError(FlashdraftError):
    """A configuration that cannot work: sizes that do not fit, unknown names, values out of range."""


class CheckpointError(FlashdraftError):
    """Files that are missing, corrupt, or hold other tensors than their configuration says."""


class UnsupportedModelError(FlashdraftError):
    """A target (or one of its layers) that this engine cannot run losslessly, with the reason."""


class RequestError(FlashdraftError):
    """A request that cannot be served: too long for the context, or a sampling value out of range."""


def counted(count: int, noun: str) -> str:
    """A number with its noun, for messages: "1 prompt", "2,000 prompts"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def as_options(error: Exception) -> str:
    """The message of an error, with the engine's options as they are written on the command line."""
    message = str(error)
    for setting, option in {"device='cpu'": "--device cpu", "async_scheduling=False": "--no-async-scheduling"}.items():
        message = message.replace(setting, option)
    for name in _OPTIONS:  # not inside a path, or an option already
        message = re.sub(rf"(?<![\w/.-]){name}(=True)?(?!\w|[/.-]\w)", "--" + name.replace("_", "-"), message)
    return message
