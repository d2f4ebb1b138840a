"""`tensorc explain`: the reasons for the code of a def's kernel, as text, as JSON or as a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError
from ..explain.kernel_report import Report

Explain = Callable[[argparse.Namespace], Report]


def add_explain_parser(commands: Any, add_def: Callable[[argparse.ArgumentParser], None], explain: Explain) -> None:
    """Add `explain` and its arguments. add_def: adds those that name a def; explain: makes the report."""
    parser = commands.add_parser(
        "explain", help="explain the kernel of a def: its code, its cost and the decisions behind it"
    )
    add_def(parser)
    parser.add_argument("--target", metavar="TARGET", help="a GPU to explain the kernel for, such as cuda:sm_90")
    parser.add_argument("--measure", action="store_true", help="time a call, and measure the limits of the machine")
    parser.add_argument("--journal", metavar="FILE", help="the journal of a search, which the report then shows")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.set_defaults(command=lambda arguments: output_report(arguments, explain(arguments)))


def output_report(arguments: argparse.Namespace, report: Report) -> int:
    """Print, write or show a report. Returns 0. Raises ArgumentError if the output is not a file name."""
    if arguments.output is not None:
        if not arguments.output or Path(arguments.output).is_dir():
            raise ArgumentError("the page has no file", expected="-o FILE.html")
        print(f"written to {report.save(arguments.output)}")
    if arguments.open:
        print(f"shown from {report.open()}")
    if arguments.json:
        print(json.dumps(report.json(), indent=1))
    elif not (arguments.output or arguments.open):
        print(report)
    return 0
