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
    assert links and all((REPOSITORY / link.split("#")[0]).exists() for link in links)
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


def test_every_size_fits_with_room_and_is_planned_as_the_table_says(capsys):
    from launch import check, plan

    lines = {
        re.search(r"`bash launch/\w+\.sh (\S+)`", line).group(1): line
        for line in README.splitlines()
        if "`bash launch/" in line and line.startswith("|")
    }
    shipped = check.shipped()
    assert set(lines) == {path.stem for _, path in shipped}
    evidence = {name: line.strip("| ").rpartition("|")[2].strip() for name, line in lines.items()}
    assert set(evidence.values()) <= {"trained", "stepped", "parity", "planned"}
    proven = (REPOSITORY / "docs" / "model_sizes.md").read_text().partition("## Evidence")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in proven for name, kind in evidence.items() if kind == "parity")
    for name, path in shipped:
        plan.main([name, "--deepspeed_config", str(path), "--json"])
        values, line = json.loads(capsys.readouterr().out), lines[path.stem]
        assert values["memory_bytes"]["device"] < 0.95 * values["memory_available_bytes"], path.name
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert f"{values['gpus']:,} x {values['gpu']}" == cells[2]
        script = "local" if values["gpus"] <= values["gpus_per_node"] else "slurm"
        assert f"launch/{script}.sh" in cells[1]
        sizes = {**values["layout"], "ZeRO": values["zero_stage"]}
        for part in cells[3].removesuffix(", offload").split(", "):
            kind, size = re.split(r"[ -]", part)
            assert sizes[kind] == int(size), (path.name, part)
        if "*" in cells[5]:
            assert float(cells[5].strip("*").replace(",", "")) == float(f"{values['tokens_per_s']:.3g}"), path.name
        if cells[6].endswith("days"):
            assert cells[6] == f"{values['days']:,.0f} days", path.name
        if cells[7].endswith("GB"):
            assert cells[7] == f"{values['checkpoint_bytes'] / 1e9:,.0f} GB", path.name
