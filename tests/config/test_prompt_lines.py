"""Prompts files: plain text as ever, and JSON lines with inputs and sizes."""

import json

import pytest

from maxdiffusion.config import load_config
from maxdiffusion.config.validate import (
    VideoRequestLine,
    read_prompts_file,
    read_request_lines,
)
from maxdiffusion.errors import ProblemsFound
from tests.config.test_validate import TINY


def written(tmp_path, text, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(path):
    with pytest.raises(ProblemsFound) as caught:
        read_prompts_file(str(path))
    return [str(problem) for problem in caught.value.problems]


def test_text_lines_have_a_prompt_alone(tmp_path):
    path = written(tmp_path, "\ufeffone\n\n  {braces} are text \n", "prompts.txt")
    assert read_prompts_file(str(path)) == (
        VideoRequestLine(prompt="one", source="prompts.txt:1"),
        VideoRequestLine(prompt="{braces} are text", source="prompts.txt:3"),
    )


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_json_lines_have_inputs_and_sizes(tmp_path, name):
    full = {
        "prompt": "a fox\u2028runs",
        "image": "fox.png",
        "last_image": "/data/last.png",
        "video": "https://example.org/a.mp4",
        "mask": "masks",
        "reference_images": ["one.png", "two.png"],
        "seed": 3,
        "height": 480,
        "width": 832,
        "num_frames": 49,
    }
    lines = [json.dumps(full, ensure_ascii=False), "", '{"prompt": "", "image": null}']
    path = written(tmp_path, "\n".join(lines), name)
    first, second = read_prompts_file(str(path))
    assert first == VideoRequestLine(
        prompt="a fox\u2028runs",
        image=str(tmp_path / "fox.png"),
        last_image="/data/last.png",
        video="https://example.org/a.mp4",
        mask=str(tmp_path / "masks"),
        reference_images=(str(tmp_path / "one.png"), str(tmp_path / "two.png")),
        seed=3,
        height=480,
        width=832,
        num_frames=49,
        source=f"{name}:1",
    )
    assert second == VideoRequestLine(prompt="", source=f"{name}:3")
    assert second.field("image") == f"{name}:3 image"


def test_every_problem_is_named_with_its_line(tmp_path):
    lines = [
        '{"prompt": "fine"}',
        '{"prompt": "a", "imagee": "a.png", "height": 481}',
        '{"image": ""}',
        '{"prompt": "a", "seed": "3", "reference_images": "a.png"}',
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a"',
        '"text"',
        '{"prompt": 3, "num_frames": 80}',
    ]
    found = problems(written(tmp_path, "\n".join(lines)))
    expected = [
        "prompts.jsonl:2 imagee='a.png': no such field in a line. The nearest is 'image'.",
        "prompts.jsonl:2 height=481: must be a multiple of 16 >= 16. Use 480 or 496.",
        "prompts.jsonl:3 image='': must be the path or address of a file.",
        "prompts.jsonl:3 prompt=None: a line needs a prompt.",
        "prompts.jsonl:4 reference_images='a.png': must be a list",
        "prompts.jsonl:4 seed='3': must be a number.",
        "prompts.jsonl:5=",
        "prompts.jsonl:6=",
        "prompts.jsonl:7=",
        "prompts.jsonl:8 prompt=3: must be text.",
        "prompts.jsonl:8 num_frames=80: must be an integer of the form 4n+1",
    ]
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start), line
    assert "prompt: stated twice" in found[6]
    assert "is not JSON" in found[7]
    assert "must be a JSON object" in found[8]


def test_a_config_gives_its_prompts_or_those_of_the_file(tmp_path):
    plain = load_config([str(TINY), 'prompt=["one", "two"]'])
    assert read_request_lines(plain) == tuple(VideoRequestLine(prompt=p) for p in ("one", "two"))
    path = written(tmp_path, '{"prompt": "one", "seed": 5}\n{"prompt": "two"}\n')
    of_file = load_config([str(TINY), f"prompts_file={path}"])
    lines = [(line.prompt, line.seed) for line in read_request_lines(of_file)]
    assert lines == [("one", 5), ("two", None)]


def test_files_that_cannot_be_used(tmp_path):
    assert "No such file" in problems(tmp_path / "none.jsonl")[0]
    assert "has no prompts" in problems(written(tmp_path, "\n \n"))[0]
    binary = tmp_path / "a.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in problems(binary)[0]
