"""The typer app: one subcommand for each module of this package."""

from __future__ import annotations

from typing import Annotated

import typer

import hvd_deepreduce
from hvd_deepreduce.tools import bench, capture, configs, doctor, inspect, output, timeline
from hvd_deepreduce.tools.advise import command

app = typer.Typer(
    name="hvd-deepreduce",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(given: bool) -> None:
    if given:
        output.say(hvd_deepreduce.__version__)
        raise typer.Exit()


@app.callback(epilog=output.EXIT_CODES)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Gradient compression for Horovod, PyTorch DDP and FSDP2: what it would do to your job, and what it has done."""


for module in (command, bench, capture, configs, doctor, inspect, timeline):
    lines = (one if one.startswith("mpirun") else f"hvd-deepreduce {one}" for one in module.EXAMPLES)
    epilog = "\n\n  ".join(["Examples:", *lines]) + ("\n\n" + output.EXIT_CODES) * (module is command)
    app.command(epilog=epilog)(getattr(module, module.__name__.split(".")[2]))


def main() -> None:
    """The console script."""
    app(prog_name="hvd-deepreduce")
