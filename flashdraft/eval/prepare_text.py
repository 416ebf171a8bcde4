"""What SPEED-Bench rows need beside their sources: the wording of prompts, and lengths in tokens of o200k_base."""

from __future__ import annotations

import ast
from typing import Protocol

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval.sources import Sources

# The file of NVIDIA's script (Apache-2.0) that holds the prompts, at a fixed commit: they are read from it, not copied.
WORDINGS = (
    "https://raw.githubusercontent.com/NVIDIA/Model-Optimizer/12d434e0775ee7bb244e705943324f06f7cbf007/"
    "examples/specdec_bench/specdec_bench/datasets/speed.py"
)
PADDING = "Answer now please.\n"


class Encoding(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Wording:
    """The text of a prompt, by how it begins. The file is parsed, never run."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._strings: set[str] | None = None

    def __call__(self, start: str) -> str:
        """Raises CheckpointError where the file cannot be read, or holds not just one such text."""
        if self._strings is None:
            try:
                self._strings = _strings(ast.parse(self._sources.text(WORDINGS)))
            except SyntaxError as error:
                raise CheckpointError(f"{WORDINGS} is not the file that holds the prompts: check the network") from error
        found = [text for text in self._strings if text.startswith(start)]
        if len(found) != 1:
            raise CheckpointError(f"{WORDINGS} holds {len(found)} prompts that begin with {start.strip()!r}: check the network")
        return found[0]


def _strings(tree: ast.AST) -> set[str]:
    """All strings of a program; of f-strings the text, with names of variables in braces."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = {id(part) for node in joined for part in node.values}
    whole = {"".join(map(_piece, node.values)) for node in joined}
    plain = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in pieces)
    return whole | {node.value for node in plain if isinstance(node.value, str)}


def _piece(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return "{" + ast.unparse(part.value) + "}"
    return str(part.value) if isinstance(part, ast.Constant) else ""


def fitted(text: str, length: int, encoding: Encoding) -> str:
    """The text cut, or filled up, to so many tokens."""
    tokens = encoding.encode(text)
    if len(tokens) == length:
        return text
    if len(tokens) < length:
        repeats = -(-(length - len(tokens)) // len(encoding.encode(PADDING)))
        tokens = encoding.encode(text + PADDING * repeats)
    return encoding.decode(tokens[:length])


class _Tiktoken:
    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError(
                "lengths of SPEED-Bench's throughput prompts are counted with tiktoken: run `pip install 'flashdraft[eval]'`"
            ) from error
        try:
            self._encoding = tiktoken.get_encoding("o200k_base")
        except Exception as error:  # it is downloaded
            raise CheckpointError(f"the tokenizer o200k_base cannot be loaded ({error}): check the network") from error

    def encode(self, text: str) -> list[int]:
        return list(self._encoding.encode(text, disallowed_special=()))  # "<|endoftext|>" in a text is text

    def decode(self, tokens: list[int]) -> str:
        return str(self._encoding.decode(tokens))


def o200k_base() -> Encoding:
    """Raises ConfigError without tiktoken, CheckpointError where its file cannot be downloaded."""
    return _Tiktoken()
