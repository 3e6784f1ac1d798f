"""An environment whose metrics have other names from episode to episode, and so from rank to rank."""

import os
from typing import Any

from fr_lightning.envs.arithmetic import CalculatorEnv


class UnevenEnv(CalculatorEnv):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        info["metrics"] = {f"problem/{self.problem}": 1.0}
        return observation, reward, terminated, truncated, info


class FailingEnv(UnevenEnv):
    """Works for some episodes, and then never again on one rank."""

    resets = 0

    def reset(self, **settings: Any) -> tuple[str, dict]:
        FailingEnv.resets += 1
        if os.environ.get("RANK") == "1" and FailingEnv.resets > 30:
            raise FileNotFoundError("the games are gone")
        return super().reset(**settings)
