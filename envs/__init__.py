"""Environments. Each is registered with Gymnasium under `fr_lightning/`; README.md says how to add one."""

import gymnasium

from fr_lightning.envs.base import TextEnv

__all__ = ["TextEnv"]

for _id, _entry in {
    "fr_lightning/Arithmetic-v0": "fr_lightning.envs.arithmetic:ArithmeticEnv",
    "fr_lightning/Calculator-v0": "fr_lightning.envs.arithmetic:CalculatorEnv",
    "fr_lightning/ALFWorld-v0": "fr_lightning.envs.alfworld_env:ALFWorldEnv",
}.items():
    if _id not in gymnasium.registry:
        gymnasium.register(id=_id, entry_point=_entry, disable_env_checker=True, order_enforce=False)
