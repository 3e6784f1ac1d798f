"""The process that plays ALFWorld games for `alfworld_workers`: requests in, what the game says out.

Invariant: a reply is what the engine said, or an error that says whether the game or the engine is at fault; never a
guess. `main` is the entry point.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fr_lightning.envs import alfworld_speedups
from fr_lightning.envs.alfworld_engine import Engine, GameError
from fr_lightning.envs.worker_process import serve


def main(speedups: str, cache: str, live_games: str) -> None:
    """Serve until the trainer closes the pipe. Empty strings switch a setting off, or leave it to the engine."""
    logging.disable(logging.CRITICAL)
    if speedups:
        alfworld_speedups.install(Path(cache) if cache else None)
    engine = Engine(share=bool(speedups), live_games=int(live_games) if live_games else None)
    serve(lambda request: answer(engine, request))


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """`{"do": "open" | "step" | "plan", "key", …}`; `closed` lists games that nobody plays any more.

    `then` is a request to answer right after a game was opened, before it may be let go of for another.
    """
    for key in request.get("closed", ()):
        engine.close(key)
    key = request["key"]
    try:
        match request["do"]:
            case "open":
                opened = engine.open(key, request["game"], request["commands"])
                then = request.get("then")
                return opened if then is None else {**opened, "then": answer(engine, {**then, "key": key})}
            case "step":
                return engine.step(key, request["command"])
            case "plan":
                return engine.plan(key)
        return {"engine_error": f"no request is called {request['do']!r}"}
    except GameError as error:
        return {"game_error": str(error)}
    except Exception as error:
        engine.close(key)
        return {"engine_error": f"{type(error).__name__}: {error}"}
