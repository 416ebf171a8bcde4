"""What an inspection looks like in a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashdraft.engine.memory import CHUNK, GIB
from flashdraft.inspection import Inspection


def render(inspection: Inspection) -> RenderableType:
    """Tables for a terminal: the model, its parameters by part, its layers, and the pair check where there was one.

    What comes from files and names goes in as Text: in a string, brackets would be markup and :words: emoji.
    """
    parts: list[RenderableType] = [_render_model(inspection), _render_parameters(inspection)]
    parts += [_render_pair(inspection)] if inspection.pair else []
    parts += [_render_request(inspection)] if inspection.request_memory is not None else []
    return Group(*parts)


def _render_model(report: Inspection) -> Table:
    table = Table(title=Text(report.path, "table.title"), show_header=False)
    rows: list[tuple[str, str]] = [(report.kind, f"{report.layout} layout")]
    rows += [("dtype", report.dtype or "not stated"), ("quantization", _quantization_words(report))]
    rows += [("disagreement", fault) for fault in report.faults]
    rows += [("revisions", ", ".join(report.revisions))] if report.revisions else []
    rows.append(("on disk", "no weights" if report.size_on_disk is None else f"{report.size_on_disk:,} bytes"))
    rows += [("in memory", f"{report.memory:,} bytes of weights")] if report.memory is not None else []
    if report.kind == "draft":
        rows.append(("feature layers", f"{list(report.feature_layers)} of {report.config['num_target_layers']}"))
        rows.append(("block", f"{report.config['block_size']:,} slots, mask token {report.config['mask_token_id']:,}"))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    rows += [(name, f"{report.config[name]:,}") for name in names if name in report.config]
    positions = report.config["max_position_embeddings"]
    rows.append(("max positions", "not stated" if positions is None else f"{positions:,}"))
    rows.append(("layers", "; ".join(_layer_runs(report))))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _quantization_words(report: Inspection) -> str:
    if not report.quantized:
        return report.quantization or "none"
    rest = f"all but {', '.join(report.unquantized)}" if report.unquantized else "all of them"
    return f"{report.quantization}: {len(report.quantized)} products, {rest}"


def _layer_runs(report: Inspection) -> list[str]:
    """Layers described together where neighbours see alike: '0-4: window 1,024, bidirectional'."""
    say: Callable[[int | None, bool], str] = lambda window, causal: (  # noqa: E731
        f"{f'window {window:,}' if window else 'all positions'}, {'causal' if causal else 'bidirectional'}"
    )
    runs: list[tuple[int, int, str]] = []
    for i, seen in enumerate(zip(report.windows, report.causal, strict=True)):
        text = say(*seen)
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], i, text)
        else:
            runs.append((i, i, text))
    return [f"{a if a == b else f'{a}-{b}'}: {text}" for a, b, text in runs]


def _render_parameters(report: Inspection) -> Table:
    table = Table("part", "parameters", title="parameters")
    table.columns[1].justify = "right"
    for part, count in report.parameters.items():
        if count == 0 and part != "all":
            continue
        each = (
            f" ({report.layers} of {report.parameters_per_layer:,})" if part == "layers" and report.parameters_per_layer else ""
        )
        table.add_row(part + each, f"{count:,}", style="bold" if part == "all" else "")
    return table


def _render_pair(report: Inspection) -> Table:
    notes = [re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", report.misfit)] if report.misfit else []
    if any(row.verdict == "differs" for row in report.pair):
        notes.append("differs: the pair can be served all the same")
    notes += [
        f"contexts are limited to the draft's positions: give --max-model-len {row.draft} or less"
        for row in report.pair
        if row.what == "positions" and row.verdict == "differs"
    ]
    caption = Text("; ".join(notes), "table.caption") if notes else None
    table = Table("", "draft", "target", "", title=Text(f"with {report.target}", "table.title"), caption=caption)
    for row in report.pair:
        table.add_row(row.what, f"{row.draft:,}", f"{row.target:,}", row.verdict)
    return table


def _render_request(report: Inspection) -> Text:
    assert report.request_memory is not None
    size = report.request_memory
    told = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
    return Text(
        f"one request of {report.request_tokens:,} tokens takes {told} of KV cache "
        f"({report.request_memory:,} bytes, prompts in chunks of {CHUNK:,} tokens)"
    )
