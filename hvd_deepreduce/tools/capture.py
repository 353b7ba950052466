"""``hvd-deepreduce capture``: how to record the gradients of a job, and a check of a recorded file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_deepreduce.tools import gradient_file, gradients, output, statistics
from hvd_deepreduce.tools.recorder import FILE_VARIABLE, STEPS_VARIABLE

EXAMPLES = ("capture", "capture gradients.npz")
HOW = f"""One line records gradients of your own job, as they come out of the backward pass of rank 0.

PyTorch, alone, under Horovod or under DistributedDataParallel, before the training loop:

    from hvd_deepreduce.torch import Capture
    Capture(model, "gradients.npz", steps=[10, 100])

With compression, the accumulators too, which are what a compressor selects from (gradient + residual):

    Capture(model, "gradients.npz", steps=[10, 100], compression=compression)

TensorFlow and Keras under Horovod, in place of the job's own compression=, which it can wrap:

    from hvd_deepreduce.tensorflow import Capture
    compression = Capture(model.trainable_variables, "gradients.npz", steps=[10, 100], compression=compression)

The line can stay in the job: without a file's name it does nothing, unless the environment names one:

    Capture(model)
    {FILE_VARIABLE}=gradients.npz {STEPS_VARIABLE}=10,100 python train.py

With several steps, each has a file of its own: gradients_step10.npz, gradients_step100.npz. Then:

    hvd-deepreduce capture gradients_step100.npz
    hvd-deepreduce inspect gradients_step100.npz
    hvd-deepreduce bench gradients_step100.npz"""


def capture(
    file: Annotated[
        Path | None, typer.Argument(help="A file of captured gradients, to be checked. Without one: how to make one.")
    ] = None,
    most_elements: output.MostElements = gradient_file.MOST,
    as_json: output.Json = False,
) -> None:
    """Says how to record your job's gradients.

    Or checks a file of recorded ones.

    A file with NaN, infinity or nothing but zeros is found wrong: the exit code is 1.
    """
    if file is None:
        if as_json:
            output.misused("--json is given and no file: there is nothing to print as JSON")
        output.say(HOW)
        return
    with output.errors_as_sentences():
        vectors = gradient_file.vectors_of(file)
        loaded = [gradients.load(file, kind, rank, most_elements) for kind, rank in vectors]
    if not loaded:
        output.fail(f"{file} has parameters, and no gradients of them")
    rows = [
        {"kind": kind, "rank": rank, **statistics.of_values(one.vector)}
        for (kind, rank), one in zip(vectors, loaded, strict=True)
    ]
    found = {"file": file, "parameters": len(loaded[0].names), "numel": loaded[0].vector.size, "vectors": rows}
    output.show({**found, "about": loaded[0].about}, as_json, _show)
    wrong = [f"the {one['kind']} of rank {one['rank']}" for one in rows if "norm" not in one]
    if wrong:
        output.fail(
            f"{', '.join(wrong)} in {file}: not finite, or nothing but zeros, and so of no use for a measurement"
        )


def _show(found: dict[str, Any]) -> None:
    output.say(f"{found['file']}: {found['numel']:,} elements of {found['parameters']} parameters")
    output.say()
    output.columns(
        ({**one, "norm": f"{one['norm']:.6g}" if "norm" in one else ""} for one in found["vectors"]),
        [("what", "{kind}"), ("rank", "{rank}"), ("norm", "{norm}"), ("zeros", "{zeros:,}"), ("NaN", "{nan}"),
         ("infinite", "{infinite}")],
    )  # fmt: skip
    told = {key: one for key, one in found["about"].items() if isinstance(one, str | int | float)}
    if told:
        output.say()
        output.table(("how it was made", ""), told.items(), left=2)
