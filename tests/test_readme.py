"""What the README shows is run, and what it links to is there."""

import json
import re
import shlex
import sys

import pytest

from tests.conftest import REPOSITORY, launch

README = (REPOSITORY / "README.md").read_text()


def test_links_and_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and all((REPOSITORY / link).exists() for link in links)
    names = re.findall(r"`((?:recipes|ds_configs|data_prep|launch|monitoring|tests|docs)/[\w./]+)`", README)
    assert names and all((REPOSITORY / name).exists() for name in names)


@pytest.mark.slow
def test_own_text_in_three_commands(tmp_path):
    section = re.search(r"## Train on your own text.*?## ", README, re.DOTALL).group(0)
    commands = [line for line in section.splitlines() if line.startswith("python ")]
    assert len(commands) == 6
    words = "some words of my own that repeat and repeat, line after line"
    lines = (json.dumps({"text": f"{words} {n} {words[n % 30 :]}"}) for n in range(400))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    for command in commands:
        command = re.sub(r"(?<![\w/])(mine/|runs\b|exports/|text\.jsonl)", rf"{tmp_path}/\1", command)
        if "pretrain.py" in command:
            command += " schedule.steps=2 schedule.warmup_steps=1"
        finished = launch([sys.executable, *shlex.split(command)[1:]])
        assert finished.code == 0, (command, finished.output)
    assert "Once" in finished.output
    assert (tmp_path / "exports" / "mine" / "model.safetensors").exists()
