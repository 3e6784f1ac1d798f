"""An environment whose metrics have other names from episode to episode, and so from rank to rank."""

from fr_lightning.envs.arithmetic import CalculatorEnv


class UnevenEnv(CalculatorEnv):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        info["metrics"] = {f"problem/{self.problem}": 1.0}
        return observation, reward, terminated, truncated, info
