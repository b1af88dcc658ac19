"""``flashlane doctor``: what this machine has, and what you lose without each part."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor_command(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine has and what you lose without each part, and run one attention to see that it is right.

    Looked at are GPU, driver, NVRTC, torch, Triton, cache, peers and tools; on a GPU also its clocks, its power limit
    and other processes that compute on it (through nvidia-ml-py or nvidia-smi).

    Exit status: 0 whatever is missing, 1 the attention that was run gave a wrong result.

    Examples:

      flashlane doctor --json
    """
    from flashlane.inspect import doctor
    from flashlane.inspect.fitted_table import make_console, say

    report = doctor.examine()
    if json_:
        typer.echo(report.to_json())
    else:
        console = make_console()
        console.print(doctor.render(report))
        say(console, report.verdict, "bold red" if report.wrong else "bold")
    if report.wrong:
        raise typer.Exit(1)
