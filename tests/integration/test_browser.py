"""Pages drawn by a real browser, with the command that rewards/README.md gives."""

import os
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from serving import reply, serving

from mmrl_rewards import render
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import bind
from mmrl_rewards.services.renderer import DrawingError, ExternalRenderer

README = Path(__file__).parents[2] / "rewards" / "README.md"
BLOCKS = [YAML(typ="safe").load(text) for text in re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)]
(COMMAND,) = (
    term["args"]["renderer"]["command"]
    for block in BLOCKS
    for term in block["rewards"]["terms"]
    if term["fn"] == "mmrl_rewards.render:page"
)
PAGE = '<body style="margin: 9px"><h1>{}</h1><div style="width: 300px; height: 200px; background: {}"></div></body>'
TARGET = PAGE.format("Opening hours", "teal")

pytestmark = pytest.mark.skipif(not Path(COMMAND[0]).exists(), reason=f"there is no browser {COMMAND[0]}")


def browser(**limits):
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return {"language": "html", "command": [COMMAND[0], *as_root, *COMMAND[1:]], "timeout_s": 300.0, **limits}


def test_the_nearer_the_page_the_more_it_earns(tmp_path):
    page = bind(render.page, {"renderer": browser(cache=str(tmp_path))})
    answers = [TARGET, PAGE.format("Opening hourz", "teal"), PAGE.format("Closed", "wheat")]
    values = []
    for answer in answers:
        row = {"fn": "", "sample": {"answer_type": "text", "value": TARGET}, "response": f"<answer>{answer}</answer>"}
        values.append(page(*Case.model_validate({**row, "expected": 0, "source": ""}).build()).value)
    assert values[0] == 1.0
    assert 1.0 > values[1] > values[2]


def test_a_page_reaches_no_network_and_no_service_of_this_machine():
    asked = []

    def note(handler):
        asked.append(handler.path)
        reply(handler, b"")

    with serving(note) as here:
        port = here.rpartition(":")[2]
        page = (
            f'<img src="{here}/image"><iframe src="http://localhost:{port}/frame"></iframe>'
            f'<link rel="stylesheet" href="{here}/style"><script>fetch("{here}/fetch", {{mode: "no-cors"}}); '
            f'new WebSocket("ws://127.0.0.1:{port}/socket")</script>'
        )
        assert ExternalRenderer.model_validate(browser()).draw(TARGET + page).shape == (600, 800, 3)
        assert asked == []
        open_door = [word for word in browser()["command"] if not word.startswith("--proxy")]
        ExternalRenderer.model_validate(browser(command=open_door)).draw(TARGET + page)
        assert "/image" in asked  # it is the command that keeps the page in


def test_a_page_that_never_ends_costs_its_time():
    with pytest.raises(DrawingError, match="more than 3 s"):
        ExternalRenderer.model_validate(browser(timeout_s=3.0)).draw("<script>while (true);</script>")
