"""The command: settings, ranks, the log, and the exit code.

Exit codes: 0 finished; 2 wrong settings, or another run uses the folder; 143 (SIGTERM) or 130
(SIGINT): saved and stopped, the same command continues; 1 a full disk, damaged data, or other ranks
that have ended or hang; anything else is an error with a traceback. torchrun reports its own code,
1, for all but 0.
"""

import logging
import sys
from collections.abc import Sequence

from bert_unpad._full_disk import FullDiskError, named_if_full
from bert_unpad._malloc import keep_freed_memory
from bert_unpad.data import DamagedDataError, ExchangeError
from bert_unpad.data.store.cache import chosen_cache_dir, note_damage
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_settings
from bert_unpad.pretrain.output.checkpoint_files import how_to_continue
from bert_unpad.pretrain.rank_watch import RankError
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
        from bert_unpad.pretrain.update.arguments import drop_refused

        with join_ranks(settings.config) as ranks, named_if_full(settings.config.run_dir):
            logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
            if ranks.is_first:
                logging.getLogger("bert_unpad").setLevel(logging.INFO)
            settings = drop_refused(settings)
            return pretrain(settings.config, settings.text, ranks)
    except ConfigError as error:
        return _fail(str(error), 2)
    except RankError as error:
        return _fail(str(error), 1)
    except FullDiskError as error:
        return _fail(f"{error}. Make room. {_next(settings.config)}", 1)
    except (DamagedDataError, ExchangeError) as error:
        if DamagedDataError not in (type(error), type(error.__cause__)):
            raise
        again = note_damage(chosen_cache_dir(settings.config.data.cache_dir), error)
        what = "Restore the file, or prepare it again"
        if again:
            what = "The cache is made again at the next start"
        return _fail(f"{error}. {what}. {_next(settings.config)}", 1)


def _next(config: PretrainConfig) -> str:
    return how_to_continue(config.checkpoint_dir, config.resume)


def _fail(message: str, code: int) -> int:
    print(f"pretrain: error: {message}", file=sys.stderr)
    return code
