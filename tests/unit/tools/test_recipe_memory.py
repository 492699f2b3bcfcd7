"""tools/recipe_memory.py: the comments of recipes hold what it prints, and it counts as a model does."""

import re
from pathlib import Path

import pytest
from tool_modules import load_tool

from mmrl.config import load_config

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("qwen3*.yaml"))


@pytest.fixture(scope="module")
def tool():
    return load_tool("recipe_memory")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_states_the_memory_that_the_tool_computes(tool, recipe):
    text = recipe.read_text(encoding="utf-8")
    command = re.search(r"`python tools/recipe_memory.py \S+/(\w+)\.yaml(?: --ranks (\d+))?`", text)
    assert command[1] == recipe.stem
    launched = re.search(r"--nproc (\d+)", text)
    assert command[2] == (launched[1] if launched else None)
    config = load_config(recipe).config
    lines = tool.describe(config, tool.find_shapes(config), int(command[2] or 1), 80.0)
    stated = re.findall(r"^#   (.*)$", text.partition(command[0])[2], re.MULTILINE)
    assert stated == lines


def test_recipes_leave_a_tenth_of_each_gpu_free(tool):
    for recipe in RECIPES:
        found = re.findall(r"(?:learns|generates|server): (\d+) GB", recipe.read_text(encoding="utf-8"))
        assert found and max(map(int, found)) < 0.9 * 80, recipe.stem


def test_zero_divides_memory_over_ranks_and_an_adapter_has_its_own_parameters(tool):
    config = load_config(RECIPES[0].with_name("qwen3_5_4b_full_8x80gb.yaml")).config
    shapes = tool.find_shapes(config)
    shapes = shapes | {"text_config": shapes["text_config"] | {"num_hidden_layers": 4}}
    one, four = (list(tool.memory_parts(config, shapes, ranks, 80.0)) for ranks in (1, 4))
    for alone, divided in zip(one, four, strict=True):
        held = alone.where == "always"
        assert divided.num_bytes == pytest.approx(alone.num_bytes / 4 if held else alone.num_bytes)
    adapted = load_config(RECIPES[0].with_name("qwen3_5_4b_lora_80gb.yaml")).config
    parts = {part.name: part.num_bytes for part in tool.memory_parts(adapted, shapes, 1, 80.0)}
    # Rank 32 times inputs and outputs: of feed-forward layers, of recurrent layers, of attention with its gates.
    feed_forward = 4 * 3 * (2560 + 9216)
    recurrent = 3 * (2560 + 8192 + 2560 + 4096 + 4096 + 2560)
    attention = (2560 + 8192) + 2 * (2560 + 1024) + (4096 + 2560)
    assert parts["adapter of rank 32, float32"] == 4 * 32 * (feed_forward + recurrent + attention)
    assert parts["gradients"] == parts["adapter of rank 32, float32"]


def test_unknown_checkpoint_is_refused_with_the_option_that_names_its_shapes(tool):
    config = load_config(ROOT / "configs" / "recipes" / "qwen2_5_vl_3b_full_80gb.yaml").config
    with pytest.raises(SystemExit, match="--config-json"):
        tool.find_shapes(config)
