"""Every file in config/ is a configuration of train.py, without running it."""

from pathlib import Path

import pytest

import train

CONFIGS = sorted((Path(__file__).parent.parent / "config").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_and_value_is_known(path):
    given = {key: train.parse_value(key, value, path.name) for key, value in train.read_toml(str(path)).items()}
    config = train.Config(**given)
    assert (train.Path(train.__file__).parent / "data" / f"{config.task}.py").is_file()
    assert config.block_size > config.max_new_tokens
    if config.init_from == "scratch":
        train.check_config(config)
