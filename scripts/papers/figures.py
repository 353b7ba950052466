"""`make figures`: computes the figures of the documents, and writes their pictures, JSON and sections.

    python scripts/papers/figures.py --list
    python scripts/papers/figures.py deepreduce_10 densestream_1     # these
    python scripts/papers/figures.py --draw                          # pictures and pages again, from the JSON files
    python scripts/papers/figures.py                                 # all of them: some hours

A figure of this list is computed here and goes to docs/results/figures.md, with its JSON in docs/results/figures/; or
it is made by a script of its own, which writes its section to its own page. docs/papers.md says which figure repeats
what.
"""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev",))

import doc_sections
import figure_kit
import typer
from doc_sections import tables
from figure_kit import ROOT, Figure, Files, dump, machine
from rich.console import Console
from rich.table import Table

DOCS = ROOT / "docs"
PAGE = DOCS / "results" / "figures.md"


@dataclass(frozen=True)
class Script(Files):
    """A figure that a script of its own makes.

    Attributes:
        command: script and arguments.
        page, section: of docs/, where its section is.
        drawn: it has a picture, and not only tables.
    """

    name: str
    command: tuple[str, ...]
    page: str
    section: str
    papers: tuple[str, ...] = ()
    drawn: bool = True

    def run(self) -> int:
        """Runs the script, and returns its seconds."""
        print(f"{self.name}: scripts/{' '.join(self.command)}", flush=True)
        began = time.time()
        subprocess.run([sys.executable, ROOT / "scripts" / self.command[0], *self.command[1:]], cwd=ROOT, check=True)
        return round(time.time() - began)

    def export(self, seconds: int | None) -> None:
        """Writes the tables of its section as JSON, so that other programs can read them; ``seconds`` that the script
        took just now, on this machine, or None."""
        ran, before = seconds is not None, json.loads(self.json.read_text()) if self.json.exists() else {}
        section = doc_sections.read(DOCS / self.page, self.section)
        dates = re.findall(r"\d{4}-\d\d-\d\d", section)
        dump(self.json, {
            "figure": self.name, "papers": list(self.papers), "date": dates[-1] if dates else None,
            "machine": machine() if ran else before.get("machine"),
            "seconds": seconds if ran else before.get("seconds"),
            "source": f"docs/{self.page}, section {self.section}", "data": tables(section),
        })  # fmt: skip


SCHEMES, LINEAR, BENCHMARKS = (f"results/{name}.md" for name in ("schemes", "linear", "benchmarks"))
SCRIPTS = [
    Script("qsparse_softmax", ("papers/qsparse_bits.py", "softmax", "--write"), SCHEMES, "qsparse-softmax",
           ("Qsparse Figure 2",)),
    Script("qsparse_digits", ("papers/qsparse_bits.py", "digits", "--write"), SCHEMES, "qsparse-digits",
           ("Qsparse Figure 1",)),
    Script("qsparse_ends", ("papers/qsparse_ends.py", "--write"), SCHEMES, "qsparse-ends",
           ("Qsparse Figure 1", "Qsparse Figure 2"), False),
    Script("fedavg_silo", ("papers/train_fedavg.py", "compare", "silo", "--write"), SCHEMES, "fedavg-silo",
           ("appendix Table 5", "appendix Figure 18")),
    Script("fedavg_cloud", ("papers/train_fedavg.py", "compare", "cloud", "--write"), SCHEMES, "fedavg-cloud",
           ("appendix Table 4",)),
    Script("fedavg_device", ("papers/train_fedavg.py", "compare", "device", "--write"), SCHEMES, "fedavg-device"),
    Script("linear", ("papers/linear_figures.py", "methods", "--write"), LINEAR, "methods",
           ("SKCompress Figures 11 and 12", "SKCompress Table 4")),
    Script("linear_ablation", ("papers/linear_figures.py", "ablation", "--write"), LINEAR, "ablation",
           ("SKCompress Figure 10", "SKCompress Table 3"), False),
    Script("linear_ends", ("papers/linear_figures.py", "ends", "--write"), LINEAR, "ends", ("SKCompress Table 4",),
           False),
    Script("linear_codecs", ("papers/linear_figures.py", "codecs", "--write"), LINEAR, "codecs", (), False),
    Script("densestream_scale", ("bench/simulate_scale.py", "--write"), "densestream.md", "scale"),
    Script("codecs", ("bench/bench.py", "--only", "codecs"), BENCHMARKS, "codecs"),
    Script("accuracy", ("bench/bench.py", "--only", "training"), BENCHMARKS, "training"),
]  # fmt: skip


def own() -> list[Figure]:
    """The figures of docs/results/figures.md, in its order."""
    import figures_codecs
    import figures_federated
    import figures_linear
    import figures_ncf
    import figures_streams
    import figures_training

    modules = figures_codecs, figures_training, figures_ncf, figures_federated, figures_streams, figures_linear
    return [figure for module in modules for figure in module.FIGURES]


def every() -> list[Figure | Script]:
    """All figures of the documents."""
    return [*own(), *SCRIPTS]


def shown() -> None:
    """Prints the list."""
    listed = Table("name", "repeats", "page", "minutes", box=None)
    for one in every():
        listed.add_row(one.name, ", ".join(one.papers), "figures.md" if isinstance(one, Figure) else one.page,
                       f"{one.minutes:g}" if isinstance(one, Figure) else "")  # fmt: skip
    Console(width=110).print(listed)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="figures to make; default: all")] = None,
    listed: Annotated[bool, typer.Option("--list", help="list the figures, and make none")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="only draw, from the JSON files that are there")] = False,
    processes: Annotated[int, typer.Option(min=1, help="trainings at a time, each on one thread")] = 2,
) -> None:
    """Makes figures, one after another. An error in one stops all."""
    if listed:
        return shown()
    known = {one.name: one for one in every()}
    if unknown := set(names or ()) - set(known):
        raise typer.BadParameter(f"no figure is named {', '.join(unknown)}; the names are: {', '.join(known)}")
    figure_kit.processes = processes
    for name in names or known:
        one = known[name]
        if isinstance(one, Script):
            one.export(None if draw else one.run())
            continue
        if not draw:
            print(f"{name}: about {one.minutes:g} minutes on two cores", flush=True)
            dump(one.json, one.make())
        if not one.json.exists():
            print(f"{name}: there is no {one.json.name} yet", flush=True)
            continue
        made = {**json.loads(one.json.read_text()), "papers": list(one.papers)}
        dump(one.json, made)
        one.save(made)
        doc_sections.write(PAGE, name, one.title, one.section(made))
        print(f"{name}: {one.png.relative_to(ROOT)}, {made['seconds']} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
