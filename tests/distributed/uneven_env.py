"""An environment whose metrics have other names from episode to episode, and so from rank to rank."""

import os
import time
from typing import Any

from fr_lightning.envs import TextEnv
from fr_lightning.envs.arithmetic import CalculatorEnv


class UnevenEnv(CalculatorEnv):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        info["metrics"] = {f"problem/{self.problem}": 1.0}
        return observation, reward, terminated, truncated, info


class LongOnOneRank(TextEnv):
    """One turn on one rank, twenty on the other, where the answers also take their time."""

    def reset(self, **settings: Any) -> tuple[str, dict]:
        super().reset(seed=settings.get("seed"))
        self.turns_left = 20 if os.environ.get("RANK") == "1" else 1
        return "Say something.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turns_left -= 1
        time.sleep(0.02 * bool(self.turns_left))
        return "More.", float(len(action) % 2), self.turns_left == 0, False, {}


class FailingEnv(UnevenEnv):
    """Works for some episodes, and then never again on one rank."""

    resets = 0

    def reset(self, **settings: Any) -> tuple[str, dict]:
        FailingEnv.resets += 1
        if os.environ.get("RANK") == "1" and FailingEnv.resets > 30:
            raise FileNotFoundError("the games are gone")
        return super().reset(**settings)
