import shutil

import pytest

from serving.config import EngineConfig
from serving.engine.build import load_engine
from serving.errors import ConfigError
from tests.model_files import LLAMA3


def test_what_is_not_followed_of_a_folder_is_a_line_of_the_log(tmp_path, caplog):
    folder = shutil.copytree(LLAMA3, tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    with pytest.raises(ConfigError, match="--max-seq-len"):  # so that nothing is compiled
        load_engine(EngineConfig(str(folder), max_seq_len=10**6), lambda _: None)
    assert "num_beams is not followed" in caplog.text
