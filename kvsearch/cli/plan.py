"""kvsearch plan: make plans without calibration, change plans, compare them."""

from __future__ import annotations

import typer

from kvsearch.cli.plan_change import convert, merge, scale
from kvsearch.cli.plan_diff import diff
from kvsearch.cli.plan_make import pyramid, uniform
from kvsearch.cli.plan_yaml import build, yaml

plan_app = typer.Typer(help="Make plans without calibration, change plans, compare them.", no_args_is_help=True)
for verb in (uniform, pyramid, scale, convert, merge, diff, yaml, build):
    plan_app.command(no_args_is_help=True)(verb)
