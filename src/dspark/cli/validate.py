"""`dspark validate`: check the engine against what others measured."""

import typer

validate_app = typer.Typer(help="Check the engine against reference numbers.", no_args_is_help=True)
