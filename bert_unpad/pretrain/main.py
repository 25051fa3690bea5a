"""The command: settings, ranks, the log, and the exit code.

Exit codes: 0 finished; 2 wrong settings, or another run uses the folder; 143 (SIGTERM) or 130
(SIGINT): saved and stopped, the same command continues; anything else is an error. torchrun reports
its own code, 1, for all but 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from bert_unpad._malloc import keep_freed_memory
from bert_unpad.pretrain.config import ConfigError, read_settings
from bert_unpad.pretrain.ranks import join_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `pretrain.py`; returns its exit code.

    Args:
        arguments: the command line without the program's name; by default the process's own.
    """
    keep_freed_memory()
    try:
        settings = read_settings(arguments)
        # After the settings are read, so that --help and mistakes need not wait for all of it.
        from bert_unpad.pretrain.pretrain import pretrain
        from bert_unpad.pretrain.update.replaced import drop_refused

        with join_ranks(settings.config) as ranks:
            logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
            if ranks.is_first:
                logging.getLogger("bert_unpad").setLevel(logging.INFO)
            settings = drop_refused(settings)
            return pretrain(settings.config, settings.text, ranks)
    except ConfigError as error:
        print(f"pretrain: error: {error}", file=sys.stderr)
        return 2
