"""Errors a user can mend: one sentence that says what is wrong and what to do. The CLI prints them and exits with code 2."""


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


def as_options(error: Exception) -> str:
    """The message of an error, with the engine's limits under the names that they have on the command line."""
    message = str(error)
    for name in ("max_model_len", "num_speculative_tokens"):
        message = message.replace(name, "--" + name.replace("_", "-"))
    return message
