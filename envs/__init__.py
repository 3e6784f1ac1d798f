"""Environments. Each is registered with Gymnasium under `fr_lightning/`; README.md says how to add one."""

import gymnasium

from fr_lightning.envs.base import NotReady, TextEnv

__all__ = ["NotReady", "TextEnv"]

for _id, _entry in {
    "fr_lightning/Arithmetic-v0": "fr_lightning.envs.arithmetic:ArithmeticEnv",
    "fr_lightning/Calculator-v0": "fr_lightning.envs.arithmetic:CalculatorEnv",
    "fr_lightning/Math-v0": "fr_lightning.envs.math_problems:MathEnv",
    "fr_lightning/PythonTool-v0": "fr_lightning.envs.python_tool:PythonToolEnv",
    "fr_lightning/ALFWorld-v0": "fr_lightning.envs.alfworld_env:ALFWorldEnv",
    "fr_lightning/ReasoningGym-v0": "fr_lightning.envs.reasoning_gym_env:ReasoningGymEnv",
}.items():
    if _id not in gymnasium.registry:
        gymnasium.register(id=_id, entry_point=_entry, disable_env_checker=True, order_enforce=False)
