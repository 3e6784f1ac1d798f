"""Imports go one way, by the source itself: a folder's name says what may live there."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("envs", "callbacks", "configs")


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def core(*names: str) -> list[Path]:
    """Files of the core by their paths in `fr_lightning`, folders whole; none named: all but the linked folders."""
    everything = [path for path in files("fr_lightning") if path.relative_to(ROOT).parts[1] not in LINKED]
    wanted = [ROOT / "fr_lightning" / name for name in names]
    return [path for path in everything if not names or any(path == w or w in path.parents for w in wanted)]


def imports(path: Path) -> set[str]:
    """Every module of ours a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[: -node.level]) if node.level else ""
            package = package if package.startswith("fr_lightning") or not package else f"fr_lightning.{package}"
            found |= {".".join(filter(None, (package, node.module, alias.name))) for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fr_lightning"}


def offenders(paths: list[Path], *allowed: str) -> dict[str, set[str]]:
    """Imports that start with none of the allowed modules."""
    assert paths
    found = {
        str(path.relative_to(ROOT)): {
            name for name in imports(path) if not any(f"{name}.".startswith(f"fr_lightning.{a}.") for a in allowed)
        }
        for path in paths
    }
    return {path: names for path, names in found.items() if names}


def test_environments_know_trajectories_and_their_own_folder_only():
    assert not offenders(files("envs"), "trajectory", "envs")


def test_trajectory_knows_nothing():
    assert not offenders(core("trajectory.py"))


@pytest.mark.parametrize("name", ["advantage.py", "objective.py", "packing.py"])
def test_the_mathematics_knows_trajectories_at_most(name):
    assert not offenders(core(name), "trajectory")


def test_the_mathematics_is_pure_torch():
    for name in ("advantage.py", "objective.py", "packing.py", "trajectory.py"):
        text = (ROOT / "fr_lightning" / name).read_text()
        assert "lightning.pytorch" not in text
        assert "transformers" not in text
        assert "torch.nn.Module" not in text


def test_rollouts_engines_and_policy_do_not_know_the_learner():
    assert not offenders(core("rollout"), "trajectory", "engines.base", "rollout")
    assert not offenders(core("engines"), "trajectory", "engines", "models", "routing", "rollout.conversation")
    assert not offenders(
        core("policy.py", "logprobs.py", "lora.py", "models.py", "routing.py", "weights.py"),
        *("trajectory", "models", "logprobs", "lora", "routing", "policy"),
    )


def test_the_core_knows_no_concrete_environment_engine_or_callback():
    roots = {"cli.py", "trainer.py", "doctor.py", "play.py", "assets"}  # where the parts are put together
    paths = [p for p in core() if p.relative_to(ROOT / "fr_lightning").parts[0] not in roots | {"engines"}]
    concrete = {
        str(path): name
        for path in paths
        for name in imports(path)
        if name.startswith(("fr_lightning.callbacks", "fr_lightning.envs", "fr_lightning.engines"))
        and not name.startswith(("fr_lightning.envs.base", "fr_lightning.engines.base"))
    }
    assert not concrete


def test_callbacks_know_no_environment_and_no_engine():
    bad = {p: n for p in files("callbacks") for n in imports(p) if ".envs" in n or ".engines" in n}
    assert not bad


def test_the_objective_is_one_small_file():
    assert len((ROOT / "fr_lightning" / "objective.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_links(name):
    link = ROOT / "fr_lightning" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_no_file_is_named_like_a_module_it_would_hide():
    names = {path.name for folder in ("fr_lightning", "envs", "callbacks") for path in (ROOT / folder).glob("*.py")}
    assert not names & {"math.py", "alfworld.py", "queue.py", "random.py", "types.py"}
