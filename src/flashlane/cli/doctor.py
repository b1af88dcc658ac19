"""``flashlane doctor``: what this machine has, and what each missing thing costs."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor_command(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine has, and what each missing thing costs: GPU, driver, NVRTC, torch, Triton, cache, peers.

    Exit status: 0 always; the findings say what is missing.

    Examples:

      flashlane doctor --json
    """
    from flashlane.bench.present.table import make_console
    from flashlane.inspect import doctor

    report = doctor.examine()
    if json_:
        typer.echo(report.to_json())
        return
    console = make_console()
    console.print(doctor.render(report))
    console.print(report.verdict)
