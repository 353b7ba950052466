"""Presets by name, from any directory."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import yaml

from hvd_deepreduce import Config, ConfigError, resources
from hvd_deepreduce.config import presets

FILES = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))


def test_names_are_those_of_the_shipped_files():
    assert list(presets.files()) == sorted({file.stem for file in FILES}) and len(presets.files()) == len(FILES)
    assert presets.names() == sorted([*presets.files(), *presets.ALIASES])
    assert len(presets.files(every=False)) == 13


def test_the_default_config_is_the_recommended_one():
    assert Config.load(None) == Config() == Config.load("recommended")


def test_no_two_presets_are_equal():
    """An equal one is an alias."""
    assert len({Config.load(name).digest() for name in presets.files()}) == len(presets.files())
    for alias, name in presets.ALIASES.items():
        assert alias not in presets.files() and presets.find(alias) == presets.find(name)
        assert alias in presets.aliases_of(name)


def test_reduce_scatter_is_fast_with_another_exchange():
    assert Config.load("fast", exchange={"name": "reduce_scatter", "density": 0.01}) == Config.load("reduce_scatter")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_name_gives_the_same_config_as_the_file_from_any_directory(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Config.load(file.stem) == Config.load(file)
    assert Config.load(file.stem, seed=5).seed == 5


@pytest.mark.parametrize("name", presets.names())
def test_a_config_prints_as_a_table_which_is_yaml(name):
    config = Config.load(name, seed=3)
    lines = str(config).splitlines()
    width = 2 + max(len(key) for key, value in config.to_dict().items() if value is not None)
    assert f"{'seed:':<{width}}3" in lines and f"{'scope:':<{width}}{config.scope}" in lines
    assert [line.split(":")[0] for line in lines] == [
        key for key, value in config.to_dict().items() if value is not None
    ]
    assert all(line[width - 1] == " " != line[width] for line in lines), "the values are in one column"
    assert Config.load(yaml.safe_load(str(config))) == config


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(ConfigError, match="^no preset is named 'topk_rice'; the presets are: ") as error:
        Config.load("topk_rice")
    assert all(name in str(error.value) for name in presets.names())
    assert str(error.value).endswith(". Did you mean 'topk_rice_qsgd'?")
    assert "To read a file, give a path that ends in .yaml or .yml, or one with a directory" in str(error.value)
    for unknown in ("", ".", "TOPK_RICE_QSGD", "topk_rice_qsgd "):
        with pytest.raises(ConfigError, match="^no preset is named"):
            Config.load(unknown)


def test_a_file_in_the_current_directory_does_not_replace_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("topk_rice_qsgd", "topk_rice_qsgd.yaml", "mine"):
        (tmp_path / name).write_text("seed: 77\n")
    assert Config.load("topk_rice_qsgd").seed == 0
    with pytest.raises(ConfigError, match="no preset is named 'mine'.*such as './my_config'"):
        Config.load("mine")
    here = "." + os.sep
    for path in ("topk_rice_qsgd.yaml", here + "topk_rice_qsgd", here + "mine", Path("topk_rice_qsgd"), Path("mine")):
        assert Config.load(path).seed == 77


@pytest.mark.parametrize("ending", [".yaml", ".yml"])
def test_a_path_that_does_not_exist_hints_at_the_preset(ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (f"configs/topk_rice_qsgd{ending}", f"topk_rice_qsgd{ending}", Path(f"topk_rice_qsgd{ending}")):
        with pytest.raises(ConfigError) as error:
            Config.load(path)
        assert str(error.value) == (
            f"the config file {path} cannot be read: No such file or directory; to use the preset 'topk_rice_qsgd', "
            "give its name alone"
        )
    with pytest.raises(ConfigError) as error:
        Config.load(f"nowhere{ending}")
    assert str(error.value) == f"the config file nowhere{ending} cannot be read: No such file or directory"


def resources_in(package: Path):
    """A copy of resources.py in ``package``, as a module."""
    package.mkdir(exist_ok=True)
    copy = package / "resources.py"
    copy.write_text(Path(resources.__file__).read_text())
    spec = importlib.util.spec_from_file_location("resources_copy", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(folder: Path) -> None:
    """One file of each kind, as in a checkout or an installed package."""
    for file in ("configs/a.yaml", "kernels/rice/rice.cu"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


@pytest.mark.parametrize("name", ["configs", "kernels"])
def test_without_the_folder_the_error_says_so(name, tmp_path):
    package = tmp_path / "package"
    with pytest.raises(FileNotFoundError, match=f"hvd_deepreduce has no folder '{name}' with files"):
        resources_in(package).folder(name)
    (package / name / "__pycache__").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"neither inside {re.escape(str(package))} nor beside it"):
        resources_in(package).folder(name)


@pytest.mark.parametrize("name", ["configs", "kernels"])
def test_the_folder_inside_the_package_is_preferred_unless_it_is_a_leftover(name, tmp_path):
    """An update of a checkout leaves folders with ignored files in them, where tracked files were moved away."""
    package = tmp_path / "package"
    fill(tmp_path)
    assert resources_in(package).folder(name) == tmp_path / name
    for leftover in ("__pycache__/a.pyc", "cpu/__pycache__/a.pyc", "cpu/rice.o"):
        (package / name / leftover).parent.mkdir(parents=True, exist_ok=True)
        (package / name / leftover).touch()
    (package / name / "empty").mkdir()
    assert resources_in(package).folder(name) == tmp_path / name
    fill(package)
    assert resources_in(package).folder(name) == package / name
