"""The command line: arguments in, exit codes out. What commands do lives below; they import it inside, so that `noria --help` stays light."""

from noria.cli.app import app, main
from noria.cli.frame import elapsed_s

__all__ = ["app", "elapsed_s", "main"]
