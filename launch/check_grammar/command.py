"""``lockstep check-grammar``, the part that needs no grammar engine: becomes the process that has them."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from launch.checks import check_files
from launch.commands import CheckGrammarCommand
from launch.environment import with_import_path
from launch.node.this_process import become
from runtime.checkpoint import open_checkpoint


def become_checker(command: CheckGrammarCommand, argv: list[str]) -> NoReturn:
    """Replaces this process by one that checks grammars; importing torch and the engines takes seconds.

    Raises:
        UsageError: A file cannot be read or written.
        CheckpointError, ModelConfigError: The model cannot be used.
    """
    open_checkpoint(command.model)
    check_files(command.input_file, command.output_file)
    environ = with_import_path(os.environ) | {"OMP_NUM_THREADS": "1"}
    become([sys.executable, "-m", "launch.check_grammar.main", *argv], environ)
