"""The command line: `fr-lightning fit|validate|test|predict` (LightningCLI) and a few commands of our own.

Invariant: the composition root. Only here do the parts meet that must not know each other; a user's YAML decides which.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence

CONFIGS_HELP = """commands:
  fit         train:            fr-lightning fit --config configs/quickstart.yaml
  validate    held-out score:   fr-lightning validate --config … --ckpt_path …
  test        the same on the test split
  predict     play held-out tasks and show the conversations
  doctor      what this machine has, and what is missing
  play        play an environment yourself in the terminal
  warm-start  supervised training on an environment's own expert
  export      the policy of a checkpoint as a plain Hugging Face folder

`fr-lightning COMMAND --help` explains every setting. A bare file name is also looked for among the configurations that
come with the package: `--config quickstart.yaml`. Several --config are merged, later ones win; so do options after
them: --data.batch_size 32 --trainer.max_steps 100."""

QUIET = (  # Lightning's advice for other kinds of training
    ".*does not have many workers.*",
    ".*`isinstance.treespec, LeafSpec.*",
    ".*Checkpoint directory.*",
    ".*no pre-optimization state was saved.*",  # one step a batch: the checkpoint is of the version it names
    ".*your dataloader is not resumable.*",  # the data module is: its ledger travels in the checkpoint
)

PATIENCE_SECONDS = 10.0


def console() -> None:
    """Entry point of the command `fr-lightning`: ends the process, whatever threads an environment has left in it."""
    code = main()

    def leave() -> None:
        time.sleep(PATIENCE_SECONDS)
        alive = [thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main_thread)]
        if not alive:  # a logger that uploads as the process ends may take its time
            return
        print(f"fr-lightning: left behind threads that do not end: {', '.join(alive)}", file=sys.stderr, flush=True)
        os._exit(code)

    main_thread = threading.main_thread()
    threading.Thread(target=leave, daemon=True).start()  # Python itself would wait for them for ever
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """`fr-lightning` with these arguments; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:  # a console script lacks it, and a user's environment lives there
        sys.path.insert(0, os.getcwd())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: fr-lightning COMMAND [options]\n\n{CONFIGS_HELP}")
        return 0
    command, rest = arguments[0], arguments[1:]
    own: dict[str, Callable[[list[str]], int]] = {
        "doctor": _doctor,
        "play": _play,
        "warm-start": _warm_start,
        "export": _export,
    }
    if command in own:
        return own[command](rest)
    if command in ("fit", "validate", "test", "predict"):
        return _lightning([command, *rest])
    if command == "--version":
        print(importlib.import_module("fr_lightning").__version__)
        return 0
    print(f"fr-lightning: no command {command!r}\n\n{CONFIGS_HELP}", file=sys.stderr)
    return 2


def _lightning(arguments: list[str]) -> int:
    # Engine and learner share the machine's cores: a spinning OpenMP thread of one would starve the other. Both must be
    # in place before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from fr_lightning.callbacks import Disagreement
    from fr_lightning.checkpoints import NoCheckpoint
    from fr_lightning.engines.base import EngineError
    from fr_lightning.envs.base import NotReady
    from fr_lightning.interruption import by_hand, exit_code
    from fr_lightning.lora import NoSuchLayer
    from fr_lightning.models import ModelNotFound
    from fr_lightning.rollout.ledger import ResumeRefused
    from fr_lightning.rollout.pool import PoolFailed
    from fr_lightning.trainer import FlashCLI, Unsaved, WrongSetting

    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    # LightningCLI reads sys.argv, and so do the processes that a distributed launcher starts
    sys.argv = [sys.argv[0], *_resolve_configs(arguments)]
    clear = (
        WrongSetting, NoCheckpoint, ResumeRefused, Unsaved, ModelNotFound, NotReady, Disagreement, PoolFailed,
        EngineError, FloatingPointError, NoSuchLayer,
    )  # fmt: skip
    try:
        FlashCLI.run()
    except SIGTERMException:  # Lightning would exit with 0, as if all were done
        return exit_code()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:  # Lightning's way out of a KeyboardInterrupt, with 1, is not the parser's
        if not by_hand():
            raise
        return exit_code()
    except clear as error:
        print(f"fr-lightning: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"fr-lightning: {error}: free some space, then go on with --ckpt_path FOLDER", file=sys.stderr)
        return 1
    return 0


def _resolve_configs(arguments: list[str]) -> list[str]:
    """Configurations that are not found here are taken from those in the package."""
    from importlib.resources import files

    shipped = files("fr_lightning.configs")
    resolved = list(arguments)
    for place, argument in enumerate(arguments):
        option, separator, value = argument.partition("=")
        if option not in ("--config", "-c"):
            continue
        if not separator:
            place, value = place + 1, arguments[place + 1] if place + 1 < len(arguments) else ""
        name = value.removeprefix("configs/")
        if value and not os.path.exists(value) and (shipped / name).is_file():
            resolved[place] = f"{option}={shipped / name}" if separator else str(shipped / name)
    return resolved


def _doctor(arguments: list[str]) -> int:
    argparse.ArgumentParser(
        "fr-lightning doctor", description="What this machine has, and what is missing."
    ).parse_args(arguments)
    from fr_lightning.doctor import report

    return report()


def _play(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("fr-lightning play", description="Play an environment yourself in the terminal.")
    parser.add_argument("--env", required=True, help="a Gymnasium id such as fr_lightning/Calculator-v0")
    parser.add_argument("--seed", type=int, default=None, help="of the task; default: a new one every time")
    chosen = parser.parse_args(arguments)
    from fr_lightning.play import play

    return play(chosen.env, chosen.seed)


def _export(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fr-lightning export", description="The policy of a checkpoint as a plain Hugging Face folder."
    )
    parser.add_argument("--checkpoint", required=True, help="a .ckpt file of fr-lightning fit")
    parser.add_argument("--model", required=True, help="the model the run began with: name, folder or GGUF file")
    parser.add_argument("--output", required=True, help="folder to write; must not exist yet")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter alone, in peft's format")
    chosen = parser.parse_args(arguments)
    from fr_lightning.export import export

    return export(chosen.checkpoint, chosen.model, chosen.output, adapter=chosen.adapter)


def _warm_start(arguments: list[str]) -> int:
    from fr_lightning.warm_start import command

    return command(arguments)


if __name__ == "__main__":
    console()
