"""Arguments of ``unickpt otlp``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_deadline, add_folders, add_json

EXAMPLE = "unickpt otlp rings/host0 rings/host1 --to http://collector:4318"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    add_deadline(parser)
    parser.add_argument(
        "--to", default="", metavar="URL", help="OTLP receiver for HTTP; default: as OTEL_EXPORTER_OTLP_ENDPOINT says"
    )
    parser.add_argument("--calls", action="store_true", help="also a span for each call, inside of its step")
    parser.add_argument(
        "--every",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="send again and again, until all ranks have ended",
    )
    add_json(parser)
