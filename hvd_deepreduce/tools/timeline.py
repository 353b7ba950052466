"""``hvd-deepreduce timeline``: the timelines of several ranks and of Horovod in one file, on one clock."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from hvd_deepreduce.engine.timeline import merge, read
from hvd_deepreduce.tools import output

EXAMPLES = ("timeline t.json t.json.deepreduce.*.json --out all.json",)


def timeline(
    files: Annotated[list[Path], typer.Argument(help="Timelines of Horovod and of hvd_deepreduce.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
) -> None:
    """Puts the timelines of a job into one file, on one clock.

    Open it in Perfetto (ui.perfetto.dev) or chrome://tracing. Times count from the beginning of the first file. A
    timeline whose end is missing, because its job was killed, is taken as far as it goes.
    """
    with output.errors_as_sentences():
        try:
            merged = merge([read(file) for file in files])
        except ValueError as error:
            output.fail(error)
        if any(out.exists() and out.samefile(file) for file in files):
            output.misused(f"--out is {out}, which is one of the timelines: give another name")
        part = out.with_name(f"{out.name}.part")
        part.write_text("[\n" + ",\n".join(map(json.dumps, merged)) + "\n]\n")
        os.replace(part, out)
    spans = [event for event in merged if "ts" in event]
    output.say(f"{out}: {len(spans):,} events of {len(files)} timelines")
