"""The options of `flashdraft quantize` and `flashdraft publish`. Heavy imports live inside the commands, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flashdraft import cli_options as shared


def quantize(
    draft: Annotated[str, Argument(help="The draft, in bfloat16: directory or hub id, or `builtin`.")],
    calibration: Annotated[
        list[Path],
        Option("--calibration", help="JSONL files of prompts, which the target answers; or a directory of its answers."),
    ],
    output: Annotated[Path, shared.output("Directory for the NVFP4 draft; its W4A4 revision is in its `w4a4`.")],
    target: shared.TargetOption = None,
    own_head: Annotated[bool, Option("--own-head", help="Take along the target's output head, quantized too.")] = False,
    w4a4: Annotated[bool, Option("--w4a4", help="Write the revision that rounds its inputs too.")] = False,
    method: Annotated[str, Option(help="gptq, max (round to nearest) or search (scales of least error first).")] = "gptq",
    damping: Annotated[float, Option(help="For gptq, of the Hessian's mean diagonal.")] = 0.01,
    ignore: Annotated[
        list[str] | None, Option("--ignore", help="Linears to leave as they are, such as fc or layers.0.self_attn.qkv_proj.")
    ] = None,
    limit: shared.Limit = None,
    heldout: Annotated[int, Option(min=0, help="Prompts to measure on, at most half; none of those the draft knows.")] = 512,
    max_tokens: Annotated[int, Option("--max-tokens", min=2, help="Longest answer, in tokens.")] = 128,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    draft_revision: shared.DraftRevision = None,
    lora: shared.Lora = None,
) -> None:
    """A draft in four bits (NVFP4), calibrated on the target's own answers, with what its guesses lose."""
    from typing import cast

    from flashdraft.quant.quantize import Method, Settings
    from flashdraft.quantize.run import QuantizeOptions, run_quantize
    from flashdraft.train.commands_synthesize import Prompts, Where

    where = Where(target=target, draft_revision=draft_revision, dtype=dtype, device=device, revision=revision, lora=lora)
    run_quantize(
        QuantizeOptions(
            draft=draft,
            where=where,
            prompts=Prompts(calibration, limit=limit),
            output=output,
            own_head=own_head,
            w4a4=w4a4,
            settings=Settings(cast(Method, method), damping),
            ignore=tuple(ignore or ()),
            heldout=heldout,
            max_tokens=max_tokens,
        )
    )


def publish(
    directory: Annotated[Path, Argument(help="Directory of a draft.")],
    repo: Annotated[str, Argument(help="OWNER/NAME on the hub, made if there is none.")],
    private: Annotated[bool, Option("--private", help="Make the repository private, where it is new.")] = False,
) -> None:
    """Upload a draft to a hub with its card; a W4A4 revision becomes the branch `w4a4`."""
    from flashdraft.publish import publish as upload

    went = upload(directory, repo, private=private)
    print(f"published {repo}: {', '.join(f'{branch} ({len(names)} files)' for branch, names in went.items())}")
